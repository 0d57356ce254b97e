"""Episodes of an external program: a coroutine with a real SDK, a real server on loopback, and a scripted policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agentrl.gateway import ConversationTokens, Gateway, Session
from agentrl.objective import counted_samples
from agentrl.protocols import LiveEpisode
from agentrl.records import Episode, Group, Limits, Score, ScoredEpisode, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.episodes import task, tokenizer

__all__ = ["task", "tokenizer"]

Program = Callable[[str, str], Awaitable[Any]]


@dataclass(slots=True)
class ProgramAgent:
    """An agent that passes the address and key to a program."""

    tokens: ConversationTokens
    program: Program
    gateway: Gateway = field(default_factory=Gateway)
    sessions: list[Session] = field(default_factory=list)

    async def act(self, episode: LiveEpisode) -> str:
        session = Session(episode=episode, tokens=self.tokens, models=("policy",))
        self.sessions.append(session)
        async with self.gateway.session(session) as key:
            await self.program(self.gateway.url, key)
        episode.answer = session.last_words()
        return "answered"


@dataclass(slots=True)
class Outcome:
    """The episode, its session and its policy."""

    episode: Episode
    session: Session
    policy: ScriptedPolicy

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.session.counts.items() if count}

    def trained_once(self) -> bool:
        """Whether the samples train the sampled tokens, each once, after exactly the tokens that the policy saw."""
        group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=self.episode, score=Score(value=1.0)),))
        trained: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for sample in counted_samples([group]):
            edges = [index for index in range(1, len(sample.token_ids)) if sample.loss_mask[index] and not sample.loss_mask[index - 1]]
            for edge in edges:
                end = next((index for index in range(edge, len(sample.token_ids)) if not sample.loss_mask[index]), len(sample.token_ids))
                trained.append((sample.token_ids[:edge], sample.token_ids[edge:end]))
        turns = [turn.completion_ids for trajectory in self.episode.trajectories for turn in trajectory.turns]
        return sorted(prefix for prefix, _ in trained) == sorted(self.policy.prompts) and sorted(ids for _, ids in trained) == sorted(turns)


@pytest.fixture
def run_episode(tokenizer: Any, task: Task) -> Callable[..., Awaitable[Outcome]]:
    """Runs one episode; `script` returns the completion of the n-th request."""
    chat = chat_of(tokenizer)
    roomy_task = replace(task, tools=(), limits=Limits(turns=40, turn_tokens=400, episode_tokens=20000, wall_s=30.0))

    async def run(
        program: Program,
        *completions: str,
        script: Callable[[int, str], str] | None = None,
        gateway: Gateway | None = None,
        kind: type[ScriptedPolicy] = ScriptedPolicy,
        **limits: Any,
    ) -> Outcome:
        policy = kind(tokenizer, script or (lambda turn, _: completions[turn]))
        agent = ProgramAgent(ConversationTokens(chat), program, gateway or Gateway())
        runner = EpisodeRunner(
            agent=agent,
            policy=policy,
            sandboxes=ScriptedSandboxes(printing("")),
            sampling=Sampling(),
            max_model_len=20000,
            request_timeout_s=60.0,
        )
        episode = await runner.run(replace(roomy_task, limits=replace(roomy_task.limits, **limits)), episode_id="e")
        return Outcome(episode, agent.sessions[0], policy)

    return run
