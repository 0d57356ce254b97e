from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent.calls import CLOSE, MAX_CALLS, MAX_CHARS, MAX_NAME, OPEN
from agentrl.agent.forms.json_calls import read_hermes
from agentrl.records import ToolCall, codec
from agentrl.records.fields import MAX_DEPTH, MAX_DIGITS

CALL = '{"name": "python", "arguments": {"code": "1"}}'


def closed(*bodies: str) -> str:
    return "".join(f"{OPEN}{body}{CLOSE}" for body in bodies)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (r'{"name":"python","arguments":{"code":"print(\"\ud83d\")"}}', "surrogate"),
        (r'{"name":"python","arguments":{"\udc00":1}}', "surrogate"),
        (r'{"name":"\ud800","arguments":{}}', "surrogate"),
        ('{"name":"f","arguments":{"x":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}", "deeper than 64"),
        ('{"name":"f","arguments":{"x":' + "[" * 255 + "]" * 255 + "}}", "deeper than 64"),
        ('{"name":"f","arguments":{"x":' + '{"":' * 100_000 + "1" + "}" * 100_000 + "}}", "too deep"),
        ('{"name":"f","arguments":{"x":NaN}}', "NaN"),
        ('{"name":"f","arguments":{"x":-Infinity}}', "-Infinity"),
        ('{"name":"f","arguments":{"x":-1e999}}', "-1e999"),
        ('{"name":"submit","arguments":{"answer":' + "1" * 5000 + "}}", "5000 digits"),
        ('{"name":"submit","arguments":{"answer":-' + "1" * (MAX_DIGITS + 1) + "}}", "digits"),
        ('{"name":"submit","arguments":{"answer":' + "1" * 5000 + ".5e9999}}", "not a finite number"),
        ('{"name":"f","name":"g","arguments":{}}', "'name' twice"),
        ('{"name":"f","arguments":{"\\u00e9":1,"é":2}}', r"'\xe9' twice"),
        ('{"name":"f","arguments":{"x":"' + "y" * MAX_CHARS + '"}}', "characters"),
        ('{"name":"' + "f" * (MAX_NAME + 1) + '","arguments":{}}', "characters"),
        ('{"name":"f","arguments":{"x":"\n"}}', "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_calls_out_of_bounds_are_errors(body: str, error: str) -> None:
    reading = read_hermes("so " + closed(body, CALL), ())
    assert len(reading.errors) == 1 and error in reading.errors[0] and len(reading.errors[0]) < 600
    reading.errors[0].encode()
    assert reading.calls == (ToolCall(name="python", arguments={"code": "1"}),) and reading.content == "so"


def test_calls_just_within_bounds_are_accepted() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    arguments = {"deep": deep, "long": int("9" * MAX_DIGITS), "tiny": 5e-324, "": "\0\u2028\U0001f600", "none": None}
    reading = read_hermes(closed(json.dumps({"name": "f" * MAX_NAME, "arguments": arguments})), ())
    assert reading.errors == () and reading.calls[0].arguments == arguments
    assert codec.from_json(ToolCall, codec.to_json(reading.calls[0])) == reading.calls[0]


def test_the_number_of_calls_in_a_turn_is_bounded() -> None:
    reading = read_hermes("a" + closed(*["x", CALL] * MAX_CALLS) + "z", ())
    assert len(reading.calls) == MAX_CALLS // 2 and reading.content == "az"
    assert len(reading.errors) == MAX_CALLS // 2 + 1 and f"the {MAX_CALLS} after them were not run" in reading.errors[-1]


@pytest.mark.parametrize(
    ("text", "content", "calls", "error"),
    [
        (f"a {OPEN}{CALL}{CLOSE} b {OPEN}{CALL}", f"a  b {OPEN}{CALL}", 1, "not closed"),
        (f"{CLOSE}{CALL}{CLOSE}", f"{CLOSE}{CALL}{CLOSE}", 0, ""),
        (closed(json.dumps({"name": "python", "arguments": {"code": f"print('{OPEN}')"}})), "", 1, ""),
        (OPEN, OPEN, 0, "not closed"),
        ("", "", 0, ""),
    ],
)
def test_openings_and_ends_delimit_calls(text: str, content: str, calls: int, error: str) -> None:
    reading = read_hermes(text, ())
    assert (len(reading.calls), reading.content) == (calls, content)
    assert [True] * bool(error) == [error in message for message in reading.errors]


PIECES = [
    OPEN,
    CLOSE,
    CALL,
    "{",
    "}",
    "[",
    '"',
    "\\",
    r"\ud83d",
    "1" * 4400,
    "1e999",
    "NaN",
    '{"name":"f","arguments":{"x":',
    "\0",
    "\u2028",
    "é",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join))
def test_any_text_gives_calls_that_can_be_stored_or_errors(text: str) -> None:
    reading = read_hermes(text, ())
    for call in reading.calls:
        assert codec.from_json(ToolCall, codec.to_json(call)) == call
    assert all(len(error) < 1000 for error in reading.errors) and len(reading.calls) + len(reading.errors) <= MAX_CALLS + 2
    assert not reading.content or text.count(OPEN) or reading.content == text.strip()
