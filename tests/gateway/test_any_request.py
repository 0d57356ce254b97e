"""Any JSON in any field of a request is answered, or refused with a 4xx status, and never causes an internal error."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent import ChatFormat
from agentrl.agent.forms import FORMS
from agentrl.gateway import ConversationTokens, Session
from agentrl.gateway.request import RequestError
from agentrl.protocols import LiveEpisode
from agentrl.records import Episode, Limits, Message, SandboxSpec, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.agent.test_any_schema import SCHEMAS, TEXTS
from tests.chats import chat_of, shared_tokenizer
from tests.fuzz.targets.gateway import PROTOCOLS, seeds
from tests.strategies import examples, json_values

TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="-"),),
    tools=(),
    sandbox=SandboxSpec(image="-"),
    verifiers=(),
    data={},
    split=Split.TRAIN,
    limits=Limits(turns=4, turn_tokens=2000, episode_tokens=100_000, wall_s=60.0),
)
BODIES = [(label.decode(), json.loads(body)) for label, _, body in (seed.partition(b"\n") for seed in seeds())]


def chat_in(form: str) -> ChatFormat:
    """A chat whose model writes calls in this form."""
    chat = copy.copy(chat_of(shared_tokenizer()))
    chat._form = FORMS[form]
    return chat


CHATS = {form: chat_in(form) for form in ("hermes", "qwen3_coder", "glm45")}


class OneRequest:
    """An agent whose program sends one request."""

    def __init__(self, protocol: Any, body: Any, form: str) -> None:
        self.protocol, self.body, self.form = protocol, body, form
        self.refused: RequestError | None = None
        self.written: Any = None

    async def act(self, episode: LiveEpisode) -> str:
        session = Session(episode=episode, tokens=ConversationTokens(CHATS[self.form]), models=("policy",))
        try:
            request = self.protocol.read(self.body)
            answer, delivered = await session.complete(request)
            delivered()
            self.written = [self.protocol.write(answer, request), *self.protocol.events(answer, request)]
        except RequestError as refused:
            self.refused = refused
            self.written = self.protocol.error(refused)
        await session.close()
        assert session.fault is None, session.fault
        return "answered"


def run_request(label: str, body: Any, form: str) -> tuple[OneRequest, Episode]:
    agent = OneRequest(PROTOCOLS[label], body, form)
    runner = EpisodeRunner(
        agent=agent,
        policy=ScriptedPolicy.saying(shared_tokenizer(), TEXTS[form]),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=100_000,
        request_timeout_s=60.0,
    )
    return agent, asyncio.run(runner.run(TASK, episode_id="e"))


def check(label: str, body: Any, form: str) -> int:
    """The status of the answer."""
    agent, episode = run_request(label, body, form)
    assert not episode.left_out and episode.failures == (), episode.failures
    assert json.loads(json.dumps(agent.written)) is not None
    assert agent.refused is None or 400 <= agent.refused.status < 500, agent.refused
    return 200 if agent.refused is None else agent.refused.status


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


def replaced_at(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a path."""
    if not path:
        return value
    copied = copy.deepcopy(body)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", CHATS)
@pytest.mark.parametrize("value", [[], None, 3, "x", {"at": None}, {"at": []}, {"at": {"anyOf": None, "type": {}}}])
def test_a_schema_with_unusual_properties_is_answered(form: str, value: Any) -> None:
    schema = {"type": "object", "properties": value, "required": value}
    tool = {"name": "look", "description": "Looks."}
    user = [{"role": "user", "content": "look"}]
    bodies = {
        "chat": {"messages": user, "tools": [{"type": "function", "function": {**tool, "parameters": schema}}]},
        "messages": {"messages": user, "max_tokens": 900, "tools": [{**tool, "input_schema": schema}]},
        "responses": {"input": "look", "tools": [{"type": "function", **tool, "parameters": schema}]},
    }
    for label, body in bodies.items():
        assert check(label, {"model": "policy", **body}, form) == 200


@pytest.mark.sampled(7)
@pytest.mark.parametrize("number", range(len(BODIES)))
@pytest.mark.parametrize("value", [None, [], {}, 3, -1.5, True, "", "x", "\ud800", [[]], [None], {"type": "text", "text": 1}])
def test_any_value_at_any_path_of_a_request(number: int, value: Any) -> None:
    label, body = BODIES[number]
    assert check(label, body, "qwen3_coder") == 200
    for path in paths_of(body):
        check(label, replaced_at(body, path, value), "qwen3_coder")


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=examples(200))
def test_any_json_at_several_paths_of_a_request(data: st.DataObject) -> None:
    label, body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths_of(body))))
        body = replaced_at(body, path, data.draw(SCHEMAS | json_values))
    check(label, body, data.draw(st.sampled_from(list(CHATS))))
