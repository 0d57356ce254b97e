"""Answers that are constrained to JSON of a schema or to a tool call are sampled with supports and trained over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.agent.forms import FORMS
from agentrl.gateway.constraint import MAX_CHARS, MAX_DEPTH, MAX_SCHEMAS, Schemas, constraint
from agentrl.gateway.request import CompletionRequest, RequestError
from agentrl.objective import counted_samples
from agentrl.records import Group, Score, ScoredEpisode
from agentrl.records.sampling import CONSTRAINED_TOP_K
from agentrl.testing import ScriptedPolicy
from tests.chats import chat_of, shared_tokenizer
from tests.gateway.test_chat_completions import calls, client, user
from tests.gateway.test_options import CALLED, END, PATHS, SCHEMA, Http, parse_answer, tool
from tests.gateway.test_other_protocols import claude

FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
}
REQUIRED: dict[str, Any] = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}
NAMED: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "look"}},
    "messages": {"type": "tool", "name": "look"},
    "responses": {"type": "function", "name": "look"},
}


class Recording(ScriptedPolicy):
    """Records the requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params: list[Any] = []

    async def generate(self, prompt_ids: Any, params: Any, **kwargs: Any) -> Any:
        self.params.append(params)
        return await super().generate(prompt_ids, params, **kwargs)


async def run_recorded(run_episode: Any, text: str, program: Any) -> Any:
    async def connected_program(url: str, key: str) -> None:
        await program(Http(url, key))

    outcome = await run_episode(connected_program, kind=Recording, script=lambda turn, _: text)
    assert outcome.trained_once() and outcome.session.fault is None
    return outcome


def styles(constraint_json: str) -> list[Any]:
    """The formats in a constraint, as pairs of type and content."""
    formats: list[Any] = []
    remaining = [json.loads(constraint_json)["format"]]
    while remaining:
        part = remaining.pop()
        formats.append((part["type"], part.get("begin", part.get("json_schema"))))
        remaining += [*part.get("elements", ()), *part.get("tags", ()), *([part["content"]] if "content" in part else ())]
    return formats


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("plain_after", [False, True])
async def test_json_of_a_schema_is_sampled_with_supports(run_episode: Any, protocol: str, plain_after: bool) -> None:
    async def program(http: Http) -> None:
        answer = await http.answer(protocol, **FORMATS[protocol])
        assert parse_answer(protocol, answer) == ('{"at": "a"}', [], END[protocol])
        if plain_after:
            await http.answer(protocol)

    outcome = await run_recorded(run_episode, '{"at": "a"}', program)
    first = outcome.policy.params[0]
    assert (first.top_k, first.supports) == (CONSTRAINED_TOP_K, True) and styles(first.constraint) == [("json_schema", SCHEMA)]
    turns = [turn for trajectory in outcome.episode.trajectories for turn in trajectory.turns]
    assert turns[0].supports is not None and all(turns[0].supports.rows)
    if plain_after:
        assert (outcome.policy.params[1].constraint, outcome.policy.params[1].top_k, turns[1].supports) == ("", 0, None)
    group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=outcome.episode, score=Score(value=1.0)),))
    samples = counted_samples([group])
    trained = [row for sample in samples if sample.supports for row, on in zip(sample.supports.rows, sample.loss_mask, strict=True) if on]
    assert trained == list(turns[0].supports.rows), "each token is trained over its support"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
async def test_a_forced_call_is_constrained_to_the_tools(run_episode: Any, protocol: str, choice: Mapping[str, Any]) -> None:
    async def program(http: Http) -> None:
        other = {**tool(protocol), "name": "fly"} if protocol != "chat" else {"type": "function", "function": {"name": "fly"}}
        answer = await http.answer(protocol, tools=[tool(protocol), other], tool_choice=choice[protocol])
        assert parse_answer(protocol, answer) == ("", [("look", {"at": "a"})], CALLED[protocol])

    outcome = await run_recorded(run_episode, calls("look", at="a"), program)
    tag_starts = [start for kind, start in styles(outcome.policy.params[0].constraint) if kind == "tag"]
    assert any('"look"' in start for start in tag_starts) and len(tag_starts) == (2 if choice is REQUIRED else 1)


