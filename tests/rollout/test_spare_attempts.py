"""Spare attempts of a group: which ones count, and what is recorded of the others."""

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
from tests.agent.trees import PRINT, delegate, tool_responses, tree_task, user_prompt
from tests.agent.trees import make_runner as make_trees
from tests.rollout.test_group import PYTHON, SUBMIT, Together

PATIENCE_S = 20.0


class Slow(ScriptedPolicy):
    """Never answers the (member, turn) in `hangs`; counts waiting and cancelled requests."""

    def __init__(self, tokenizer: Any, hangs: Callable[[int, int], bool], fails: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__(tokenizer, lambda turn, episode: PYTHON if turn == 0 else SUBMIT)
        self.hangs, self.fails = hangs, fails
        self.waiting: set[str] = set()
        self.aborted: list[str] = []
        self.requests: list[str] = []

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Any:
        name, _, turn = request_id.rpartition("-")
        self.requests.append(request_id)
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
    return [int(scored.episode.id.split("-")[1]) for scored in group.episodes]


async def test_the_slowest_are_cancelled_and_leave_nothing_running(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: member in (1, 4) and turn == 1)
    sandboxes, reported, slots = ScriptedSandboxes(printing("3")), [], asyncio.Semaphore(64)
    runner = racing(make_runner(policy, sandboxes), size=4, spare=2, on_attempt=reported.append, slots=slots)
    group = await asyncio.wait_for(runner.run_group(7, task), PATIENCE_S)
    assert numbers(group) == [0, 2, 3, 5] and len(group.scored) == 4
    first = len(policy.tokenizer.encode(PYTHON, add_special_tokens=False)) + 1
    assert [(attempt.episode_id, attempt.begun, attempt.turns, attempt.tokens) for attempt in group.cancelled] == [
        ("g000007-1-a0", True, 1, first),
        ("g000007-4-a0", True, 1, first),
    ]
    assert sorted(policy.aborted) == ["g000007-1-a0", "g000007-4-a0"] and not policy.waiting
    assert len(sandboxes.opened) == 6 and all(sandbox.closed for sandbox in sandboxes.opened)
    assert reported == [None] * 4, "a cancelled attempt is neither a fault nor a success"
    assert not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()] and slots._value == 64
    assert codec.from_json(Group, codec.to_json(group)) == group


async def test_a_waiting_attempt_never_starts(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: False)
    group = await racing(make_runner(policy), size=2, spare=3, slots=asyncio.Semaphore(1)).run_group(0, task)
    assert numbers(group) == [0, 1] and [attempt.begun for attempt in group.cancelled] == [False] * 3
    assert {name.split("-")[1] for name in policy.requests} == {"0", "1"}


async def test_a_spare_attempt_replaces_a_failed_one_without_a_retry(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """Two attempts may be lost to faults. The third one that fails is the first to be retried."""
    policy = Slow(
        tokenizer, lambda member, turn: False, lambda name: name.startswith(("g000000-0-", "g000000-1-")) or name == "g000000-2-a0"
    )
    group = await racing(make_runner(policy), size=3, spare=2, retries=3).run_group(0, task)
    assert [scored.episode.id for scored in group.episodes] == [f"g000000-{n}-a{a}" for n, a in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 0))]
    assert numbers(replace(group, episodes=group.scored)) == [2, 3, 4] and group.cancelled == ()
    assert all("no route" in scored.score.reason for scored in group.episodes[:2]), "failures are reported as usual"


async def test_an_unscored_attempt_makes_room_for_another(tokenizer: Any, task: Task, make_runner: Any) -> None:
    async def unscored(task: Task, episode: Episode) -> Score:
        value = await by_member(task, episode)
        return Score(value=None, reason="no verdict") if value.value in (0.0, 1.0) else value

    group = await racing(make_runner(Slow(tokenizer, lambda member, turn: False)), size=2, spare=2, score=unscored).run_group(0, task)
    assert [scored.score.value for scored in group.episodes] == [None, None, 2.0, 3.0] and len(group.scored) == 2
    lost = await racing(make_runner(Slow(tokenizer, lambda member, turn: False)), size=3, spare=1, score=unscored).run_group(0, task)
    assert len(lost.episodes) == 4 and len(lost.scored) == 2, "a group that cannot be filled ends incomplete"


