"""Random conversations with tools, and the rule that every chat format obeys: its parts add up to the rendered conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from agentrl.agent import ChatFormat
from agentrl.agent.chat import ParsedCompletion
from agentrl.agent.forms import FORMS, deepseek
from agentrl.agent.rendering import Renderer
from agentrl.agent.template_probe import TOOL
from agentrl.records import Message, ToolCall, ToolResult
from agentrl.records.chat import USER

NAME = TOOL["function"]["name"]
ODD = (
    "\u00e9\u0301 \U0001f9d1\u200d\U0001f680",
    "\u202eabc",
    "a\\\"b'",
    "if x < 3 & y:\n\tprint('{}')",
    "\ufeff\u2028z",
    "[x, {'y'}] </p>",
    "0x",
    "null",
)


def _stripped(text: str) -> str:
    """Text without white space at its ends, which templates strip, and without characters that tokenizers change."""
    return text.strip()


texts = st.one_of(
    st.sampled_from(ODD), st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Co", "Cn")), max_size=20)
).map(_stripped)
numbers = st.integers(-(10**20), 10**20)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {"code": st.one_of(texts, texts.map(lambda text: text + "\n"))},
    optional={
        "n": numbers,
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "more": st.lists(values, max_size=3),
        "last": texts,
    },
)


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of the agent: calls and their results, or a text and the user message that answers it."""

    thought: str
    calls: tuple[dict[str, Any], ...]
    outputs: tuple[str, ...]
    text: str = ""


def rounds(*, most_calls: int) -> st.SearchStrategy[Round]:
    return st.lists(st.tuples(arguments, texts), min_size=1, max_size=most_calls).flatmap(
        lambda drawn: st.builds(
            Round,
            thought=st.just("") | texts,
            calls=st.just(tuple(call for call, _ in drawn)),
            outputs=st.just(tuple(text for _, text in drawn)),
        )
    )


def conversations(*, most_calls: int = 3, users: bool = False) -> st.SearchStrategy[list[Round]]:
    """Random rounds; with `users`, the last one and some before it are answered by a user message."""
    calling = rounds(most_calls=most_calls)
    if not users:
        return st.lists(calling, min_size=1, max_size=3)
    saying = st.builds(Round, thought=st.just("") | texts, calls=st.just(()), outputs=st.tuples(texts), text=texts)
    return st.builds(lambda before, last: [*before, last], st.lists(calling | saying, max_size=3), saying)


TAGS = re.compile("</?(?:tool_call|arg_key|arg_value|function|parameter|think)>")


def sayable(value: Any, chat: ChatFormat) -> Any:
    """A value that a model can write: in a form without escapes, an argument cannot contain a tag that ends the call or the turn."""
    if isinstance(value, str):
        return TAGS.sub("", chat.escape_text(value)).strip(" ")
    if isinstance(value, list):
        return [sayable(item, chat) for item in value]
    return {sayable(key, chat): sayable(item, chat) for key, item in value.items()} if isinstance(value, dict) else value


def assert_adds_up(chat: ChatFormat, tokenizer: Any, prompt: str, rounds_: Sequence[Round]) -> None:
    """Checks that opening, completions and deltas are the ids of the rendered conversation, and that every turn is parsed exactly.

    Tool outputs are in it without the control tokens that they spell: all control tokens come from the template.
    """
    renderer = Renderer(tokenizer)
    renderer.arguments_as_text = chat._renderer.arguments_as_text
    ends = [tokenizer.decode([token]) for token in chat.stop_token_ids]
    messages = [Message(role="user", content=prompt or "-")]
    context = list(chat.opening(messages, [TOOL]))
    before = renderer.text(renderer.messages(messages), [TOOL])
    for round_ in rounds_:
        calls = tuple(ToolCall(name=NAME, arguments=sayable(call, chat)) for call in round_.calls)
        thought = sayable(round_.thought, chat) if renderer.knows_thinking and not before.rstrip().endswith("</think>") else ""
        if before.rstrip().endswith("<think>"):  # without a thought, the line breaks of prompt and turn would be one token
            thought = thought or "-"
        text = sayable(round_.text, chat) if not calls else ""
        content = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
        messages += [
            Message(role="assistant", content=content, tool_calls=calls),
            *(Message(role="tool" if calls else "user", content=chat.escape_text(output_text)) for output_text in round_.outputs),
        ]
        rendered = renderer.text(renderer.messages(messages), [TOOL])
        assert rendered.startswith(before)
        rest = rendered[len(before) :]
        at, end = min((place, end) for end in ends if (place := rest.find(end)) >= 0)
        sampled = [*tokenizer.encode(rest[:at], add_special_tokens=False), *tokenizer.encode(end, add_special_tokens=False)]
        parsed = chat.parse(sampled, [TOOL])
        assert parsed.errors == () and parsed.message.tool_calls == calls
        assert thought in parsed.message.content and parsed.answer == text

        def delta_of(*output_text: str, after: ParsedCompletion = parsed, name: str = NAME if calls else USER) -> tuple[int, ...]:
            return chat.answer_delta([ToolResult(name=name, output=output, ok=True) for output in output_text], after)

        delta = delta_of(*round_.outputs)
        assert chat._controls(delta) == chat._controls(delta_of(*("-" for _ in round_.outputs)))
        context += (*sampled, *delta)
        assert context == tokenizer.encode(rendered, add_special_tokens=False)
        assert tokenizer.decode(context) == rendered
        before = rendered


