"""The tasks of a run change while two rollout workers sample its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.recipe import load
from agentrl.experience import SqliteStore
from agentrl.session.task_changes import open_changes
from agentrl.task import GroupSchedule
from agentrl.task.changes import read_changes
from agentrl.task.schedule import open_family

from .conftest import ROOT, SMALL, agentrl, start, steps_logged, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"


@pytest.mark.usefixtures("nothing_left")
def test_workers_sample_the_tasks_in_use_at_the_start_of_their_groups(tmp_path: Path, forked: tuple[str, ...]) -> None:
    """A family is added and a kind is removed while step 2 or a later one is sampled. The changes and the seed determine the task
    of each group, in both workers."""
    run = tmp_path / "run"
    arguments = ("train", RECIPE, "steps=9", *SMALL, "evaluation.heldout_real=0", "rollout.workers=2", "--run-dir", str(run))
    process = start(*arguments, "--sandbox", "bubblewrap", by=forked)
    wait_for(lambda: bool(steps_logged(run)), process, timeout=300)
    added = ("add", str(run), "sandboxes.tables:Tables", "kinds=total", "--name", "totals", "--seed", "5", "--weight", "2")
    for change in (added, ("remove", str(run), "average")):
        code, output = agentrl("tasks", *change)
        assert code == 0, output
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]
    assert output.count("from group ") == 2 and "Traceback" not in output

    recipe = load(run / "recipe.json")
    family = open_family(recipe.tasks, seed=recipe.seed, root=ROOT)
    schedule = GroupSchedule(family, recipe.seed, changes=open_changes(recipe, run, family, ROOT))
    first, second = (logged.start.first for logged in read_changes(run) if logged.start is not None)
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(range(len(store.entries())))
    store.close()
    assert len(groups) == 9 * 4 and 0 < first <= second < len(groups)
    tasks = [schedule.task(group.index) for group in groups]
    assert [(group.task_id, group.task_key) for group in groups] == [(task.id, task.key) for task in tasks]
    assert not any(task.id.startswith("tables-5-") for task in tasks[:first]) and "average" in {task.kind for task in tasks[:second]}
    after = tasks[second:]
    assert "average" not in {task.kind for task in after} and 2 * sum(task.id.startswith("tables-5-") for task in after) >= len(after)
    assert any(scored.score.value is not None for group in groups[second:] for scored in group.episodes)
    code, output = agentrl("store", str(run), "--verify")
    assert code == 0, output
