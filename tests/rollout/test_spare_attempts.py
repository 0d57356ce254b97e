"""Attempts beyond those that a group needs: who counts, and what is left of the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.rollout import DelegationConfig
from agentrl.experience import FolderCheckpoints
from agentrl.records import Episode, Group, Score, Task, codec
from agentrl.rollout import GroupRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.agent.trees import PRINT, asked, delegate, shown, tree_task
from tests.agent.trees import make_runner as make_trees
from tests.rollout.test_group import PYTHON, SUBMIT, Together

PATIENCE_S = 20.0


class Slow(ScriptedPolicy):
    """Never answers what `hangs` says of (member, turn); counts who waits, and who was told that nobody wants the answer any more."""

    def __init__(self, tokenizer: Any, hangs: Callable[[int, int], bool], fails: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__(tokenizer, lambda turn, episode: PYTHON if turn == 0 else SUBMIT)
        self.hangs, self.fails = hangs, fails
        self.waiting: set[str] = set()
        self.aborted: list[str] = []
        self.asked: list[str] = []

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Any:
        name, _, turn = request_id.rpartition("-")
        self.asked.append(request_id)
        if self.fails(name):
            raise ConnectionError("no route")
        if self.hangs(int(name.split("-")[1]), int(turn)):
            self.waiting.add(name)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.aborted.append(name)
                raise
            finally:
                self.waiting.discard(name)
        return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


async def by_member(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.id.split("-")[1]))


def racing(runner: Any, *, size: int, spare: int, retries: int = 0, **more: Any) -> GroupRunner:
    return GroupRunner(
        runner=runner,
        scorer=more.pop("score", by_member),
        slots=more.pop("slots", asyncio.Semaphore(64)),
        group_size=size,
        spare_attempts=spare,
        max_retries=retries,
        **more,
    )


def numbers(group: Group) -> list[int]:
    return [int(one.episode.id.split("-")[1]) for one in group.episodes]


async def test_the_slowest_are_cancelled_and_leave_nothing_running(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: member in (1, 4) and turn == 1)
    sandboxes, told, slots = ScriptedSandboxes(printing("3")), [], asyncio.Semaphore(64)
    runner = racing(make_runner(policy, sandboxes), size=4, spare=2, on_attempt=told.append, slots=slots)
    group = await asyncio.wait_for(runner.run_group(7, task), PATIENCE_S)
    assert numbers(group) == [0, 2, 3, 5] and len(group.scored) == 4
    first = len(policy.tokenizer.encode(PYTHON, add_special_tokens=False)) + 1
    assert [(one.episode_id, one.begun, one.turns, one.tokens) for one in group.cancelled] == [
        ("g000007-1-a0", True, 1, first),
        ("g000007-4-a0", True, 1, first),
    ]
    assert sorted(policy.aborted) == ["g000007-1-a0", "g000007-4-a0"] and not policy.waiting
    assert len(sandboxes.opened) == 6 and all(sandbox.closed for sandbox in sandboxes.opened)
    assert told == [None] * 4, "a cancelled attempt is no fault, and no success"
    assert not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()] and slots._value == 64
    assert codec.from_json(Group, codec.to_json(group)) == group


async def test_an_attempt_that_has_not_begun_is_not_begun(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: False)
    group = await racing(make_runner(policy), size=2, spare=3, slots=asyncio.Semaphore(1)).run_group(0, task)
    assert numbers(group) == [0, 1] and [one.begun for one in group.cancelled] == [False] * 3
    assert {name.split("-")[1] for name in policy.asked} == {"0", "1"}


async def test_a_spare_attempt_takes_the_place_of_a_failed_one_before_it_is_tried_again(
    tokenizer: Any, task: Task, make_runner: Any
) -> None:
    """Two places may be lost to faults; the third attempt that fails is the first to be tried again."""
    policy = Slow(
        tokenizer, lambda member, turn: False, lambda name: name.startswith(("g000000-0-", "g000000-1-")) or name == "g000000-2-a0"
    )
    group = await racing(make_runner(policy), size=3, spare=2, retries=3).run_group(0, task)
    assert [one.episode.id for one in group.episodes] == [f"g000000-{n}-a{a}" for n, a in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 0))]
    assert numbers(replace(group, episodes=group.scored)) == [2, 3, 4] and group.cancelled == ()
    assert all("no route" in one.score.reason for one in group.episodes[:2]), "what failed is told as everywhere"


async def test_what_has_no_score_makes_room_for_another(tokenizer: Any, task: Task, make_runner: Any) -> None:
    async def unscored(task: Task, episode: Episode) -> Score:
        value = await by_member(task, episode)
        return Score(value=None, reason="no verdict") if value.value in (0.0, 1.0) else value

    group = await racing(make_runner(Slow(tokenizer, lambda member, turn: False)), size=2, spare=2, score=unscored).run_group(0, task)
    assert [one.score.value for one in group.episodes] == [None, None, 2.0, 3.0] and len(group.scored) == 2
    lost = await racing(make_runner(Slow(tokenizer, lambda member, turn: False)), size=3, spare=1, score=unscored).run_group(0, task)
    assert len(lost.episodes) == 4 and len(lost.scored) == 2, "a group that cannot be filled ends with what there is"


async def test_a_judge_of_groups_sees_those_that_count(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: member == 0)
    group = await asyncio.wait_for(racing(make_runner(policy), size=3, spare=1, together=Together()).run_group(0, task), PATIENCE_S)
    assert numbers(group) == [1, 2, 3] and [one.score.value for one in group.episodes] == [0.0, 1.0, 2.0] and len(group.cancelled) == 1


async def test_an_attempt_is_cancelled_with_its_sub_agents(tokenizer: Any, task: Task) -> None:
    """The helper of one attempt, in a sandbox of the episode, never answers."""
    stuck = asyncio.Event()

    async def reads(context: str) -> str:
        if asked(context) != "help":
            return delegate("help") if not shown(context) else "done"
        if not shown(context):
            return PRINT
        if not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()
        return "found"

    sandboxes, tree = ScriptedSandboxes(printing("3")), tree_task(task)
    runner = make_trees(tokenizer, reads, sandboxes, delegation=DelegationConfig())
    group = await asyncio.wait_for(racing(runner, size=2, spare=1).run_group(0, tree), PATIENCE_S)
    (left,) = group.cancelled
    said = (delegate("help"), PRINT)
    assert (left.begun, left.turns) == (True, 2) and left.tokens == sum(len(tokenizer.encode(one)) + 1 for one in said)
    assert len(group.scored) == 2 and len(sandboxes.opened) == 3 and all(sandbox.closed for sandbox in sandboxes.opened)
    assert not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()]


async def test_the_end_of_a_run_is_the_end_of_all(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: turn == 1)
    running = asyncio.create_task(racing(make_runner(policy), size=2, spare=2).run_group(0, task))
    while len(policy.waiting) < 4:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not policy.waiting and not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()]


@pytest.mark.parametrize("ended", [1, 2, 3])
async def test_a_group_that_died_goes_on_to_a_whole_one(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path, ended: int) -> None:
    """Killed when `ended` of 5 attempts had ended, of which 3 are to count: these count, and no turn is sampled twice."""
    keeper = FolderCheckpoints(tmp_path)
    first = Slow(tokenizer, lambda member, turn: member >= ended and turn == 1)
    dying = asyncio.create_task(racing(make_runner(first), size=4, spare=1, keeper=keeper).run_group(7, task))
    while len(list(tmp_path.glob("000007/*.scored"))) < ended or len(first.waiting) < 5 - ended:
        await asyncio.sleep(0.001)
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying

    policy = Slow(tokenizer, lambda member, turn: False)
    group = await racing(make_runner(policy), size=3, spare=2, keeper=FolderCheckpoints(tmp_path)).run_group(7, task)
    assert set(range(ended)) <= set(numbers(group)) and len(group.scored) == 3 and len(group.cancelled) == 2
    again = Counter(policy.asked)
    assert not any(name.endswith("-0") for name in again), "turns that were there are not sampled again"
    assert max(again.values(), default=1) == 1 and {one.split("-")[1] for one in again}.isdisjoint(map(str, range(ended)))
    assert all(one.begun is (ended < 3) for one in group.cancelled), "with enough that had ended, no other begins"


async def test_a_hopeless_group_is_stopped_and_another_goes_on(tokenizer: Any, task: Task, make_runner: Any) -> None:
    async def half(task: Task, episode: Episode) -> Score:
        return Score(value=float(int(episode.id.split("-")[1]) % 2))

    async def zero(task: Task, episode: Episode) -> Score:
        return Score(value=0.0)

    policy = Slow(tokenizer, lambda member, turn: False)
    stopped = await racing(make_runner(policy), size=4, spare=0, score=zero, stop_equal_after=2).run_group(0, task)
    assert numbers(stopped) == [0, 1] and len({name.split("-")[1] for name in policy.asked}) == 2
    assert [(one.reason, one.begun) for one in stopped.cancelled] == [("equal", False)] * 2
    assert numbers(await racing(make_runner(policy), size=4, spare=0, score=half, stop_equal_after=2).run_group(1, task)) == [0, 1, 2, 3]
