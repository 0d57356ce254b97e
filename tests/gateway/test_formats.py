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

    completions: Sequence[Sequence[int]]
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int]) -> Sequence[int]:
        self.prompts.append(tuple(prompt))
        return self.completions[len(self.prompts) - 1]


@dataclass(slots=True)
class Client:
    """An agent that sends the complete conversation each time."""

    tokens: ConversationTokens
    question: str
    outputs: Sequence[Sequence[dict[str, Any]]]
    session: Session | None = None

    async def act(self, episode: LiveEpisode) -> str:
        self.session = Session(episode=episode, tokens=self.tokens, models=("policy",))
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.question}]
        for following in (*self.outputs, ()):
            request = chat_completions.read(json.loads(json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})))
            answer, delivered = await self.session.complete(request)
            delivered()
            message = chat_completions.write(answer, request)["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            for call in calls:  # as a client that parsed the arguments writes them
                call["function"]["arguments"] = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
            results = [reply for reply in following if reply["role"] == "tool"]
            ids = [{"tool_call_id": call["id"], **result} for call, result in zip(calls, results, strict=True)] if results else []
            message_sent = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
            messages += [message_sent, *reversed(ids), *(reply for reply in following if reply["role"] != "tool")]
        await self.session.close()
        return "answered"


def run_episode(name: str, question: str, completions: Sequence[Sequence[int]], outputs: Sequence[Sequence[dict[str, Any]]]) -> Outcome:
    model, client = Model(completions), Client(ConversationTokens(chat(name)), question, outputs)
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


def render_conversation(name: str, question: str, rounds: Sequence[Round]) -> tuple[list[list[int]], list[int]]:
    """The turns of a conversation and its rendered form, with control tokens in messages escaped."""
    tokenizer_, chat_format = tokenizer(name), chat(name)
    renderer = Renderer(tokenizer_)
    renderer.arguments_as_text = chat_format._renderer.arguments_as_text
    ends = [tokenizer_.decode([token]) for token in chat_format.stop_token_ids]
    messages = [Message(role="user", content=chat_format.escape_text(question))]
    before, turns = renderer.text(renderer.messages(messages), [TOOL]), list[list[int]]()
    for turn in rounds:
        thought = sayable(turn.thought, chat_format) if renderer.knows_thinking else ""
        if before.rstrip().endswith("<think>"):
            thought = thought or "-"
        content = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        calls = tuple(ToolCall(name=NAME, arguments=sayable(call, chat_format)) for call in turn.calls)
        messages += [Message(role="assistant", content=content, tool_calls=calls)]
        messages += [Message(role="tool", content=chat_format.escape_text(text)) for text in turn.outputs]
        complete = renderer.text(renderer.messages(messages), [TOOL])
        rest = complete[len(before) :]
        start, end = min((index, end) for end in ends if (index := rest.find(end)) >= 0)
        turns.append([*renderer.ids(rest[:start]), *renderer.ids(end)])
        before = complete
    return turns, list(renderer.ids(before))


def final_answer(name: str, text: str) -> list[int]:
    starts = {"gptoss": "<|channel|>final<|message|>", "qwen3_5_think": "hm\n</think>\n\n"}.get(name, "")
    return [*tokenizer(name).encode(starts + text, add_special_tokens=False), chat(name).stop_token_ids[0]]


@models
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_conversation_with_tools_equals_the_rendered_one(name: str, data: st.DataObject) -> None:
    """The client sends calls back with the gateway's ids and reordered keys, and results in reverse."""
    question: str = data.draw(texts) or "-"
    assert_same(name, question, data.draw(conversations(most_calls=FOUND[name][1])))


@models
def test_control_tokens_in_messages_reach_the_model_as_text(name: str) -> None:
    """All control tokens of the tokenizer, in the question, in a result and in a call."""
    spelled = " ".join(tokenizer(name).all_special_tokens)
    assert chat(name).escape_text(spelled) != spelled
    assert_same(name, spelled, [Round("", ({"code": spelled},), (spelled,)), Round("", ({"code": "x"},), (f"{spelled}\n{spelled}",))])


def assert_same(name: str, question: str, rounds: Sequence[Round]) -> None:
    """Each turn through the gateway: every token is trained once, and the last prompt equals the rendered conversation."""
    turns, complete = render_conversation(name, question, rounds)
    outputs = [[{"role": "tool", "content": text} for text in turn.outputs] for turn in rounds]
    outcome = run_episode(name, question, [*turns, final_answer(name, "Done.")], outputs)
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1
    assert outcome.policy.prompts[-1] == tuple(complete)
    assert outcome.counts == {"answered": len(rounds) + 1}


CALL = Round("", ({"code": "x"},), ("seen",))


@models
@pytest.mark.parametrize("after", ["calls", "answer"])
def test_a_user_message_is_appended_or_starts_a_new_context(name: str, after: str) -> None:
    """Results with a user message next to them, and a user message after an answer."""
    [turn], _ = render_conversation(name, "q?", [CALL])
    user = {"role": "user", "content": "And now?"}
    first, replies = (turn, [{"role": "tool", "content": "seen"}, user]) if after == "calls" else (final_answer(name, "It is 4."), [user])
    outcome = run_episode(name, "q?", [first, final_answer(name, "Done.")], [replies])
    trajectories, text = outcome.episode.trajectories, tokenizer(name).decode(outcome.policy.prompts[-1])
    assert outcome.trained_once() and outcome.session.last_words() == "Done."
    assert text.count("And now?") == 1 and text.count("q?") == 1 and text.count("seen") == (after == "calls")
    assert [trajectory.agent for trajectory in trajectories] == ["main"] * len(trajectories)
    assert len(trajectories) == (2 if (name, after) in RESTARTED else 1) == 1 + outcome.session.counts["restart"]


RESTARTED = {
    ("qwen3_5_think", "calls"),  # the template drops the reasoning before a user message
    ("qwen3_5_think", "answer"),
    ("glm4moe", "calls"),  # no token ends a turn; the first token of the next message does
    ("glm4moe", "answer"),
    ("gptoss", "answer"),  # the template writes another end token for earlier turns
    ("mistral_v3", "calls"),  # results refer to the model's call ids; a user message next to them leaves no room for these
}
"""The cases in which a user message starts a new context."""
