from __future__ import annotations

import asyncio
from typing import Any

from agentrl.errors import ServingError
from agentrl.records import Episode, Score, Task
from agentrl.rollout import GroupRunner
from agentrl.testing import ScriptedPolicy

SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


async def one(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


def group_runner(runner: Any, *, retries: int, size: int = 4) -> GroupRunner:
    return GroupRunner(runner=runner, score=one, slots=asyncio.Semaphore(2), group_size=size, max_retries=retries)


async def test_a_fault_is_retried_and_then_forgotten(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def fails_first(turn: int, episode: str) -> str:
        if episode.endswith("-a0"):
            raise ServingError("busy")
        return SUBMIT

    group = await group_runner(make_runner(ScriptedPolicy(tokenizer, fails_first)), retries=1).group(7, task)
    assert len(group.scored) == 4
    assert {e.episode.attempt for e in group.episodes} == {1}


async def test_a_fault_that_stays_is_left_out_and_never_scored_zero(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def one_member_is_cursed(turn: int, episode: str) -> str:
        if "-2-" in episode:
            raise ServingError("no route")
        return SUBMIT

    group = await group_runner(make_runner(ScriptedPolicy(tokenizer, one_member_is_cursed)), retries=1).group(7, task)
    assert len(group.episodes) == 4 and len(group.scored) == 3
    (cursed,) = [e for e in group.episodes if e.episode.left_out]
    assert cursed.score.value is None and "no route" in cursed.score.reason


async def test_slots_bound_the_episodes_in_flight(tokenizer: Any, task: Task, make_runner: Any) -> None:
    running = peak = 0

    class Counting(ScriptedPolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.01)
            running -= 1
            return await super().generate(*args, **kwargs)

    await group_runner(make_runner(Counting.saying(tokenizer, SUBMIT)), retries=0, size=10).group(0, task)
    assert peak == 2