ARGUMENT_TAGS = ("<parameter=code>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKS = [
    *sorted({mark for form in FORMS.values() for mark in (*form.opens, *form.ends, *form.hands_over, *form.inner) if '"' not in mark}),
    *("</tool_call>", "<function=f>", "</function>", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>", "```json", "```"),
    *(*deepseek.CALLS, *deepseek.CALL, deepseek.SEP, "[f(", ")]", "{}", ";"),
    *ARGUMENT_TAGS,
]
"""Markup that readers search for, which a model may spell inside an argument."""
_STAND_INS = {chr(0xF100 + number): mark for number, mark in enumerate(MARKS)}
_STAND_IN = re.compile(f"([{''.join(_STAND_INS)}])")
_spelled = st.lists(st.sampled_from([key for key, mark in _STAND_INS.items() if mark not in ARGUMENT_TAGS]) | texts, max_size=5)
spelling_arguments = st.fixed_dictionaries(
    {"code": _spelled.map("".join).map(_stripped)},
    optional={"more": st.lists(st.lists(st.sampled_from(sorted(_STAND_INS)), max_size=4).map("".join), max_size=3), "n": numbers},
)
"""Arguments whose texts contain stand-ins for marks. In a form without quotes, such a text cannot contain the tags of arguments."""


def assert_marks_are_text(chat: ChatFormat, tokenizer: Any, call_arguments: Sequence[dict[str, Any]]) -> None:
    """A turn whose arguments contain markup in ordinary tokens is parsed as the calls that it contains."""
    renderer = Renderer(tokenizer)
    renderer.arguments_as_text = chat._renderer.arguments_as_text
    opening = [Message(role="user", content="-")]
    before = renderer.text(renderer.messages(opening), [TOOL])
    thought = "<think>\n-\n</think>\n\n" if before.rstrip().endswith("<think>") else ""
    calls = tuple(ToolCall(name=NAME, arguments=sayable(call, chat)) for call in call_arguments)
    turns = [*opening, Message(role="assistant", content=thought, tool_calls=calls), *(Message(role="tool", content="x") for _ in calls)]
    rest = renderer.text(renderer.messages(turns), [TOOL])[len(before) :]
    at, end = min((place, end) for stop in chat.stop_token_ids if (place := rest.find(end := tokenizer.decode([stop]))) >= 0)
    sampled: list[int] = []
    for piece in _STAND_IN.split(rest[:at]):
        for part in _STAND_INS.get(piece, [piece]):  # a character at a time: never a control token
            sampled += tokenizer.encode(part, add_special_tokens=False)
    parsed = chat.parse([*sampled, *tokenizer.encode(end, add_special_tokens=False)], [TOOL])
    assert parsed.errors == () and not parsed.answer
    assert parsed.message.tool_calls == tuple(ToolCall(name=NAME, arguments=_spelled_out(call.arguments)) for call in calls)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, str):
        return _STAND_IN.sub(lambda match: _STAND_INS[match[0]], value)
    if isinstance(value, Mapping):
        return {key: _spelled_out(item) for key, item in value.items()}
    return [_spelled_out(item) for item in value] if isinstance(value, list | tuple) else value
