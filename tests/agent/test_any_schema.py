"""Readers of tool calls and arguments never raise for any tool schema of a client or server."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent.arguments import argument_errors, argument_example
from agentrl.agent.forms import FORMS
from agentrl.agent.forms.base import Reading
from agentrl.agent.forms.deepseek import CALL, CALLS, SEP
from agentrl.agent.tools import ToolWording, reworded_schema
from agentrl.errors import UserError
from tests.strategies import json_leaves, json_objects, json_values

KEYS = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "default", "minimum", "at"]
)
VALUES = st.sampled_from(["string", "object", "array", "integer", "#/$defs/at", "#", "at", 1, None, True, [], {}, ["string", None, 3, []]])
SCHEMAS = st.recursive(
    json_leaves | VALUES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
TEXTS = {
    "hermes": '<tool_call>{"name": "look", "arguments": {"at": "1", "more": null}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]look[ARGS]{"at": 1}',
    "deepseek_v3": f"{CALLS[0]}{CALL[0]}function{SEP}look\n```json\n{{}}\n```{CALL[1]}{CALLS[1]}",
    "deepseek_v31": f'{CALLS[0]}{CALL[0]}look{SEP}{{"at": 1}}{CALL[1]}{CALLS[1]}',
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>',
    "llama3_json": '{"name": "look", "parameters": {"at": 1}}',
    "pythonic": "[look(at=1, more=None)]",
}
HOLDERS = [
    lambda value: value,
    lambda value: {"type": "function", "function": value},
    lambda value: {"type": "function", "function": {"name": "look", "parameters": value}},
    lambda value: {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": value, "required": value}},
    },
    lambda value: {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": value, "more": value}}}},
    lambda value: {"type": "function", "function": {"name": "look", "parameters": {"$defs": {"at": value}, "$ref": "#/$defs/at"}}},
]


def test_every_form_is_tested() -> None:
    assert TEXTS.keys() == FORMS.keys()
    for name, text in TEXTS.items():
        assert [call.name for call in FORMS[name].read(text, []).calls] == ["look"]


@pytest.mark.parametrize("name", FORMS)
def test_an_unusual_client_schema_does_not_change_calls(name: str) -> None:
    values: list[Any] = [[], None, {"at": None}, {"at": {"anyOf": None}}, {"at": {"type": {"a": 1}}}, 3, "x"]
    for holder, value in itertools.product(HOLDERS, values):
        reading = FORMS[name].read(TEXTS[name], [holder(value)])
        assert [call.name for call in reading.calls] == ["look"] and reading.errors == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
@given(text=st.text() | st.just(""), value=SCHEMAS | json_values, more=SCHEMAS)
def test_readers_never_raise_for_any_schema(name: str, text: str, value: Any, more: Any) -> None:
    schemas = [more, *(holder(value) for holder in HOLDERS)]
    for completion in (TEXTS[name], text, TEXTS[name] + text, text + TEXTS[name]):
        assert isinstance(FORMS[name].read(completion, schemas), Reading)


@given(value=SCHEMAS | json_values, arguments=json_objects | st.dictionaries(KEYS, SCHEMAS, max_size=3))
def test_arguments_are_checked_for_any_schema(value: Any, arguments: dict[str, Any]) -> None:
    for holder in HOLDERS:
        schema = holder(value)
        assert isinstance(argument_errors(schema, arguments), str) and isinstance(argument_example(schema), str)


@given(value=SCHEMAS | json_values)
def test_descriptions_apply_to_any_schema_or_raise(value: Any) -> None:
    for holder in HOLDERS[2:]:
        try:
            reworded = reworded_schema(holder(value), ToolWording(description="Looks.", arguments={"at": "where"}))
        except UserError:
            continue
        assert reworded["function"]["parameters"]["properties"]["at"]["description"] == "where"


def test_a_recursive_schema_is_checked_in_bounded_time() -> None:
    names = [f"p{number}" for number in range(300)]
    round_ = {"type": "object", "properties": {name: {"$ref": "#/$defs/a"} for name in names}, "required": names}
    many = {"anyOf": [{"$ref": "#/$defs/b"}] * 300}
    started = time.process_time()
    for first in ("a", "b"):
        schema = HOLDERS[2]({"type": "object", "$ref": f"#/$defs/{first}", "$defs": {"a": round_, "b": many}})
        argument_example(schema)
        argument_errors(schema, json.loads('{"p0": {"p0": {"p0": {"p0": {"p0": {"p0": {"p0": {"p0": {"p0": 1}}}}}}}}}'))
    assert time.process_time() - started < 2.0
