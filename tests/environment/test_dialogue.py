"""Conversations between a scripted policy and a simulated user: ends, bounds, hostile texts, faults, resumption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.environment import close_environments, open_environment
from agentrl.environment.dialogue import END, LEFT, UNREADABLE, Dialogue
from agentrl.errors import PluginError, PolicyFault, PromptRefusedError
from agentrl.records import Blame, EnvironmentSpec, Episode, EpisodeState, Limits, Split, Task, ToolCall, codec
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.episodes import tokenizer as tokenizer

HERE = "tests.environment.test_dialogue:"
received: list[tuple[str, Sequence[tuple[str, str]]]] = []  # the calls of the simulated users in a test


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    received.clear()
    yield
    await close_environments()


def parrot(brief: str, history: Sequence[tuple[str, str]]) -> str:
    """Repeats what the agent writes, and leaves after `bye`."""
    received.append((brief, history))
    return f"So long. {END}" if history[-1][1] == "bye" else f"You say: {history[-1][1]}"


async def slow(brief: str, history: Sequence[tuple[str, str]]) -> str:
    await asyncio.sleep(10.0)
    return "late"


def broken(brief: str, history: Sequence[tuple[str, str]]) -> Any:
    """Fails in the way that its brief selects."""
    if brief == "policy":
        raise PolicyFault("the agent is to blame")
    if brief == "raise":
        raise ValueError("no reply")
    return {"empty": " ", "none": None, "number": 4}[brief]


def censor(brief: str, history: Sequence[tuple[str, str]]) -> str:
    """A model that rejects what the agent writes, or everything."""
    received.append((brief, history))
    if brief == "everything" or any(text == "filth" for _, text in history):
        raise PromptRefusedError("status 400")
    return "Pardon?"


class Counter:
    """A backend that counts."""

    schemas = ({"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}},)

    def __init__(self, records: Any) -> None:
        self.count = records.get("count", 0)

    def call(self, name: str, arguments: Any) -> str:
        self.count += 1
        return f"count {self.count}"


def task_of(user: str = "parrot", **options: Any) -> Task:
    options = {"user": user if ":" in user else HERE + user, "brief": "Ana", **options}
    spec = EnvironmentSpec(ref="agentrl.environment.dialogue:Dialogues", options=options, resume="snapshot")
    return Task(
        id="t",
        family="talk",
        prompt=(),
        tools=(),
        verifiers=("agentrl.environment:episode_return",),
        data={},
        split=Split.TRAIN,
        limits=Limits(turns=16),
        environment=spec,
    )


def runner_of(tokenizer: Any, *texts: str) -> EpisodeRunner:
    return EpisodeRunner(
        policy=ScriptedPolicy.saying(tokenizer, *texts),
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(tokenizer)),
        sampling=Sampling(),
        max_model_len=8192,
        request_timeout_s=60.0,
    )


async def play(task: Task, tokenizer: Any, *texts: str) -> Episode:
    return await runner_of(tokenizer, *texts).run(task, episode_id="e")


def outputs(episode: Episode) -> list[str]:
    return [result.output for turn in episode.trajectories[0].turns for result in turn.tool_results]


ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


async def test_the_user_answers_texts_and_the_backend_calls(tokenizer: Any) -> None:
    task = task_of(backend=f"{HERE}Counter", records={"count": 4}, instructions="Be kind.")
    runner = runner_of(tokenizer, "hi", ADD, "bye", "never sampled")
    episode = await runner.run(task, episode_id="e")
    assert outputs(episode) == ["You say: hi", "count 5", "So long."] and episode.stop_reason == "terminated"
    assert [text for _, history in received for speaker, text in history[-1:] if speaker == "agent"] == ["hi", "bye"], "calls are hidden"
    first = episode.trajectories[0].prompt
    assert [message.content for message in first] == ["Be kind.", "Hello."] and {brief for brief, _ in received} == {"Ana"}


async def test_only_the_agents_tokens_are_trained(tokenizer: Any) -> None:
    episode = await play(task_of(), tokenizer, "hi", "bye")
    sampled = [tokenizer.decode(turn.completion_ids) for turn in episode.trajectories[0].turns]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == ["hi", "bye"]


async def test_only_a_reply_of_the_user_that_ends_with_the_marker_ends_the_conversation(tokenizer: Any) -> None:
    episode = await play(task_of(), tokenizer, f"say {END}", f"{END} {END}", "bye")
    assert outputs(episode) == ["You say: say [END ]", "You say: [END ] [END ]", "So long."]


async def test_bounds_on_replies_and_lengths(tokenizer: Any) -> None:
    episode = await play(task_of(turns=2, chars=20), tokenizer, 40 * "x", "hi", "never sampled")
    assert outputs(episode) == [f"You say: {11 * 'x'}", f"You say: hi\n{LEFT}"] and episode.stop_reason == "terminated"
    assert all(len(text) <= 20 for _, history in received for _, text in history)


async def test_an_empty_text_is_not_sent_to_the_user(tokenizer: Any) -> None:
    assert outputs(await play(task_of(), tokenizer, " ", "bye"))[0] == "error: the message is empty"


@pytest.mark.parametrize("brief", ["policy", "raise", "empty", "none", "number"])
async def test_a_user_that_fails_is_an_infrastructure_fault(tokenizer: Any, brief: str) -> None:
    episode = await play(task_of("broken", brief=brief), tokenizer, "hi")
    (failure,) = episode.failures
    assert episode.left_out and failure.blame is Blame.INFRASTRUCTURE and failure.stage == "environment"


async def test_a_user_that_does_not_answer_in_time_is_an_infrastructure_fault(tokenizer: Any) -> None:
    (failure,) = (await play(task_of("slow", step_s=0.05), tokenizer, "hi")).failures
    assert failure.blame is Blame.INFRASTRUCTURE


async def test_an_agent_whose_text_the_user_model_rejects_is_still_scored(tokenizer: Any) -> None:
    episode = await play(task_of("censor", turns=2), tokenizer, "filth", "hi")
    assert outputs(episode) == ["Pardon?", f"Pardon?\n{LEFT}"] and not episode.failures
    assert received[1][1] == (("user", "Hello."), ("agent", UNREADABLE))
    (failure,) = (await play(task_of("censor", brief="everything"), tokenizer, "hi")).failures
    assert failure.blame is Blame.INFRASTRUCTURE


async def test_a_resumed_conversation_does_not_repeat_calls_of_the_user(tokenizer: Any) -> None:
    task, texts = task_of(backend=f"{HERE}Counter"), ("hi", ADD, ADD, "ho", "bye")
    states: dict[int, EpisodeState | None] = {}

    async def on_turn(count: int, capture: Any) -> None:
        states[count] = await capture()

    uninterrupted = await runner_of(tokenizer, *texts).run(task, episode_id="e", on_turn=on_turn)
    assert sorted(states) == [1, 2, 3, 4]
    for turns, state in states.items():
        assert state is not None
        received.clear()
        start = codec.from_json(EpisodeState, codec.to_json(state))
        continued = await runner_of(tokenizer, *texts).run(task, episode_id="e", start=start)
        assert not continued.failures and outputs(continued) == outputs(uninterrupted)
        assert len(received) == len([text for text in texts[turns:] if text != ADD])


async def test_a_call_without_a_backend_is_an_error() -> None:
    dialogue = Dialogue(user=f"{HERE}parrot", brief="Ana")
    await dialogue.reset()
    assert (await dialogue.step(ToolCall(name="add", arguments={}))).observation.text == "error: there is no function add"


@pytest.mark.parametrize(
    "options", [{"turns": 0}, {"opening": ""}, {"actions": ["a"]}, {"translate": f"{HERE}parrot"}, {"unknown": 1}, {"user": f"{HERE}x"}]
)
async def test_invalid_options_are_errors(options: dict[str, Any]) -> None:
    spec = task_of().environment
    assert spec is not None
    with pytest.raises(PluginError):
        await open_environment(EnvironmentSpec(ref=spec.ref, options={**spec.options, **options}))
