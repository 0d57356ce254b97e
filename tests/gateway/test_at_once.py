"""Concurrent requests when `Limits.all_tokens` has room for one of them: the other is refused without blame."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agentrl.gateway import ConversationTokens, Session, chat_completions
from agentrl.gateway.request import Answer, RequestError
from agentrl.protocols import LiveEpisode
from agentrl.records import Limits, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of

LIMITS = Limits(turns=40, turn_tokens=100, episode_tokens=4000, all_tokens=800, wall_s=30.0)


@dataclass(slots=True)
class ConcurrentRequests:
    """Sends requests in rounds; those of a round are concurrent."""

    tokens: ConversationTokens
    rounds: list[list[str]]
    outcomes: list[list[Any]] = field(default_factory=list)

    async def act(self, episode: LiveEpisode) -> str:
        session = Session(episode=episode, tokens=self.tokens, models=("policy",))
        for texts in self.rounds:
            requests = [chat_completions.read({"model": "policy", "messages": [{"role": "user", "content": text}]}) for text in texts]
            self.outcomes.append(await asyncio.gather(*map(session.complete, requests), return_exceptions=True))
        await session.close()
        if session.fault is not None:
            raise session.fault
        return "answered"


@pytest.mark.parametrize("before", [[], [["first"]]], ids=["the first requests", "after a turn"])
@pytest.mark.parametrize("long_first", [False, True])
async def test_a_request_that_does_not_fit_next_to_another_is_refused_alone(
    tokenizer: Any, task: Task, before: list[list[str]], long_first: bool
) -> None:
    long, short = "x" * 600, "y" * 200
    both = [long, short] if long_first else [short, long]
    agent = ConcurrentRequests(ConversationTokens(chat_of(tokenizer)), [*before, both, ["z"]])
    runner = EpisodeRunner(
        agent=agent,
        policy=ScriptedPolicy(tokenizer, lambda turn, _: "hi"),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=8000,
        request_timeout_s=5.0,
    )
    episode = await runner.run(replace(task, tools=(), limits=LIMITS), episode_id="e")
    accepted, refused = agent.outcomes[-2]
    assert isinstance(accepted[0], Answer) and isinstance(refused, RequestError) and refused.kind == "context_length"
    assert not episode.left_out and not episode.failures and episode.stop_reason == "answered"
    spent = sum(len(turn.prompt_ids) + len(turn.completion_ids) for trajectory in episode.trajectories for turn in trajectory.turns)
    assert spent <= 800
    assert all(trajectory.turns or not trajectory.prompt for trajectory in episode.trajectories), "the refused request is not recorded"
    ((last, _),) = agent.outcomes[-1]
    assert isinstance(last, Answer), "the refused request does not reduce the room of later requests"