@pytest.mark.parametrize("protocol", PATHS)
async def test_json_or_a_call_if_a_request_has_tools_and_a_schema(run_episode: Any, protocol: str) -> None:
    async def program(http: Http) -> None:
        answer = await http.answer(protocol, tools=[tool(protocol)], **FORMATS[protocol])
        assert parse_answer(protocol, answer) == ("", [("look", {"at": "a"})], CALLED[protocol])

    outcome = await run_recorded(run_episode, calls("look", at="a"), program)
    kinds = [kind for kind, _ in styles(outcome.policy.params[0].constraint)]
    assert kinds[0] == "or" and sorted(kinds) == ["json_schema", "json_schema", "or", "tag", "tags_with_separator"]


async def test_json_objects_and_the_older_format_option_are_supported(run_episode: Any) -> None:
    async def program(http: Http) -> None:
        await http.answer("chat", response_format={"type": "json_object"})
        await http.answer("responses", text={"format": {"type": "json_object"}})
        await http.answer("messages", output_format={"type": "json_schema", "schema": SCHEMA})

    outcome = await run_recorded(run_episode, "{}", program)
    formats = [styles(params.constraint) for params in outcome.policy.params]
    assert formats == [[("json_schema", {"type": "object"})]] * 2 + [[("json_schema", SCHEMA)]]


class Part(BaseModel):
    """The answer type that a program requests with an SDK."""

    kind: Literal["leg", "top"]
    size: int | None = Field(default=None, description="in centimetres")


class Table(BaseModel):
    parts: list[Part]


@pytest.mark.slow
async def test_the_sdks_parse_structured_answers(run_episode: Any) -> None:
    table = Table(parts=[Part(kind="leg", size=3)])

    async def program(url: str, key: str) -> None:
        async with client(url, key) as sdk:
            chat = await sdk.chat.completions.parse(model="policy", messages=[user("one?")], response_format=Table)
            assert chat.choices[0].message.parsed == table
            response = await sdk.responses.parse(model="policy", input="two?", text_format=Table)
            assert response.output_parsed == table
        async with claude(url, key) as claude_sdk:
            message = await claude_sdk.messages.parse(model="policy", max_tokens=300, messages=[user("three?")], output_format=Table)
            assert message.parsed_output == table

    outcome = await run_episode(program, kind=Recording, script=lambda turn, _: table.model_dump_json())
    assert outcome.trained_once() and all(params.supports for params in outcome.policy.params) and outcome.counts == {"answered": 3}


def nested(depth: int) -> Any:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


SUPPORTED: dict[str, tuple[Any, Any]] = {
    "descriptions": ({"title": "T", "description": "d", "type": "string", "default": "a", "examples": []}, {"type": "string"}),
    "references": (
        {"$ref": "#/definitions/A", "definitions": {"A": {"enum": ["$ref", {"$ref": "x"}]}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"enum": ["$ref", {"$ref": "x"}]}}},
    ),
    "a tree": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}, "enum": {"type": "null"}}}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}, "enum": {"type": "null"}}}}},
    ),
    "one of several": ({"oneOf": [{"const": None}, {"allOf": [{"const": 3}]}]}, {"anyOf": [{"const": None}, {"const": 3}]}),
    "bounds": ({"type": ["integer", "null"], "minimum": -1, "maximum": None}, {"type": ["integer", "null"], "minimum": -1}),
    "anything": ({"type": "object", "additionalProperties": True, "properties": {"a": True}}, None),
}
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "a pattern": ({"type": "string", "pattern": "a"}, "s.pattern"),
    "a format": ({"type": "string", "format": "regex"}, "s.format"),
    "a long list": ({"type": "array", "maxItems": 10**9}, "s.maxItems"),
    "text instead of a number": ({"type": "integer", "minimum": "1"}, "s.minimum"),
    "another file": ({"$ref": "file:///etc/passwd"}, "s.$ref"),
    "a definition that is missing": ({"$ref": "#/$defs/A"}, "s"),
    "a definition of itself": ({"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": {"$ref": "#/$defs/A"}}}, "s"),
    "no schema": (3, "s"),
    "a list of types": ({"type": ["string", "dict"]}, "s.type"),
    "depth": (nested(MAX_DEPTH + 1), "s"),
    "width": ({"type": "object", "properties": {str(n): {"type": "null"} for n in range(MAX_SCHEMAS)}}, "s.properties"),
    "length": ({"enum": ["x" * (MAX_CHARS + 1)]}, "s.enum"),
    "everything at once": ({"not": {"type": "null"}}, "s.not"),
}


