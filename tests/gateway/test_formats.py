"""The gateway with models whose chat formats differ: call ids, names in results, several end tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent.rendering import Renderer
from agentrl.agent.template_probe import TOOL
from agentrl.gateway import ConversationTokens, Session, chat_completions
from agentrl.protocols import LiveEpisode
from agentrl.records import Limits, Message, SandboxSpec, Split, Task, ToolCall
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReplayPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.agent.conversations import NAME, Round, conversations, sayable, texts
from tests.agent.test_real_vocabularies import FOUND, chat, tokenizer
from tests.gateway.conftest import Outcome
from tests.strategies import examples

pytestmark = pytest.mark.models

TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="-"),),
    tools=(),
    sandbox=SandboxSpec(image="-"),
    verifiers=(),
    data={},
    split=Split.TRAIN,
    limits=Limits(turns=40, turn_tokens=20_000, episode_tokens=200_000, wall_s=60.0),
)

models = pytest.mark.parametrize("name", ["qwen3_5_think", "llama3_2", "mistral_v3", "deepseek_v3", "glm4moe", "gptoss"])


@dataclass(slots=True)
class Model:
    """A policy that samples given ids in turn, and records its prompts."""

    said: Sequence[Sequence[int]]
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int]) -> Sequence[int]:
        self.prompts.append(tuple(prompt))
        return self.said[len(self.prompts) - 1]


@dataclass(slots=True)
class Client:
    """An agent that sends the complete conversation each time."""

    tokens: ConversationTokens
    asked: str
    shown: Sequence[Sequence[dict[str, Any]]]
    session: Session | None = None

    async def act(self, episode: LiveEpisode) -> str:
        self.session = Session(episode=episode, tokens=self.tokens, models=("policy",))
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.asked}]
        for shown in (*self.shown, ()):
            asked = chat_completions.read(json.loads(json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})))
            answer, delivered = await self.session.complete(asked)
            delivered()
            message = chat_completions.write(answer, asked)["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            for one in calls:  # as a client writes them that has read them
                one["function"]["arguments"] = json.dumps(dict(reversed(json.loads(one["function"]["arguments"]).items())))
            results = [one for one in shown if one["role"] == "tool"]
            ids = [{"tool_call_id": call["id"], **one} for call, one in zip(calls, results, strict=True)] if results else []
            kept = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
            messages += [kept, *reversed(ids), *(one for one in shown if one["role"] != "tool")]
        await self.session.close()
        return "answered"


def lead(name: str, asked: str, said: Sequence[Sequence[int]], shown: Sequence[Sequence[dict[str, Any]]]) -> Outcome:
    model, client = Model(said), Client(ConversationTokens(chat(name)), asked, shown)
    runner = EpisodeRunner(
        agent=client,
        policy=ReplayPolicy(model),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=200_000,
        request_timeout_s=60.0,
    )
    episode = asyncio.run(runner.run(TASK, episode_id="e"))
    assert client.session is not None and not episode.failures, episode.failures
    return Outcome(episode, client.session, model)  # type: ignore[arg-type]


def rendered(name: str, asked: str, said: Sequence[Round]) -> tuple[list[list[int]], list[int]]:
    """The turns of a conversation and its rendered form, with control tokens in messages escaped."""
    made, one = tokenizer(name), chat(name)
    renderer = Renderer(made)
    renderer.arguments_as_text = one._renderer.arguments_as_text
    ends = [made.decode([token]) for token in one.stop_token_ids]
    messages = [Message(role="user", content=one.escape_text(asked))]
    before, turns = renderer.text(renderer.messages(messages), [TOOL]), list[list[int]]()
    for turn in said:
        thought = sayable(turn.thought, one) if renderer.knows_thinking else ""
        if before.rstrip().endswith("<think>"):
            thought = thought or "-"
        content = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        calls = tuple(ToolCall(name=NAME, arguments=sayable(call, one)) for call in turn.calls)
        messages += [Message(role="assistant", content=content, tool_calls=calls)]
        messages += [Message(role="tool", content=one.escape_text(text)) for text in turn.outputs]
        whole = renderer.text(renderer.messages(messages), [TOOL])
        rest = whole[len(before) :]
        at, end = min((place, end) for end in ends if (place := rest.find(end)) >= 0)
        turns.append([*renderer.ids(rest[:at]), *renderer.ids(end)])
        before = whole
    return turns, list(renderer.ids(before))


def last_words(name: str, text: str) -> list[int]:
    begins = {"gptoss": "<|channel|>final<|message|>", "qwen3_5_think": "hm\n</think>\n\n"}.get(name, "")
    return [*tokenizer(name).encode(begins + text, add_special_tokens=False), chat(name).stop_token_ids[0]]


@models
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_conversation_with_tools_equals_the_rendered_one(name: str, data: st.DataObject) -> None:
    """Calls come back with the gateway's ids, keys in another order, and results in reverse."""
    asked: str = data.draw(texts) or "-"
    assert_same(name, asked, data.draw(conversations(most_calls=FOUND[name][1])))


@models
def test_control_tokens_in_messages_reach_the_model_as_text(name: str) -> None:
    """All control tokens of the tokenizer, in the question, in a result and in a call."""
    spelled = " ".join(tokenizer(name).all_special_tokens)
    assert chat(name).escape_text(spelled) != spelled
    assert_same(name, spelled, [Round("", ({"code": spelled},), (spelled,)), Round("", ({"code": "x"},), (f"{spelled}\n{spelled}",))])


def assert_same(name: str, asked: str, said: Sequence[Round]) -> None:
    """Each turn through the gateway: every token is trained once, and the last prompt equals the rendered conversation."""
    turns, whole = rendered(name, asked, said)
    shown = [[{"role": "tool", "content": text} for text in turn.outputs] for turn in said]
    outcome = lead(name, asked, [*turns, last_words(name, "Done.")], shown)
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1
    assert outcome.policy.prompts[-1] == tuple(whole)
    assert outcome.counts == {"answered": len(said) + 1}


CALL = Round("", ({"code": "x"},), ("seen",))


@models
@pytest.mark.parametrize("after", ["calls", "words"])
def test_a_user_message_is_appended_or_starts_a_new_context(name: str, after: str) -> None:
    """Results with a user message next to them, and a user message after an answer."""
    [turn], _ = rendered(name, "q?", [CALL])
    word = {"role": "user", "content": "And now?"}
    first, shown = (turn, [{"role": "tool", "content": "seen"}, word]) if after == "calls" else (last_words(name, "It is 4."), [word])
    outcome = lead(name, "q?", [first, last_words(name, "Done.")], [shown])
    lines, text = outcome.episode.trajectories, tokenizer(name).decode(outcome.policy.prompts[-1])
    assert outcome.trained_once() and outcome.session.last_words() == "Done."
    assert text.count("And now?") == 1 and text.count("q?") == 1 and text.count("seen") == (after == "calls")
    assert [line.agent for line in lines] == ["main"] * len(lines)
    assert len(lines) == (2 if (name, after) in RESTARTED else 1) == 1 + outcome.session.counts["restart"]


RESTARTED = {
    ("qwen3_5_think", "calls"),  # the template drops what was thought before a user's words
    ("qwen3_5_think", "words"),
    ("glm4moe", "calls"),  # no token ends a turn: the next message's first one does
    ("glm4moe", "words"),
    ("gptoss", "words"),  # the sampled end is written as another one in the turns before
    ("mistral_v3", "calls"),  # results go by the ids that the model gave, which a user's words beside them leave no place for
}
"""Where what a user says begins a context anew."""
