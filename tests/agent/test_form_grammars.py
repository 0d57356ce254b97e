"""Every form of tool calls round-trips a call, whatever markup its arguments contain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agentrl.agent.forms import FORMS
from agentrl.agent.forms.deepseek import CALL, CALLS, SEP
from agentrl.records import ToolCall

Arguments = Mapping[str, Any]

MARKS = sorted(
    {mark for form in FORMS.values() for mark in (*form.opens, *form.ends, *form.hands_over, *form.inner)}
    | {"</tool_call>", "<function=f0>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"}
    | {"</arg_value>", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>", *CALLS, *CALL, SEP, "```json", "```", "{}"}
    | {"\n", '"', "\\", "'", ";", "[f0(", ")]", "}", '{"name": "f0", "arguments": {}}', "<|start|>assistant"}
)
texts = st.lists(st.sampled_from(MARKS) | st.text(st.characters(codec="utf-8"), max_size=3), max_size=6).map("".join)
leaves = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2), max_leaves=5)
named = st.dictionaries(st.sampled_from(["a", "b_2", "code"]), values, max_size=3)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(number: int, arguments: Arguments) -> str:
    return f"<tool_call>\n{dumps({'name': f'f{number}', 'arguments': arguments})}\n</tool_call>"


def qwen3_coder(number: int, arguments: Arguments) -> str:
    parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f{number}>\n{parameters}</function>\n</tool_call>"


def glm45(number: int, arguments: Arguments) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>f{number}\n{pairs}</tool_call>"


def mistral_v3(calls: Sequence[Arguments]) -> str:
    return "[TOOL_CALLS]" + dumps([{"name": f"f{number}", "arguments": arguments} for number, arguments in enumerate(calls)])


def harmony(number: int, arguments: Arguments) -> str:
    opening = "" if number == 0 else "<|start|>assistant"
    return f"{opening}<|channel|>commentary to=functions.f{number} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"


def deepseek_v3(calls: Sequence[Arguments]) -> str:
    blocks = [f"{CALL[0]}function{SEP}f{number}\n```json\n{dumps(arguments)}\n```{CALL[1]}" for number, arguments in enumerate(calls)]
    return CALLS[0] + "\n".join(blocks) + CALLS[1]


def deepseek_v31(calls: Sequence[Arguments]) -> str:
    return CALLS[0] + "".join(f"{CALL[0]}f{number}{SEP}{dumps(arguments)}{CALL[1]}" for number, arguments in enumerate(calls)) + CALLS[1]


def llama3_json(calls: Sequence[Arguments]) -> str:
    return "; ".join(dumps({"name": f"f{number}", "parameters": arguments}) for number, arguments in enumerate(calls))


def pythonic(calls: Sequence[Arguments]) -> str:
    blocks = [f"f{number}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for number, arguments in enumerate(calls)]
    return f"[{', '.join(blocks)}]"


def write_each(write: Callable[[int, Arguments], str], between: str = "") -> Callable[[Sequence[Arguments]], str]:
    return lambda calls: between.join(write(number, arguments) for number, arguments in enumerate(calls))


WRITERS: Mapping[str, tuple[str, Callable[[Sequence[Arguments]], str]]] = {
    "hermes": ("hermes", write_each(hermes, "\n")),
    "qwen3_coder": ("qwen3_coder", write_each(qwen3_coder, "\n")),
    "glm45": ("glm45", write_each(glm45)),
    "mistral_v3": ("mistral", mistral_v3),
    "mistral_v13": ("mistral", write_each(lambda number, arguments: f"[TOOL_CALLS]f{number}[ARGS]{dumps(arguments)}")),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "harmony": ("harmony", write_each(harmony)),
    "llama3_json": ("llama3_json", llama3_json),
    "pythonic": ("pythonic", pythonic),
}
ENDS = {
    "qwen3_coder": r"</parameter>\s*(?:<parameter=|</function>|</tool_call>)",
    "glm45": r"</arg_value>\s*(?:<arg_key>|</tool_call>)",
}
"""The markup that ends a text in a form without quotes. A text that contains it cannot be distinguished from two arguments."""
OPENS = {"qwen3_coder": r"<parameter=[^<>\n]+>", "glm45": r"<arg_key>[^<]*</arg_key>\s*<arg_value>"}
"""The markup that starts the next argument in a form without quotes. A text that contains it is an error."""


def schemas_of(calls: Sequence[Arguments]) -> list[dict[str, Any]]:
    """The tools `f0`, `f1`, ..., whose parameters have the types of these arguments."""
    kinds: dict[type, str] = {type(None): "null", bool: "boolean", int: "integer", float: "number"}
    kinds |= {str: "string", list: "array", dict: "object"}
    schemas = []
    for number, arguments in enumerate(calls):
        properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
        schemas.append({"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": properties}}})
    return schemas


def holds(pattern: str, calls: Sequence[Arguments]) -> bool:
    return any(isinstance(value, str) and re.search(pattern, value) is not None for arguments in calls for value in arguments.values())


def test_every_form_has_a_writer() -> None:
    assert {form for form, _ in WRITERS.values()} == FORMS.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRITERS)
@given(calls=st.lists(named, min_size=1, max_size=3))
def test_any_arguments_round_trip(name: str, calls: list[Arguments]) -> None:
    form, write = WRITERS[name]
    assume(name not in ENDS or not holds(ENDS[name], calls))
    reading = FORMS[form].read(write(calls), schemas_of(calls))
    if name in OPENS and holds(OPENS[name], calls):
        assert reading.errors and len(reading.calls) < len(calls)
        assert all(call.arguments in calls for call in reading.calls), "no other call is read from it"
        return
    assert reading.errors == () and reading.content == ""
    assert reading.calls == tuple(ToolCall(name=f"f{number}", arguments=arguments) for number, arguments in enumerate(calls))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRITERS)
@given(calls=st.lists(named, min_size=1, max_size=3), share=st.floats(0, 1))
@example(calls=[{"a": {"</arg_value></tool_call>": None}}], share=0.875)
@example(calls=[{"a": {"</parameter></function></tool_call>": None}}], share=0.875)
def test_a_truncated_turn_contains_no_other_call(name: str, calls: list[Arguments], share: float) -> None:
    """Nothing inside an argument becomes a call if the end of the argument is missing."""
    form, write = WRITERS[name]
    assume(name not in ENDS or not holds(f"{ENDS[name]}|{OPENS[name]}", calls))
    turn = write(calls)
    reading = FORMS[form].read(turn[: int(share * len(turn))], schemas_of(calls))
    expected = tuple(ToolCall(name=f"f{number}", arguments=arguments) for number, arguments in enumerate(calls))
    assert reading.calls == expected[: len(reading.calls)]


INNER = {"text": f"</tool_call>[TOOL_CALLS]{CALL[1]}{CALLS[1]}<|end|><|call|><|start|>assistant```\n"}


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"pythonic"}))
def test_a_call_after_an_invalid_one_is_parsed(name: str) -> None:
    """Markup inside the first call's text does not end it early."""
    form, write = WRITERS[name]
    turn = write([{**INNER, "n": 12345678901}, {"a": 1}]).replace("12345678901", "9" * 5000)
    reading = FORMS[form].read(turn, schemas_of([{**INNER, "n": 1}, {"a": 1}]))
    assert reading.calls == (ToolCall(name="f1", arguments={"a": 1}),) or name == "mistral_v3", "its calls are one JSON value"
    assert len(reading.errors) == 1 and "5000 digits" in reading.errors[0] and reading.content == ""