@pytest.mark.parametrize("case", SUPPORTED)
def test_a_schema_is_rebuilt(case: str) -> None:
    schema, expected = SUPPORTED[case]
    rebuilt = Schemas().rebuilt(schema, "s")
    assert rebuilt == (expected if expected is not None else {**schema, "properties": {"a": {}}})


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_schemas_are_refused_with_their_path(case: str) -> None:
    schema, path = UNSUPPORTED[case]
    with pytest.raises(RequestError) as refused:
        Schemas().rebuilt(schema, "s")
    assert refused.value.status == 400 and str(refused.value.param).startswith(path)


class Form:
    """The part of a chat format that a constraint depends on."""

    def __init__(self, form: str, *, thinks_first: bool = False) -> None:
        self.form, self.thinks_first = form, thinks_first

    def frame(self, name: str) -> Any:
        frame = FORMS[self.form].frame
        return None if frame is None else frame.of(name)


REQUEST = CompletionRequest(
    model="policy",
    system=(),
    messages=(),
    tools=(
        {"type": "function", "function": {"name": "look", "description": "", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "fly", "description": "", "parameters": {"type": "object", "pattern": 3}}},
    ),
)
CALLS = {
    "hermes": calls("look", at="a").replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>"),
    "llama3_json": '{"name": "look", "parameters": {"at": "a"}}',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\na\n</parameter>\n</function>\n</tool_call>",
}


def test_only_some_forms_of_calls_can_be_forced() -> None:
    with pytest.raises(RequestError) as refused:
        constraint(replace(REQUEST, forced=("look",), forced_by="tool_choice"), Form("mistral"))  # type: ignore[arg-type]
    assert refused.value.param == "tool_choice"
    strict = replace(REQUEST, forced=("fly",), forced_by="tool_choice", strict=frozenset(["fly"]))
    with pytest.raises(RequestError):
        constraint(strict, Form("hermes"))  # type: ignore[arg-type]


def matches(constraint_json: str, text: str) -> bool:
    """Whether a constraint allows exactly this text."""
    import xgrammar

    grammar = xgrammar.Grammar.from_structural_tag(constraint_json)
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(grammar, text))


@pytest.mark.vllm
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("thinks", [False, True])
def test_constrained_output_is_parsed_as_intended(form: str, thinks: bool) -> None:
    """Checks with the grammar library that vLLM uses and with the form's parser."""
    from agentrl.agent.forms import FORMS

    head = "hm, so\n</think>\n\n" if thinks else ""
    chat: Any = Form(form, thinks_first=thinks)
    call = CALLS[form]
    [parsed] = FORMS[form].read(call, REQUEST.tools).calls
    assert (parsed.name, parsed.arguments) == ("look", {"at": "a"})
    for forced in (("look",), ("look", "fly")):
        tag = constraint(replace(REQUEST, forced=forced, forced_by="tool_choice"), chat)
        assert matches(tag, head + call) and not matches(tag, head) and not matches(tag, f"{head}no"), forced
        assert not matches(tag, head + call.replace("at", "to")), "only the schema's names are allowed"
    either = constraint(replace(REQUEST, shape=SCHEMA), chat)
    assert matches(either, head + call) and matches(either, head + '{"at": "b"}') and not matches(either, f"{head}word")
    alone = constraint(replace(REQUEST, tools=(), shape=SCHEMA), chat)
    assert matches(alone, head + '{"at": "b"}') and not matches(alone, head + '{"at": 3}') and not matches(alone, head + call)


def test_a_chat_has_the_frame_of_its_form() -> None:
    chat = chat_of(shared_tokenizer())
    assert chat.frame("look") == FORMS["hermes"].frame.of("look") and not chat.thinks_first