async def test_a_group_judge_sees_the_attempts_that_count(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: member == 0)
    group = await asyncio.wait_for(racing(make_runner(policy), size=3, spare=1, group_scoring=Together()).run_group(0, task), PATIENCE_S)
    assert numbers(group) == [1, 2, 3] and [each.score.value for each in group.episodes] == [0.0, 1.0, 2.0] and len(group.cancelled) == 1


async def test_an_attempt_is_cancelled_with_its_sub_agents(tokenizer: Any, task: Task) -> None:
    """The sub-agent of one attempt, in the episode's sandbox, never answers."""
    stuck = asyncio.Event()

    async def reads(context: str) -> str:
        if user_prompt(context) != "help":
            return delegate("help") if not tool_responses(context) else "done"
        if not tool_responses(context):
            return PRINT
        if not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()
        return "found"

    sandboxes, tree = ScriptedSandboxes(printing("3")), tree_task(task)
    runner = make_trees(tokenizer, reads, sandboxes, delegation=DelegationConfig())
    group = await asyncio.wait_for(racing(runner, size=2, spare=1).run_group(0, tree), PATIENCE_S)
    (cancelled,) = group.cancelled
    tokens = sum(len(tokenizer.encode(response)) + 1 for response in (delegate("help"), PRINT))
    assert (cancelled.begun, cancelled.turns, cancelled.tokens) == (True, 2, tokens)
    assert len(group.scored) == 2 and len(sandboxes.opened) == 3 and all(sandbox.closed for sandbox in sandboxes.opened)
    assert not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()]


async def test_cancelling_a_run_cancels_all_attempts(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Slow(tokenizer, lambda member, turn: turn == 1)
    running = asyncio.create_task(racing(make_runner(policy), size=2, spare=2).run_group(0, task))
    while len(policy.waiting) < 4:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not policy.waiting and not [job for job in asyncio.all_tasks() if job is not asyncio.current_task()]


@pytest.mark.parametrize("ended", [1, 2, 3])
async def test_a_killed_group_is_completed(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path, ended: int) -> None:
    """Killed after `ended` of 5 attempts, of which 3 must count: finished ones count, and no turn is sampled twice."""
    keeper = FolderCheckpoints(tmp_path)
    first = Slow(tokenizer, lambda member, turn: member >= ended and turn == 1)
    dying = asyncio.create_task(racing(make_runner(first), size=4, spare=1, checkpoints=keeper).run_group(7, task))
    while len(list(tmp_path.glob("000007/*.scored"))) < ended or len(first.waiting) < 5 - ended:
        await asyncio.sleep(0.001)
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying

    policy = Slow(tokenizer, lambda member, turn: False)
    group = await racing(make_runner(policy), size=3, spare=2, checkpoints=FolderCheckpoints(tmp_path)).run_group(7, task)
    assert set(range(ended)) <= set(numbers(group)) and len(group.scored) == 3 and len(group.cancelled) == 2
    turns_sampled = Counter(policy.requests)
    assert not any(name.endswith("-0") for name in turns_sampled), "stored turns are not sampled again"
    assert max(turns_sampled.values(), default=1) == 1 and {name.split("-")[1] for name in turns_sampled}.isdisjoint(map(str, range(ended)))
    assert all(attempt.begun is (ended < 3) for attempt in group.cancelled), "with enough finished attempts, no other starts"


async def test_a_group_with_equal_scores_is_stopped_and_another_continues(tokenizer: Any, task: Task, make_runner: Any) -> None:
    async def half(task: Task, episode: Episode) -> Score:
        return Score(value=float(int(episode.id.split("-")[1]) % 2))

    async def zero(task: Task, episode: Episode) -> Score:
        return Score(value=0.0)

    policy = Slow(tokenizer, lambda member, turn: False)
    stopped = await racing(make_runner(policy), size=4, spare=0, score=zero, stop_equal_after=2).run_group(0, task)
    assert numbers(stopped) == [0, 1] and len({name.split("-")[1] for name in policy.requests}) == 2
    assert [(attempt.reason, attempt.begun) for attempt in stopped.cancelled] == [("equal", False)] * 2
    assert numbers(await racing(make_runner(policy), size=4, spare=0, score=half, stop_equal_after=2).run_group(1, task)) == [0, 1, 2, 3]
