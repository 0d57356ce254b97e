"""Groups whose scores arrive late, in the real loop around a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.config import Recipe
from agentrl.errors import UserError
from agentrl.experience.audit import count, verify
from agentrl.failure import Capture
from agentrl.failure.collection import Collection, TraceFilter
from agentrl.records import Episode, GroupUse, LateScore, PendingPart, Score, Task
from agentrl.reward import TaskScorer
from agentrl.run import loop
from agentrl.run.rollouts import Rollouts
from agentrl.session import opening
from agentrl.session.folder import RunStart
from agentrl.session.transcript import PendingTranscripts
from agentrl.task.group_tasks import GroupTasks
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests import driving
from tests.driving import Family, Journaled, make_recipe
from tests.forking import FORKS
from tests.late import late_group, opened_store

LATE_TASKS = ("task-0", "task-2")


def recipe_of(**rollout: Any) -> Recipe:
    return make_recipe(group={"size": 2}, **rollout).but({"steps": 2, "max_staleness": 1, "learner.keep_versions": 3})


class Scores:
    """Two tasks are scored late, and the others at once. The two attempts have different scores."""

    expires_at: float | None = None
    residual = False

    async def __call__(self, task: Task, episode: Episode) -> Score:
        if task.id in LATE_TASKS:
            part = PendingPart(name="human", expires_at=self.expires_at, residual=self.residual)
            return Score(value=None, partial=float(self.residual and episode.id.endswith("-0-a0")), pending=(part,))
        return Score(value=float(episode.id.endswith("-0-a0")))


def send(run: opening.Run, group: int) -> None:
    for attempt in range(2):
        episode = f"g{group:06d}-{attempt}-a0"
        score = LateScore(episode_id=episode, part="human", value=float(attempt), scored_by="ann", key=episode)
        run.store.store.add_score(score, now=time.time())


def steps_of(run: opening.Run) -> list[tuple[int, ...]]:
    """Returns the groups of the steps that a learner could run now."""
    steps = []
    while (chosen := run.order.select(len(steps), run.store.store.entries())) is not None:
        run.store.store.commit(len(steps), dict.fromkeys(chosen, GroupUse(reason="test")), "c")
        steps.append(chosen)
    return steps


@pytest.mark.slow
async def test_parked_groups_are_replaced_and_trained_when_their_scores_arrive(tmp_path: Path) -> None:
    scorer = Scores()
    journal, recipe = tmp_path / "journal.jsonl", recipe_of(groups_per_step=2)
    async with driving.opened(tmp_path, Journaled(journal), ScriptedSandboxes(printing("3")), recipe, Family(), scorer=scorer) as run:
        await loop._roll_out(run)  # version 0 serves, and two blocks may be in flight: all four groups, and two more for the parked ones
        assert [(entry.index, entry.state) for entry in run.store.store.entries()] == [
            *((0, "parked"), (1, "ready"), (2, "parked"), (3, "ready"), (4, "ready"), (5, "ready"))
        ]
        assert run.store.store.block_versions() == {2: 0}, "the third block started early"
        assert run.order.select(0, run.store.store.entries()) == (1, 3)
        assert not captured(tmp_path) & {"task-0", "task-2"}, "an episode without its late score has not failed"
        send(run, 0)
        await run.late.update()
        assert run.late.count == 1 and run.late.changed.is_set() and "task-0" in captured(tmp_path)
        assert [line["highest"] for line in outcomes(tmp_path) if line["task"] == "task-0"] == [0.0, 1.0]
    requests_before = indices_sampled(journal)
    async with driving.opened(tmp_path, Journaled(journal), ScriptedSandboxes(printing("3")), recipe, Family(), scorer=scorer) as run:
        await loop._roll_out(run)
        assert indices_sampled(journal) == requests_before and run.late.count == 1, "a resumed run repeats nothing"
        send(run, 2)
        await run.late.update()
        assert run.late.count == 0 and [line["highest"] for line in outcomes(tmp_path) if line["task"] == "task-2"] == [0.0, 1.0]
        assert steps_of(run) == [(0, 1), (2, 3), (4, 5)]
        assert list(verify(tmp_path, run.store.store)) == []


async def test_a_resumed_run_repeats_no_stored_group_of_a_block_whose_notes_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next block starts in the meantime, and reads the store from its first group on."""
    journal, recipe = tmp_path / "journal.jsonl", recipe_of(groups_per_step=2)
    async with driving.opened(tmp_path, Journaled(journal), ScriptedSandboxes(printing("3")), recipe, Family()) as run:
        for index in (0, 2):  # the driver died when the other groups of both blocks were running
            await Rollouts.of(run).group(index)
    prepare, started = GroupTasks.prepare_block, asyncio.Event()

    async def slow(tasks: GroupTasks, block: int) -> None:
        if block == 0:
            await started.wait()
        await prepare(tasks, block)
        if block == 1:
            started.set()

    monkeypatch.setattr(GroupTasks, "prepare_block", slow)
    before = indices_sampled(journal)
    async with driving.opened(tmp_path, Journaled(journal), ScriptedSandboxes(printing("3")), recipe, Family()) as run:
        await loop._roll_out(run)
        assert [entry.index for entry in run.store.store.entries()] == [0, 1, 2, 3]
    requests = indices_sampled(journal)
    assert len(requests) == len(set(requests)) == 2 * len(before), "no group is sampled twice"


