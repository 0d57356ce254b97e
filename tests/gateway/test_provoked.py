"""Gateway faults that the policy's output provokes are blamed on the policy, and its sampling time counts as its own."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from agentrl.base.loop_lag import DRIVER_LAG, STALL_S, TICK_S
from agentrl.errors import RequestRefused
from agentrl.gateway import ConversationTokens, Gateway, Session, chat_completions
from agentrl.gateway.request import RequestError
from agentrl.protocols import LiveEpisode, Policy
from agentrl.records import Blame, Episode, Limits, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.policies import PacedPolicy
from agentrl.testing.sandboxes import printing, sample_task
from tests.chats import chat_of, shared_tokenizer

TOKENIZER = shared_tokenizer()
LIMITS = Limits(turns=10, turn_tokens=100_000, episode_tokens=200_000, wall_s=60.0)


@dataclass(slots=True)
class TwoRequests:
    """A program that sends two requests, and ends its session as `ExternalProgram` does."""

    chat: Any
    refusals: list[str] = field(default_factory=list)
    fails: bool = False  # the gateway fails at the second request

    async def act(self, episode: LiveEpisode) -> str:
        session = Session(episode=episode, tokens=ConversationTokens(self.chat), models=("policy",))
        messages = [{"role": "user", "content": "q"}]
        for number in range(3):
            try:
                if self.fails and number:
                    raise UnicodeError("no such letter")
                answer, delivered = await session.complete(chat_completions.read({"model": "policy", "messages": messages}))
            except RequestError as refused:
                self.refusals.append(refused.kind)
                break
            except UnicodeError as error:
                session.request_failed(error)
                break
            delivered()
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and now?"}]
        await session.close()
        if session.fault is not None:
            raise session.fault
        return session.limit or "answered"


def run_virtual_episode(policy: Policy, agent: TwoRequests) -> Episode:
    task: Task = replace(sample_task(), tools=(), limits=LIMITS)
    runner = EpisodeRunner(
        agent=agent,
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=10**6,
        request_timeout_s=60.0,
    )
    return run_virtually(runner.run(task, episode_id="e"))


def test_unreadable_completions_are_blamed_on_the_policy() -> None:
    chat = copy.copy(chat_of(TOKENIZER))

    class Choking(type(chat)):  # type: ignore[misc]
        def parse(self, *arguments: Any) -> Any:
            raise OverflowError("an id that is no character")

    chat.__class__ = Choking
    episode = run_virtual_episode(ScriptedPolicy.saying(TOKENIZER, "one", "two", "three"), TwoRequests(chat))
    assert not episode.left_out and [failure.kind for failure in episode.failures] == ["not_taken"]
    assert episode.completion_tokens and episode.trajectories[0].stop_reason == "failed"


@pytest.mark.parametrize(("turn", "left_out"), [(0, True), (1, False)])
def test_a_refused_request_excludes_an_episode_only_on_its_first_turn(turn: int, left_out: bool) -> None:
    def script(number: int, episode: str) -> str:
        if number == turn:
            raise RequestRefused("status 400")
        return "hello"

    agent = TwoRequests(chat_of(TOKENIZER))
    episode = run_virtual_episode(ScriptedPolicy(TOKENIZER, script), agent)
    assert episode.left_out is left_out and agent.refusals == ["failed"]


def test_a_gateway_fault_on_the_policys_text_is_blamed_on_the_policy() -> None:
    episode = run_virtual_episode(ScriptedPolicy.saying(TOKENIZER, "one", "two"), TwoRequests(chat_of(TOKENIZER), fails=True))
    assert not episode.left_out and episode.failures[0].blame is Blame.POLICY


@pytest.mark.parametrize(("speed", "left_out"), [(20.0, False), (0.0, True)])
def test_endless_sampling_is_blamed_on_the_policy_and_a_stalled_server_is_not(speed: float, left_out: bool) -> None:
    """The first answer is immediate; then the policy samples endlessly, or the server stalls."""
    policy = PacedPolicy(
        TOKENIZER, wants=lambda episode, turn: 10 if turn == 0 else 10**9, speed=lambda now, in_flight: 20.0 if now < 2.0 else speed
    )
    agent = TwoRequests(chat_of(TOKENIZER))
    episode = run_virtual_episode(policy, agent)
    assert episode.left_out is left_out and episode.trajectories[0].stop_reason == "wall_limit"
    assert left_out or episode.completion_tokens == sum(policy.sampled.values()) > 900


@pytest.mark.slow
async def test_a_request_that_blocks_the_driver_excuses_only_other_episodes(run_episode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the episode that started the gateway's server, in whose context all requests are served."""

    def blocking_count(session: Session, request: Any) -> int:
        time.sleep(3 * STALL_S)
        return 1

    monkeypatch.setattr(Session, "count", blocking_count)
    gateway, serving, ended = Gateway(), asyncio.Event(), asyncio.Event()

    async def wait(url: str, key: str) -> None:
        serving.set()
        await ended.wait()

    async def hold(url: str, key: str) -> None:
        await serving.wait()
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
            response = await http.post(f"{url}/v1/messages/count_tokens", headers={"x-api-key": key}, json=body)
            assert response.json() == {"input_tokens": 1}
        await asyncio.sleep(2 * TICK_S)
        ended.set()

    async def second() -> Any:
        await serving.wait()
        return await run_episode(hold, gateway=gateway, wall_s=600.0)

    async with DRIVER_LAG.watched(lambda alert: None):
        outcomes = await asyncio.gather(run_episode(wait, gateway=gateway, wall_s=600.0), second())
        other, own = (outcome.session.stalls.seconds for outcome in outcomes)
    assert other >= STALL_S and other - own >= STALL_S
