"""The family `archive`: the value of notes to scripted policies, and properties of its tasks."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from agentrl.cli.running import load_recipe
from agentrl.errors import UserError
from agentrl.records import Split
from benchmarks.memory import measure
from sandboxes.archive import Archive
from sandboxes.archive.family import KINDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
async def test_notes_solve_tasks_that_one_episode_has_no_time_for() -> None:
    scores = await measure(0, steps=6)
    alone, noted = scores["alone"], scores["with notes"]
    assert noted[0] <= alone[0] + 0.2 and noted[1] <= 0.5, "a group of step 1 reads an empty memory"
    assert min(noted[4:6]) >= 0.8 > max(alone[4:6])
    assert noted[-1] >= alone[-1] + 0.15, "later parts of an evaluation read the notes of earlier ones"


def test_tasks_are_pure_and_a_project_keeps_its_drawers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Archive(3, projects=2)
    assert family.task(Split.TRAIN, 7) == Archive(3, projects=2).task(Split.TRAIN, 7) != Archive(4, projects=2).task(Split.TRAIN, 7)
    same, other, heldout = family.task(Split.TRAIN, 5), family.task(Split.TRAIN, 6), family.task(Split.HELDOUT, 5)
    layouts = [[text.split("\n")[0] for text in task.files.values()] for task in (family.task(Split.TRAIN, 7), same, other, heldout)]
    assert layouts[0] == layouts[1] and layouts[2] not in layouts[:2] and layouts[3] not in layouts[:3]
    assert len({task.data["project"] for task in (same, other, heldout)}) == 3 and len(same.files) == len(KINDS)
    monkeypatch.chdir(tmp_path)
    for path, text in same.files.items():
        (tmp_path / path).write_text(text)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(family.gold(same), {})
    assert printed.getvalue().strip() == same.data["answer"] and os.listdir(tmp_path)
    for wrong in (lambda: Archive(turns=9), lambda: family.task(Split.TRAIN, -1), lambda: family.task(Split.HELDOUT_REAL, 0)):
        with pytest.raises(UserError):
            wrong()
    recipe = load_recipe(ROOT / "recipes" / "archive.py", [])[1]
    assert recipe.memory is not None and recipe.memory.scope == "project"
