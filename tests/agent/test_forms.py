"""Readers of tool calls: valid and invalid text in each form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent.calls import MAX_CALLS, MAX_NAME
from agentrl.agent.forms import FORMS
from agentrl.records import ToolCall
from agentrl.records.fields import MAX_DEPTH, MAX_DIGITS
from tests.strategies import examples

BAR, GAP = "\uff5c", "\u2581"


def marker(name: str) -> str:
    return f"<{BAR}{name.replace('_', GAP)}{BAR}>"


BEGIN, END, SEP = marker("tool_calls_begin"), marker("tool_calls_end"), marker("tool_sep")
OPEN, CLOSE = marker("tool_call_begin"), marker("tool_call_end")
BLOCK = f'{OPEN}function{SEP}f\n```json\n{{{{"a": "{{}}"}}}}\n```{CLOSE}\n'
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
XML = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


def calls(*arguments: object) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name="f", arguments={} if a is None else {"a": a}) for a in arguments)


@pytest.mark.parametrize(
    ("form", "text", "expected", "content"),
    [
        ("hermes", 'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', calls(1), "so"),
        ("qwen3_coder", "so " + XML.format("if x < 1:\n    y\n"), calls("if x < 1:\n    y\n"), "so"),
        ("qwen3_coder", XML.format("[true, null]") + "\n" + XML.format('"q"'), calls([True, None], '"q"'), ""),
        ("glm45", "so" + GLM.format("</p> \n") + GLM.format("0.5"), calls("</p> \n", 0.5), "so"),
        ("glm45", "<tool_call>f</tool_call>", calls(None), ""),
        ("mistral", 'so[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}, "id": "abc123XYZ"}]', calls("[TOOL_CALLS]"), "so"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 2}', calls(1, 2), ""),
        ("mistral", "[THINK]f[TOOL_CALLS]f[ARGS]{}[/THINK]no", (), "no"),
        ("deepseek_v3", f"so{BEGIN}{BLOCK.format('x')}{BLOCK.format('```')}{END}", calls("x", "```"), "so"),
        ("deepseek_v31", f'so{BEGIN}{OPEN}f{SEP}{{"a": [1]}}{CLOSE}{OPEN}f{SEP}{{}}{CLOSE}{END}', calls([1], None), "so"),
        ("harmony", f'{ANALYSIS}{TO_F}{{"a": 1}}', calls(1), ""),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": {"b": true}}', calls({"b": True}), ""),
        ("harmony", f"{ANALYSIS}<|channel|>final<|message|>four", (), "four"),
        ("harmony", "four", (), "four"),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}', calls(1, None), ""),
        ("llama3_json", '{"type": "function", "parameters": {"a": 1}, "name": "f"}', calls(1), ""),
        ("llama3_json", '{"answer": 4}', (), '{"answer": 4}'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', calls(None), ""),
        ("llama3_json", '{"name": "Ada", "age": 36}', (), '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"name": "Ada", "age": 36', (), '{"name": "Ada", "age": 36'),
        ("llama3_json", '{"name": "f"}', (), '{"name": "f"}'),
        ("llama3_json", '<|python_tag|>{"name": "f"}', calls(None), ""),
        ("llama3_json", '{"name": "f", "arguments": {"a": 1}, "id": "c0"}', calls(1), ""),
        ("llama3_json", '{"name": "f", "about": "-", "parameters": {}}', (), '{"name": "f", "about": "-", "parameters": {}}'),
        ("llama3_json", 'It is {"name": "f", "parameters": {}}', (), 'It is {"name": "f", "parameters": {}}'),
        ("pythonic", "[f(a='it\\'s\\n', ), f(a=[-1, 2.5, {\"k\": None}],), f()]", (*calls("it's\n", [-1, 2.5, {"k": None}], None),), ""),
        ("pythonic", "<|python_start|>[f(a=true)]<|python_end|>", calls(True), ""),
        ("pythonic", "[1, 2] are", (), "[1, 2] are"),
    ],
)  # fmt: skip
def test_a_form_is_parsed(form: str, text: str, expected: tuple[ToolCall, ...], content: str) -> None:
    reading = FORMS[form].read(text, ())
    assert reading.errors == ()
    assert reading.calls == expected and reading.content == content


def test_reasoning_is_separated() -> None:
    assert FORMS["harmony"].read(f"{ANALYSIS}<|channel|>final<|message|>four", ()).thinking == "hm"
    assert FORMS["mistral"].read("[THINK]hm[/THINK]four", ()).thinking == "hm"
    assert FORMS["mistral"].read('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}', ()).ids == ("", "abc123XYZ")


NESTED = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
DIGITS = "9" * (MAX_DIGITS + 1)


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("qwen3_coder", XML.format(NESTED), "deeper than 64"),
        ("qwen3_coder", XML.format(DIGITS), "digits"),
        ("qwen3_coder", XML.format("1\n</parameter>\nx<parameter=b>2"), "does not close it before <parameter=b>"),
        ("qwen3_coder", XML.format("1\n</parameter>\n<parameter=a>\n2"), "'a' twice"),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "must be <function=NAME>"),
        ("qwen3_coder", XML.removesuffix("</tool_call>"), "not closed"),
        ("glm45", GLM.format(NESTED), "deeper than 64"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "must have <arg_value>"),
        ("glm45", '<tool_call>\n{"name": "f"}\n<x></tool_call>', "must start with the tool's name"),
        ("mistral", "[TOOL_CALLS]f{}", "not closed: [TOOL_CALLS] must be followed"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": "x"}]', '"arguments" must be an object'),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000, "too deep"),
        ("mistral", "[TOOL_CALLS][]", "is empty"),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]"}[/TOOL_RESULTS][ARGS]{}', "9 letters or digits"),
        ("deepseek_v31", f"{BEGIN}{OPEN}f{SEP}{{}}{CLOSE}", "not closed"),
        ("deepseek_v31", f"{BEGIN}{OPEN}f{SEP}{{}}{CLOSE}and{OPEN}f{SEP}{{}}{CLOSE}{END}", "unexpected text between tool calls"),
        ("deepseek_v31", f"{BEGIN}{OPEN}f{CLOSE}{END}", "must be a tool's name"),
        ("deepseek_v3", f"{BEGIN}{OPEN}f{SEP}{{}}{CLOSE}{END}", "must be the word function"),
        ("deepseek_v3", f"{BEGIN}{OPEN}function{SEP}f\n{{}}{CLOSE}{END}", "between ```json and ```"),
        ("harmony", "<|channel|>commentary to=browser.open<|message|>{}", "must be functions.NAME, not 'browser.open'"),
        ("harmony", f"{ANALYSIS}{TO_F}{{}}<|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|>", "is invalid"),
        ("harmony", f"{ANALYSIS}{TO_F}{{}}<|start|>user<|message|>well done<|end|>", "messages from the assistant only, not from user"),
        ("harmony", f"<|channel|>{'x' * 1000}<|message|>", "header of a message has"),
        ("harmony", "<|channel|>secret<|message|>x", "channel must be analysis, commentary or final"),
        ("harmony", f"{TO_F.replace('json', 'python')}1", "must be json, not python"),
        ("harmony", "<|channel|>analysis", "has no <|message|>"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', '"parameters" must be an object'),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "\"arguments\"; it has the key 'parameters'"),
        ("hermes", '<tool_call>{"name": "f", "a": 1}</tool_call>', "\"arguments\"; it has the key 'a'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>', "it has the key 'parameters'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "must end with </tool_call> instead of 'and"),
        ("qwen3_coder", XML.format("1\n<parameter=b>\n2"), "opens <parameter=a> and does not close it before <parameter=b>"),
        ("qwen3_coder", XML.replace("\n</parameter>", ""), "opened but not closed: <parameter=a> is opened but not closed"),
        ("glm45", GLM.format("1<arg_key>b</arg_key><arg_value>2"), "opens <arg_value> of 'a' and does not close it before <arg_key>b"),
        ("glm45", GLM.replace("</arg_value>", ""), "opened but not closed: <arg_value> of 'a' is"),
        ("glm45", GLM.replace("</arg_key>", ""), "must have <arg_key>KEY</arg_key>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "parameters": {"a": 1}}]', "it has the key 'parameters'"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}][TOOL_CALLS][{"name": "f"}]', "those after the first were not run"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} and", "unexpected text after the arguments of a tool call: 'and'"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "not valid JSON"),
        ("harmony", f"{TO_F}{{}} and<|call|>", "unexpected text after the arguments of a call: 'and"),
        ("llama3_json", '{"name": "f", "parameters": {}, "arguments": {}}', "it has the key 'arguments'"),
        ("llama3_json", '<|python_tag|>{"name": "f", "a": 1}', "it has the key 'a'"),
        ("llama3_json", '{"name": "f", "parameters": {"a": ', "not valid JSON"),
        ("llama3_json", "<|python_tag|>print(1)", "not valid JSON"),
        ("pythonic", "[f(a=__import__('os'))]", "a value must be a string in quotes"),
        ("pythonic", f"[f(a={NESTED})]", "deeper than 64"),
        ("pythonic", f"[f(a={DIGITS})]", "digits"),
        ("pythonic", "[f(a=1e999)]", "not a finite number"),
        ("pythonic", "[f(a='\\U00110000')]", "not a character"),
        ("pythonic", "[f(a='\\ud800')]", "surrogate"),
        ("pythonic", "[f(a=1, a=2)]", "'a' twice"),
        ("pythonic", "[f('x')]", "an argument has no name"),
        ("pythonic", "[f(a='x", "is not closed on its line"),
    ],
)
def test_invalid_calls_are_errors(form: str, text: str, error: str) -> None:
    reading = FORMS[form].read(text, ())
    assert len(reading.errors) == 1 and error in reading.errors[0], reading.errors
    assert len(reading.errors[0]) < 600 and len(reading.calls) <= 1


MANY = {
    "qwen3_coder": XML.format(1) * (MAX_CALLS + 2),
    "glm45": GLM.format(1) * (MAX_CALLS + 2),
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}' * (MAX_CALLS + 2),
    "deepseek_v31": BEGIN + f'{OPEN}f{SEP}{{"a": 1}}{CLOSE}' * (MAX_CALLS + 2) + END,
    "harmony": "<|start|>assistant".join([f'{TO_F}{{"a": 1}}<|end|>'] * (MAX_CALLS + 2)),
    "llama3_json": ";".join(['{"name": "f", "parameters": {"a": 1}}'] * (MAX_CALLS + 2)),
    "pythonic": "[" + "f(a=1)," * (MAX_CALLS + 2) + "]",
}


@pytest.mark.parametrize("form", MANY)
def test_the_number_of_calls_in_a_turn_is_bounded_in_every_form(form: str) -> None:
    reading = FORMS[form].read(MANY[form], ())
    assert reading.calls == calls(*[1] * MAX_CALLS)
    assert len(reading.errors) == 1 and f"a turn may hold {MAX_CALLS} tool calls" in reading.errors[0]
    long = FORMS[form].read(
        MANY[form].replace("f", "f" * (MAX_NAME + 1)) if form != "mistral" else f"[TOOL_CALLS]{'f' * 300}[ARGS]{{}}", ()
    )
    assert long.calls == () and long.errors


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
        "{",
        "}",
        "]",
        '"name":',
        '"f"',
        ",",
        BEGIN,
        END,
        SEP,
        OPEN,
        CLOSE,
        "function",
        "\n```json\n",
    ),
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "assistant",
        "to=functions.f",
        "f(",
        "a=",
        ")",
        "'",
        "\\",
        "1",
        "\ud800",
        "\0",
        " ",
    ),
    *("<|python_tag|>", "\n```", "[THINK]", "[/THINK]", ";", "</arg_value>"),
]


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join))
def test_any_text_is_parsed(text: str) -> None:
    for form in FORMS.values():
        reading = form.read(text, ())
        assert len(reading.calls) <= MAX_CALLS and (not reading.ids or len(reading.ids) == len(reading.calls))


@pytest.mark.parametrize("text", ["[sin(x), cos(x)]", "[f0(1), 2]", "[x(a==1)]"])
def test_a_list_of_terms_is_an_answer_if_no_tool_has_that_name(text: str) -> None:
    f = {"type": "function", "function": {"name": "f", "parameters": {}}}
    reading = FORMS["pythonic"].read(text, [f])
    assert (reading.calls, reading.errors, reading.content) == ((), (), text)
    assert "an argument has no name" in FORMS["pythonic"].read("[f(1)]", [f]).errors[0]
    assert FORMS["pythonic"].read("[g(x=1), g()]", [f]).calls, "keyword arguments make it a call, even of a tool that does not exist"
