"""A run without a last step ends with an evaluation and a result when it is stopped, and can be resumed."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.base.run_lock import drive_folder
from agentrl.cli import app
from agentrl.config import Recipe
from agentrl.errors import RecipeError, UserError
from agentrl.observe.summary import Summary, record_start
from agentrl.protocols import TaskFamily
from agentrl.records import VersionState
from agentrl.run import loop
from agentrl.session.folder import finished_summary
from agentrl.task.changes import TaskChange, TaskChanges, read_changes
from tests.driving import make_recipe
from tests.run.endless import Numbered, endless_recipe, endless_run, steps_done


def evaluated_recipe() -> Recipe:
    """Evaluates each step on a task."""
    return endless_recipe(**{"evaluation.every": 1, "evaluation.heldout": 1})


async def run_until(folder: Path, steps: int) -> tuple[int, Summary]:
    """Runs the pipeline, stops it after some steps, and returns the version that serves at the end and the summary."""
    recipe = evaluated_recipe()
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    record_start(folder)
    async with endless_run(folder, recipe) as run:
        assert run.progress.plan == "until it is stopped"
        running = asyncio.create_task(loop._pipeline(run))
        await steps_done(run, steps)
        run.stop_after_step()
        await asyncio.wait_for(running, 60)
        return run.served.version, loop._report(run, (), None)


@pytest.mark.slow
async def test_a_stopped_run_has_its_last_evaluation_and_a_resumed_one_continues(tmp_path: Path) -> None:
    """The second session continues a copy of the run folder at another path."""
    first, last = tmp_path / "first", 0
    (first / "logs").mkdir(parents=True)
    for steps, folder in ((3, first), (8, tmp_path / "copy")):
        if folder != first:
            shutil.copytree(first, folder)
            shutil.rmtree(first)
        version, summary = await run_until(folder, steps)
        assert version in (steps, steps + 1) and version > last, "the step in progress was finished"
        assert summary.finished and not summary.interrupted and summary.steps == version
        evaluated = {"before", *(f"step{number}" for number in range(1, version)), "after"}
        assert set(json.loads((folder / "evaluations.json").read_text())) == evaluated, "also the step at which the first session ended"
        async with endless_run(folder, evaluated_recipe()) as run:
            promoted = run.registry.get(version)
            assert promoted is not None and promoted.state is VersionState.PROMOTED
        assert finished_summary(folder, evaluated_recipe()) is None, "--resume trains further"
        last = version


async def test_a_run_that_is_stopped_before_it_trains_is_interrupted(tmp_path: Path) -> None:
    async with endless_run(tmp_path, endless_recipe()) as run:
        run.stop_after_step()
        assert run.progress.interrupted
        await asyncio.wait_for(loop._pipeline(run), 60)
        assert run.served.version == 0 and "after" not in json.loads((tmp_path / "evaluations.json").read_text())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_ends_needs_a_last_step(schedule: str) -> None:
    with pytest.raises(RecipeError, match="set constant or inverse_sqrt, or set steps"):
        make_recipe().but("steps=null", f"learner.lr_schedule={schedule}")
    make_recipe().but("steps=null", "learner.lr_schedule=inverse_sqrt", "learner.warmup_steps=5", "max_staleness=3")


def tasks(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["tasks", *map(str, arguments)], catch_exceptions=True)
    return result.output + str(result.exception or "")


@pytest.mark.slow
async def test_task_changes_apply_to_a_live_and_a_stopped_run_and_a_resumed_run_gives_each_group_the_same_task(tmp_path: Path) -> None:
    reference = "tests.run.endless:Numbered"
    recipe, last = endless_recipe(**{"tasks.family": reference}), 0
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    (tmp_path / "run.json").write_text(json.dumps({"overrides": [], "resume": "agentrl train mine.py --resume"}))
    for steps in (3, 12):
        with drive_folder(tmp_path, command="test"):
            async with endless_run(tmp_path, recipe, Numbered()) as run:
                running = asyncio.create_task(loop._pipeline(run))
                await steps_done(run, steps)
                if not last:
                    output = tasks("add", tmp_path, reference, "name=added", "--name", "added", "--weight", "3")
                    assert "family added is added with weight 3, starting with the next group\ncheck with: agentrl" in output, output
                    await steps_done(run, steps + 5)
                run.stop_after_step()
                await asyncio.wait_for(running, 60)
                last = run.served.version
        if steps == 3:
            output = tasks("remove", tmp_path, "odd")
            assert "kind odd is removed" in output and "continue it with: agentrl train mine.py --resume" in output, output
    async with endless_run(tmp_path, recipe, Numbered()) as run:
        entries = await run.store.entries()
        first, removed = (logged.start.first for logged in read_changes(tmp_path) if logged.start is not None)
        assert 3 <= first < removed < len(entries)
        assert [entry.task_id for entry in entries] == [run.group_tasks.task(entry.index).id for entry in entries]
        kinds = [run.group_tasks.task(entry.index).kind for entry in entries]
        assert not any(entry.task_id.startswith("added") for entry in entries[:first])
        assert sum(entry.task_id.startswith("added") for entry in entries[first:removed]) >= (removed - first) // 2
        assert "odd" in kinds[:removed] and set(kinds[removed:]) == {"even"}
    listed = json.loads(tasks("list", tmp_path, "--json"))
    assert [(row["name"], row["share"]) for row in listed["families"]] == [("Numbered", 0.25), ("added", 0.75)]
    states = {(row["kind"], row["state"], row["success"]) for row in listed["tasks"]}
    assert states == {("even", "in use", 1.0), ("odd", "removed", 1.0)}
    table = tasks("list", tmp_path)
    assert "added                       3   75.0%" in table and f"kind odd is removed: from group {removed} on" in table, table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("remove", "oddd"), "has no task family, kind or task 'oddd'; did you mean odd?"),
        (("remove", "Numbered"), "Numbered is the last task family of the run"),
        (("reweight", "Numbered", "nan"), "weight nan is not a number from 0.001 to 1000"),
        (("reweight", "Numbered", "--", "-1"), "weight -1 is not a number from 0.001 to 1000"),
        (("reweight", "numbered-3", "0"), "to stop using it, remove it"),
        (("add", "no.such:family"), "no.such"),
        (("add", "tests.run.endless:Numbered"), "the run already has a task family Numbered"),
        (("add", "tests.run.endless:Numbered", "name"), "option 'name' is not KEY=VALUE"),
        (("add", "tests.run.endless:Numbered", "sise=3", "--name", "x"), "sise"),
    ],
)
def test_a_change_that_cannot_work_is_an_error_and_changes_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    recipe = endless_recipe(**{"tasks.family": "tests.run.endless:Numbered"})
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    action, *rest = arguments
    output = tasks(action, tmp_path, *rest)
    assert message in output and read_changes(tmp_path) == [], output


@pytest.mark.slow
def test_a_request_that_depends_on_a_rejected_one_does_not_stop_later_requests(tmp_path: Path) -> None:
    reference = "tests.run.endless:Numbered"
    recipe = endless_recipe(**{"tasks.family": reference})
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    tasks("add", tmp_path, reference, "--name", "added")
    tasks("reweight", tmp_path, "added", "2")

    def broken(change: TaskChange) -> TaskFamily:
        raise UserError("broken since it was requested", fix="repair it")

    added, reweighted = read_changes(tmp_path)
    base = TaskChange(action="add", target="family", name="Numbered", at="", family=reference)
    assert "broken since" in TaskChanges(tmp_path, (base, Numbered()), broken).start(added, 0).rejected
    assert reweighted.start is None and [family["name"] for family in json.loads(tasks("list", tmp_path, "--json"))["families"]][:1] == [
        "Numbered"
    ]
    assert "requested: kind odd is removed" in tasks("remove", tmp_path, "odd")


@pytest.mark.parametrize(("order", "accepted"), [("in_order", False), ("oldest_first", True)])
def test_a_family_with_late_scores_is_added_only_to_a_run_that_accepts_them(tmp_path: Path, order: str, accepted: bool) -> None:
    recipe = endless_recipe(**{"tasks.family": "tests.run.endless:Numbered", "order": order, "max_staleness": 1})
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    output = tasks("add", tmp_path, "tests.run.endless:Numbered", "late=true", "--name", "late")
    assert ("scores cannot be late" in output) is not accepted and len(read_changes(tmp_path)) == accepted, output


@pytest.mark.slow
def test_the_last_kind_of_a_family_cannot_be_removed(tmp_path: Path) -> None:
    recipe = endless_recipe(**{"tasks.family": "tests.run.endless:Numbered"})
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    tasks("remove", tmp_path, "odd")
    output = tasks("remove", tmp_path, "even")
    assert "removing kind even would leave task family Numbered without tasks" in output and len(read_changes(tmp_path)) == 1, output
