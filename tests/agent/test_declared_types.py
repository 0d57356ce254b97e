"""The tool's schema decides the type of an argument without quotes, wherever in the schema it is declared."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent import tool
from agentrl.agent.forms import FORMS
from agentrl.agent.typed import typed_tool
from agentrl.records import Limits

VERSIONS = {"enum": ["3.10", "3.9"]}
DEFS = {"Version": {"type": "string"}, "Count": {"type": "integer"}, "Far": {"$ref": "#/$defs/Version"}, "a/b": {"type": "string"}}


def call_text(form: str, value: str) -> str:
    if form == "glm45":
        return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def read(form: str, value: str, parameters: Any) -> Any:
    reading = FORMS[form].read(call_text(form, value), [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert reading.errors == ()
    return reading.calls[0].arguments["a"]


forms = pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])


@forms
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/Version"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/Far"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/a~1b"}, "3.10", "3.10"),
        ({"$ref": "#/properties/other"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/Count"}, "3", 3),
        (VERSIONS, "3.10", "3.10"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, "2"]}, "1", 1),
        ({"enum": [1, "2"]}, "2", "2"),
        ({"enum": ["true", None]}, "true", "true"),
        ({"enum": ["true", None]}, "null", None),
        ({"const": "3.10"}, "3.10", "3.10"),
        ({"const": 3}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/Version"}, {"description": "a version"}]}, "3.10", "3.10"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["number", "null"]}]}, "3", 3),
        ({"anyOf": [VERSIONS, {"type": "null"}]}, "3.10", "3.10"),
        ({"anyOf": [VERSIONS, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, "all", "all"),
        ({"oneOf": [{"anyOf": [{"$ref": "#/$defs/Version"}]}]}, "3.10", "3.10"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3.10", "3.10"),
        ({"type": "array", "items": {"type": "string"}}, '["3.10"]', ["3.10"]),
        ({"type": "number"}, "3", 3),
        ({}, "3.10", 3.1),
        (True, "3.10", 3.1),
        ({"$ref": "elsewhere.json#/a"}, "3.10", 3.1),
        ({"anyOf": [{"type": "string"}, {}]}, "[1]", [1]),
    ],
)
def test_a_type_is_found_anywhere_in_the_schema(form: str, schema: Any, text: str, value: Any) -> None:
    root = {"type": "object", "properties": {"a": schema, "other": {"type": "string"}}, "$defs": DEFS}
    argument = read(form, text, root)
    assert argument == value and type(argument) is type(value)


PROPERTY = {"properties": {"a": {"type": "string"}}}


@forms
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/All", "$defs": {"All": PROPERTY}},
        {"allOf": [{"properties": {"b": {}}}, PROPERTY]},
        {"anyOf": [PROPERTY, {"properties": {"b": {}}}]},
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"^a": {"type": "string"}}},
    ],
)
def test_an_argument_is_found_anywhere_in_the_schema(form: str, parameters: Any) -> None:
    assert read(form, "3.10", parameters) == "3.10"


class Version(enum.Enum):
    OLD = "3.9"
    NEW = "3.10"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Transport:
    shelf: str


@tool
def f(
    a: Version, level: Level = Level.LOW, mode: Literal["1", "2"] = "1", where: Transport | None = None, most: int | Literal["all"] = 3
) -> str:
    """Take one of each."""
    return f"{a.name} {level.name} {mode!r} {where!r} {most!r}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": "3.10"}, "NEW LOW '1' None 3"),
        ({"a": "3.9", "level": "2", "mode": "2", "where": '{"shelf": "7"}', "most": "all"}, "OLD HIGH '2' Transport(shelf='7') 'all'"),
        ({"a": "3.9", "where": "null", "most": "5"}, "OLD LOW '1' None 5"),
    ],
)
async def test_a_typed_tool_accepts_values_without_quotes(arguments: dict[str, str], expected: str) -> None:
    typed = typed_tool(f)
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    reading = FORMS["qwen3_coder"].read(f"<tool_call>\n<function=f>\n{xml}</function>\n</tool_call>", [typed.schema])
    outcome = await typed(reading.calls[0].arguments, None, Limits())
    assert outcome.ok and outcome.output == expected


@forms
@given(
    st.sampled_from([VERSIONS, {"$ref": "#/$defs/Version"}, {"type": ["string", "null"]}]),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=8),
)
def test_a_string_is_never_changed(form: str, schema: Any, text: str) -> None:
    """Only null may have another meaning than its text."""
    argument = read(form, text, {"properties": {"a": schema}, "$defs": DEFS})
    assert argument == text or (argument is None and text in ("null", "None"))


@pytest.mark.sampled(2)
@forms
def test_a_circular_schema_is_read_in_bounded_time(form: str) -> None:
    round_ = {key: [{"$ref": "#/$defs/a"}] * 300 for key in ("anyOf", "oneOf", "allOf")}
    started = time.process_time()
    assert read(form, "3.10", {"$ref": "#/$defs/a", "$defs": {"a": round_}}) == 3.1
    assert (
        read(form, "3.10", {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {**round_, "type": ["string", "null"]}}}) == "3.10"
    )
    assert time.process_time() - started < 2.0
