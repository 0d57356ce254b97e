"""Minimizing a case: it stays solvable, still fails, and the budget is respected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.check.minimize import MinimizeSearch, fails_reliably, search_smaller_case
from agentrl.errors import UserError
from agentrl.failure.case import Case
from agentrl.records import Episode, EpisodeState, ExecResult, Message, SandboxSpec, Score, Split, Task, Trajectory, Turn
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing

TASK = Task(
    id="sum",
    family="sums",
    prompt=(Message(role="system", content="Be kind."), Message(role="user", content="What is the sum?")),
    tools=("python", "submit"),
    sandbox=SandboxSpec(image="none"),
    verifiers=(f"{__file__}:exact",),
    data={"answer": "97"},
    split=Split.TRAIN,
    files={"a.csv": "n\n40\n0\n57\n", "notes.txt": "nothing\n"},
)


async def exact(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == task.data["answer"]))


class Sums:
    """A family whose gold solution sums the files, so a task with other files has no gold solution."""

    name = "sums"

    def size(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return TASK

    def gold(self, task: Task) -> str:
        return "# sum of " + " ".join(re.findall(r"\d+", " ".join(task.files.values())))


def run(code: str) -> ExecResult:
    match = re.search(r"# sum of ([\d ]*)", code)
    return printing(str(sum(map(int, match[1].split()))) if match else "")(code)


class FailsWith57:
    """A policy that fails while the files contain 57, and counts its attempts."""

    def __init__(self, passes: Sequence[float] = ()) -> None:
        self.attempts, self.passes = 0, list(passes)

    async def __call__(self, task: Task, count: int) -> list[float | None]:
        self.attempts += count
        return [1.0 if self.passes and self.passes.pop(0) else float("57" not in "".join(task.files.values())) for _ in range(count)]


def search(ask: Any, case: Case | None = None, budget: int = 400) -> MinimizeSearch:
    case = case or Case(id="sum", task=TASK)
    return MinimizeSearch(
        case=case, family=Sums(), sandboxes=ScriptedSandboxes(run), attempt=ask, root=Path.cwd(), threshold=1.0, repeats=6, budget=budget
    )


@pytest.mark.slow
async def test_a_case_becomes_as_small_as_possible_and_stays_solvable() -> None:
    policy = FailsWith57()
    smaller, summary = await search_smaller_case(search(policy), model="m", at="now")
    assert smaller.task.files == {"a.csv": "40\n57\n"} and smaller.task.prompt == TASK.prompt[1:], "40 is needed for the sum to be right"
    assert smaller.original == TASK and smaller.baseline is not None and smaller.baseline.scores == (0.0,) * 6
    assert summary.startswith("2 messages, 2 files, 5 lines -> 1 message, 1 file, 2 lines") and f"{policy.attempts} attempts" in summary
    second, _ = await search_smaller_case(
        search(FailsWith57(), replace(smaller, task=replace(smaller.task, files={"a.csv": "0\n40\n57\n"}))), model="m", at="now"
    )
    assert second.original == TASK, "the first original, not the intermediate case"


async def test_the_budget_is_respected_and_partial_results_count() -> None:
    policy = FailsWith57()
    smaller, _ = await search_smaller_case(search(policy, budget=30), model="m", at="now")
    assert policy.attempts <= 30 and len(smaller.task.files) < 2


async def test_a_case_that_cannot_be_minimized_is_an_error() -> None:
    for ask, case, budget, message in (
        (FailsWith57([1.0] * 3), None, 400, "the policy passes it too often"),
        (FailsWith57(), Case(id="x", task=replace(TASK, data={"answer": "96"})), 400, "its proof fails"),
        (FailsWith57(), None, 6, "the budget is too small"),
        (FailsWith57(), Case(id="x", task=replace(TASK, prompt=TASK.prompt[1:], files={"a.csv": "40\n57\n"})), 400, "no smaller task"),
        (FailsWith57([0.0] * 12 + [1.0] * 400), None, 24, "new attempts at the smallest task passed"),
    ):
        with pytest.raises(UserError, match=message):
            await search_smaller_case(search(ask, case, budget), model="m", at="now")
    turn = Turn(
        prompt_ids=(1,), completion_ids=(), logprobs=(), versions=(), message=Message(role="assistant", content=""), finish_reason=""
    )
    state = EpisodeState(
        episode_id="e", task_key=TASK.key, attempt=0, trajectories=(Trajectory(agent="main", turns=(turn,)),), prompt_ids=((),)
    )
    with pytest.raises(UserError, match="starts in the middle"):
        await search_smaller_case(search(FailsWith57(), Case(id="late", task=TASK, start=state)), model="m", at="now")


@pytest.mark.parametrize(
    ("scores", "fails"),
    [([0.0] * 6, True), ([0.0] * 5 + [1.0], False), ([0.0] * 6 + [1.0], True), ([0.0] * 5 + [None], False), ([], False), ([0.9] * 6, True)],
)
def test_a_failure_is_reliable_after_six_failed_attempts(scores: list[float | None], fails: bool) -> None:
    assert fails_reliably(scores, 1.0) is fails
