"""Time limits with a chat completions server: an endless model is cut off and scored, a stalled server is not the model's fault."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.evaluation.chat_agent import ChatAgent, ChatAnswer, NoPolicy
from agentrl.records import Episode, Limits
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.sandboxes import printing, sample_task

TASK = replace(sample_task(), tools=(), limits=Limits(turns=2, turn_tokens=100_000, episode_tokens=100_000, wall_s=60.0))


class Endpoint:
    """Streams 20 tokens per second; from `stalls` seconds on it sends nothing."""

    tokens_name, timeout_s = "max_tokens", 120.0

    def __init__(self, stalls: float) -> None:
        self.stalls = stalls

    async def ask(self, messages: Sequence[Mapping[str, Any]], *, more: Mapping[str, Any]) -> ChatAnswer:
        now, first = asyncio.get_running_loop().time(), asyncio.get_running_loop().time() < 10.0
        tokens = min(40, more["max_tokens"]) if first else more["max_tokens"]
        await asyncio.sleep(10**6 if now >= self.stalls else tokens / 20.0)
        return ChatAnswer(text="x" * tokens, prompt_tokens=5, completion_tokens=tokens, cut=not first)


async def played(endpoint: Any) -> list[Episode]:
    runner = EpisodeRunner(
        agent=ChatAgent(endpoint=endpoint),
        policy=NoPolicy(),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=10**6,
        request_timeout_s=120.0,
    )
    first = await runner.run(TASK, episode_id="first")
    await asyncio.sleep(20)
    return [first, await runner.run(TASK, episode_id="second")]


@pytest.mark.parametrize(("stalls", "left_out"), [(10**6, False), (15.0, True)])
def test_a_model_that_never_ends_is_scored_and_a_stalled_server_is_not(stalls: float, left_out: bool) -> None:
    first, second = run_virtually(played(Endpoint(stalls)))
    assert first.trajectories[0].stop_reason == "answered" and not first.left_out
    assert second.left_out is left_out and second.wall_s <= TASK.limits.wall_s + 1
    assert second.trajectories[0].stop_reason == ("wall_limit" if left_out else "token_limit")
