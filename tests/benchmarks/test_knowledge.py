"""The tables of notes and of transfer from finished runs, and errors for runs that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import knowledge
from recipes.doors import HOUSES, VISITS

Scores = Callable[[int, int], float | None]
"""The score of a visit to a house, both counted from 0."""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that a benchmark runs. Policies that read notes of the house find the gold at once from the second visit on."""
    commands_run: list[Sequence[str]] = []

    def finish(command: Sequence[str], **_: Any) -> None:
        commands_run.append(command)
        folder = Path(command[command.index("--run-dir") + 1])
        knows = not {*knowledge.NOTES["of other houses"], *knowledge.NOTES["none"]} & {*command}
        lucky = {"before": lambda visit, house: float(house % 4 == 0)}
        scores: Mapping[str, Scores] = {**lucky, "after": lambda visit, house: float(knows and visit > 0), "eval": lambda visit, house: 0.5}
        for phase in ("eval",) if "eval" in command else ("before", "after"):
            write(folder, phase, scores[phase])

    monkeypatch.setattr(knowledge, "RUNS", tmp_path)
    monkeypatch.setattr(knowledge.subprocess, "run", finish)
    return commands_run


def write(folder: Path, phase: str, score: Scores) -> None:
    lines = [
        {"task_id": f"doors/heldout/{visit * HOUSES + house}", "kind": f"visit {visit + 1}", "score": score(visit, house)}
        for visit in range(VISITS)
        for house in range(HOUSES)
    ]
    (folder / "episodes").mkdir(parents=True, exist_ok=True)
    (folder / "episodes" / f"{phase}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_success_with_notes_counts_later_visits_per_house(commands: list[Sequence[str]]) -> None:
    head, _, *rows = knowledge.memory()
    cells = {row.split(" | ")[0].removeprefix("| "): row.removesuffix(" |").split(" | ")[1:] for row in rows}
    assert head == "| policy | notes of the house | none | of other houses |" and len(commands) == 6 + 3 + 6
    lucky, always, never = (
        "0.25 [0.15, 0.39] (0.25, 0.25, 0.25)",  # Wilson, 12 of 48 houses
        "1.00 [0.93, 1.00] (1.00, 1.00, 1.00)",
        "0.00 [0.00, 0.07] (0.00, 0.00, 0.00)",
    )
    assert cells["not trained"] == [lucky, lucky, never]
    assert cells["trained with notes"] == [always, never, never], "a score of 0.5 is a later try"
    assert cells["trained without notes"] == ["", never, ""]
    evaluated = [" ".join(command) for command in commands if "eval" in command]
    assert sum(f"policy.model={knowledge.RUNS}/doors-of-the-house-" in command for command in evaluated) == 6
    assert knowledge.memory() == [head, _, *rows] and len(commands) == 15, "finished runs are read"


def test_transfer_evaluates_every_policy_in_every_environment(commands: list[Sequence[str]]) -> None:
    rows = knowledge.transfer()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| nothing", "| lake", "| networks of 4", "| doors"]
    assert all(row.count("0.50 [0.50, 0.50]") == len(knowledge.TARGETS) for row in rows[2:])
    assert len(commands) == len(knowledge.SOURCES) + 4 * len(knowledge.TARGETS)


def test_runs_with_other_settings_or_without_scores_are_an_error(commands: list[Sequence[str]]) -> None:
    folder = knowledge.run("train", "a run", "doors", ["seed=0"])
    with pytest.raises(SystemExit, match="is a run with different settings\nfix: delete it"):
        knowledge.run("train", "a run", "doors", ["seed=1"])
    write(folder, "after", lambda visit, house: None if house else 1.0)
    with pytest.raises(SystemExit, match="have no score"):
        knowledge.attempts(folder, "after")