async def test_a_group_with_a_residual_is_trained_at_once_and_its_residual_in_a_later_step(tmp_path: Path) -> None:
    scorer, journal = Scores(), Journaled(tmp_path / "journal.jsonl")
    scorer.residual = True
    recipe, sandboxes = recipe_of(groups_per_step=2).but({"objective.normalize_std": False}), partial(ScriptedSandboxes, printing("3"))
    async with driving.opened(tmp_path, journal, sandboxes(), recipe, Family(), scorer=scorer) as run:
        await loop._roll_out(run)
        states = {entry.index: entry.state for entry in run.store.store.entries()}
        assert states == {-3: "parked", -1: "parked", 0: "ready", 1: "ready", 2: "ready", 3: "ready"}, "no group replaces another"
        assert run.late.count == 0 and len(outcomes(tmp_path)) == 4 and {"task-0", "task-2"} <= captured(tmp_path)
        before = outcomes(tmp_path), episodes_counted(tmp_path)
        send(run, 0)
        await run.late.update()
        assert [path.name for path in (tmp_path / "pending").iterdir()] == ["000002.json"]
        send(run, 2)
    async with driving.opened(tmp_path, journal, sandboxes(), recipe, Family(), scorer=scorer) as run:
        await loop._roll_out(run)
        assert (outcomes(tmp_path), episodes_counted(tmp_path)) == before and not any((tmp_path / "pending").iterdir())
        assert steps_of(run) == [(0, 1), (-1, 2, 3)] and list(verify(tmp_path, run.store.store)) == []
    async with driving.opened(tmp_path, journal, sandboxes(), recipe_of(), Family(), scorer=scorer) as run:
        with pytest.raises(UserError, match="division by the standard deviation"):
            run.late.check(late_group(7, PendingPart(name="human", residual=True)))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["record_scores", "capture_group", "remove"])
