"""Calls of one verifier: failures, missing task data, invalid scores, deadlines and retries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agentrl.base import user_code
from agentrl.errors import SandboxError
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward import TaskScorer
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.reward.scoring import EPISODE, InSandboxes, scored, task_of
from tests.reward.scoring import broken as broken
from tests.reward.scoring import full as full

task = partial(task_of, __file__)


async def reads_truth(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == task.data["answer"]))


async def reads_elsewhere(task: Task, episode: Episode) -> Score:
    return Score(value=float({"a": 1}["answer"]))


async def handles_missing_data(task: Task, episode: Episode) -> Score:
    try:
        return Score(value=float(task.data["answer"]))
    except KeyError:
        return Score(value=0.25, evidence=f"{task.data.get('answer')}, {task.key}")


async def slow(task: Task, episode: Episode) -> Score:
    await asyncio.sleep(60)
    return Score(value=1.0)


async def wrong(task: Task, episode: Episode) -> Any:
    return 1.0


@pytest.mark.parametrize(("name", "reason"), [("broken", "KeyError"), ("slow", "within"), ("wrong", "not a Score")])
async def test_a_verifier_that_fails_leaves_the_episode_unscored(name: str, reason: str) -> None:
    score = await TaskScorer(timeout_s=0.05 if name == "slow" else 60.0)(task("full", name), EPISODE)
    assert score.value is None and reason in score.reason


async def test_missing_task_data_is_a_task_fault_with_a_fix() -> None:
    score = await TaskScorer()(task("full", "reads_truth"), EPISODE)
    assert score.value is None and score.blame is Blame.TASK
    assert "task t: data has no 'answer', which verifier" in score.reason and "reads_truth reads" in score.reason
    assert "fix: add the key (a captured task" in score.reason
    bug = await TaskScorer()(task("reads_elsewhere"), EPISODE)
    assert bug.value is None and bug.blame is None and "raised KeyError: 'answer'" in bug.reason, "its own bug"
    handled = await TaskScorer()(task("handles_missing_data"), EPISODE)
    assert handled.value == 0.25 and handled.evidence == f"None, {task('handles_missing_data').key}"


async def endless(task: Task, episode: Episode) -> Score:
    return Score(value=float("inf"))


async def huge(task: Task, episode: Episode) -> Score:
    return Score(value=1e308)


huge_too = huge


async def wordy(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, evidence="x" * 3_000_000, parts={"a": 1.0})


async def crowded(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, parts={f"part {number}": 1.0 for number in range(2000)})


async def exits(task: Task, episode: Episode) -> Score:
    raise SystemExit("enough")


async def cancels(task: Task, episode: Episode) -> Score:
    raise asyncio.CancelledError


async def stubborn(task: Task, episode: Episode) -> Score:
    for _ in range(3):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    return Score(value=1.0)


def not_async(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("endless", "verifier returned inf instead of a finite number"),
        ("crowded", "verifier returned 2000 parts"),
        ("exits", "verifier raised SystemExit: enough"),
        ("cancels", "verifier raised CancelledError"),
        ("not_async", "verifier raised TypeError: object Score can't be used in 'await' expression"),
    ],
)
async def test_misbehaving_verifier_leaves_the_episode_unscored(name: str, reason: str) -> None:
    score = await TaskScorer()(task("full", name), EPISODE)
    assert score.value is None and reason in score.reason


async def test_verifier_that_ignores_its_deadline_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "GRACE_S", 0.02)
    score = await TaskScorer(timeout_s=0.02)(task("stubborn"), EPISODE)
    assert score.value is None and "within 0.02 s" in score.reason and len(asyncio.all_tasks()) == 1


async def test_scores_are_limited_and_their_mean_is_finite() -> None:
    score = await TaskScorer()(task("wordy"), EPISODE)
    assert score.value == 1.0 and len(score.evidence) == 20_000
    assert "not finite" in (await TaskScorer()(task("huge", "huge_too"), EPISODE)).reason


class Waits:
    """A verifier that gives no score for a long time."""

    def __init__(self, *, needs_sandboxes: bool) -> None:
        self.needs_sandboxes = needs_sandboxes

    async def __call__(self, task: Task, episode: Episode, *sandboxes: SandboxBackend) -> Score:
        await asyncio.sleep(1e6)
        return Score(value=1.0)


@pytest.mark.parametrize(("needs_sandboxes", "limit"), [(False, "30 s"), (True, "9000 s")])
def test_the_deadline_of_a_verifier(needs_sandboxes: bool, limit: str) -> None:
    scorer = TaskScorer(sandboxes=ScriptedSandboxes(printing("")), _verifiers={"v": Waits(needs_sandboxes=needs_sandboxes)})
    score, _ = scored(scorer, replace(task(), verifiers=("v",)))
    assert score.reason.endswith(f"verifier returned no score within {limit}")


@pytest.mark.parametrize(("max_retries", "slept_s"), [(0, 0.0), (2, 0.6), (6, 11.2)])
def test_retry_pauses_double_up_to_5_seconds(max_retries: int, slept_s: float) -> None:
    verifier = InSandboxes(99, SandboxError("gone"))
    scorer = TaskScorer(sandboxes=ScriptedSandboxes(printing("")), max_retries=max_retries, _verifiers={"v": verifier})
    score, seconds = scored(scorer, replace(task(), verifiers=("v",)))
    assert score.value is None and len(verifier.seen) == max_retries + 1 and seconds == pytest.approx(slept_s)
