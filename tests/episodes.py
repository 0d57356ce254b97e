"""Fixtures of tests that run an episode, with a scripted policy and scripted sandboxes."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.protocols import Policy
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return shared_tokenizer()


@pytest.fixture
def task() -> Task:
    return Task(
        id="t",
        family="f",
        prompt=(Message(role="user", content="How many?"),),
        tools=("python", "submit"),
        sandbox=SandboxSpec(image="none"),
        verifiers=(),
        data={"answer": "3"},
        split=Split.TRAIN,
        files={"a.csv": "x\n1\n"},
        limits=Limits(turns=3, turn_tokens=200, episode_tokens=2000, wall_s=60.0),
    )


@pytest.fixture
def make_runner(tokenizer: Any) -> Any:
    def make(policy: ScriptedPolicy, sandboxes: ScriptedSandboxes | None = None) -> EpisodeRunner:
        return EpisodeRunner(
            policy=policy,
            sandboxes=sandboxes or ScriptedSandboxes(printing("3")),
            agent=TurnLoop(chat=chat_of(tokenizer)),
            sampling=Sampling(),
            max_model_len=4096,
            request_timeout_s=60.0,
        )

    return make


def restarting(policy: Policy, tokenizer: Any, prints: str = "3", *, max_model_len: int = 4096) -> EpisodeRunner:
    """A runner of episodes whose contexts may restart at each turn."""
    return EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing(prints)),
        agent=TurnLoop(chat=ChatFormat(tokenizer, rewritten="restart")),
        sampling=Sampling(),
        max_model_len=max_model_len,
        request_timeout_s=60.0,
    )