async def test_scores_that_arrive_without_a_driver_are_recorded_once_even_if_the_next_driver_is_killed(tmp_path: Path, step: str) -> None:
    """The scores of one group arrive and those of another expire. Then a driver dies after a step of recording the first."""
    scores, recipe = Scores(), recipe_of(groups_per_step=2)
    scores.expires_at = time.time() + 3600.0
    sandboxes = partial(ScriptedSandboxes, printing("3"))
    async with driving.opened(tmp_path, Journaled(tmp_path / "j"), sandboxes(), recipe, Family(), scorer=scores) as run:
        await loop._roll_out(run)
    before, counts = len(outcomes(tmp_path)), episodes_counted(tmp_path)
    with opened_store(tmp_path) as store:
        for attempt in range(2):
            late = LateScore(episode_id=f"g000000-{attempt}-a0", part="human", value=float(attempt), scored_by="ann", key=str(attempt))
            store.add_score(late, now=time.time())
        assert store.expire_scores(now=scores.expires_at) == (2,)
    driver = FORKS.Process(target=resume_and_die, args=(str(tmp_path), step))
    driver.start()
    driver.join(60)
    assert driver.exitcode == -signal.SIGKILL
    for _ in range(2):
        async with driving.opened(tmp_path, Journaled(tmp_path / "j"), sandboxes(), recipe, Family(), scorer=scores) as run:
            await run.late.resume()
            assert run.late.count == 0 and not any((tmp_path / "pending").iterdir())
        new = {line["task"]: (line["counted"], line["highest"]) for line in outcomes(tmp_path)[before:]}
        assert new == {"task-0": (2, 1.0)}, "the outcome of the other group is still that it has no scores"
        assert episodes_counted(tmp_path) == counts + 4, "each episode is counted once"
        assert {"task-0", "task-2"} <= captured(tmp_path)
    assert len(outcomes(tmp_path)) == before + 1


def resume_and_die(folder: str, step: str) -> None:
    """A driver that is killed right after it has executed `step` for the first time."""
    owner: Any = {"record_scores": GroupTasks, "capture_group": Capture, "remove": PendingTranscripts}[step]
    complete = getattr(owner, step)

    def die(*arguments: Any, **options: Any) -> None:
        complete(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, step, die)

    async def resume() -> None:
        path = Path(folder)
        async with driving.opened(path, Journaled(path / "j"), ScriptedSandboxes(printing("3")), recipe_of(), Family()) as run:
            await run.late.resume()

    asyncio.run(resume())


@pytest.mark.slow
async def test_expired_scores_exclude_their_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = Scores()
    scores.expires_at = time.time() + 3600.0
    async with driving.opened(
        tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe_of(), Family(), scorer=scores
    ) as run:
        await loop._roll_out(run)
        assert count(run.store.store.entries()).parts_pending == 4
        monkeypatch.setattr(run.late._clock, "now", lambda: scores.expires_at)
        await run.late.update()
        assert run.late.count == 0
        assert {scored.score.reason for scored in run.store.store.groups([0])[0].episodes} == {"late score expired: human"}


@pytest.mark.parametrize("changes", [{"order": "in_order"}, {"max_staleness": 0}])
async def test_a_run_whose_steps_wait_for_their_groups_rejects_late_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    scorer = Scores()

    async def never(served: object, number: int) -> None:
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(driving.AlwaysServed, "wait_version", never)
    recipe = recipe_of().but(changes)
    async with driving.opened(
        tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe, Family(), scorer=scorer
    ) as run:
        with pytest.raises(ExceptionGroup) as error:
            await loop._roll_out(run)
        assert error.group_contains(UserError, match=r"late score 'human' of group [02]: a step of this run waits(.|\n)*fix: use order")
        assert not run.store.store.parked()
    scorer = TaskScorer()
    scorer.load(["rewards.late:late"])
    start, checked = RunStart(recipe=Path("recipes/mine.py"), folder=tmp_path, overrides=()), cast(Any, SimpleNamespace(scorer=scorer))
    with pytest.raises(UserError, match=r"verifier rewards\.late:late: a step of this run waits"):
        await loop.train(recipe, start, checked, root=tmp_path)


def captured(folder: Path) -> set[str]:
    with Collection(folder) as collection:
        return {trace.task.id for trace in collection.traces(TraceFilter(phase="train")) if trace.task is not None}


def episodes_counted(folder: Path) -> int:
    with Collection(folder) as collection:
        return sum(collection.counts("phase").values())


def outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


def indices_sampled(journal: Path) -> list[str]:
    return sorted(json.loads(line)["request"] for line in journal.read_text().splitlines() if "request" in json.loads(line))
