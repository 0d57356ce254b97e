"""Calls between tags, with a tag for each argument and values without quotes: GLM 4.5, Qwen3-Coder, Qwen3.5 and Qwen3.6.

A value ends at the closing tag that is followed by another argument or the end of the call, so a string may contain any tag except the
opening tag of an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.agent.arguments import Allowed
from agentrl.agent.calls import MAX_CHARS, MAX_NAME, NOT_CLOSED, OPEN, CallError, UnclosedCall, build_call, scan_json
from agentrl.agent.forms.base import CallForm, Frame, Reading, Schemas, declared, read_tagged, value_of
from agentrl.records import ToolCall

_Body = tuple[str, Sequence[tuple[str, str, Allowed]]]
"""A tool's name, and the name, text and allowed values of each argument."""

_MOST_TAG = 4 * MAX_NAME  # characters
_SPACE = re.compile(r"\s*")
_GLM_NAME = re.compile(r"<arg_key>|</tool_call>")
_GLM_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
_GLM_NEXT = re.compile(r"<arg_key>[^<]*</arg_key>\s*<arg_value>")
_QWEN_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))")
_QWEN_NEXT = re.compile(r"<parameter=[^<>\n]+>")


def _reader(scan: Callable[[str, int, Schemas], tuple[_Body, int]]) -> Callable[[str, Schemas], Reading]:
    return lambda text, schemas: read_tagged(text, lambda full, at: scan(full, at, schemas), _call)


def _glm(text: str, at: int, schemas: Schemas) -> tuple[_Body, int]:
    """Parses NAME, then pairs of `<arg_key>` and `<arg_value>`."""
    after_name = _GLM_NAME.search(text, at)
    name = text[at : after_name.start()].strip() if after_name else ""
    if after_name is None or not name or "<" in name or "\n" in name:
        raise CallError("tool call must start with the tool's name, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
    start, at, parameters = at, after_name.start(), declared(schemas, name)
    arguments: list[tuple[str, str, Allowed]] = []
    while text.startswith("<arg_key>", at):
        end = text.find("</arg_key>", at)
        key = text[at + len("<arg_key>") : max(end, 0)]
        if end < 0 or "<arg_" in key:
            raise _wrong(text, at, "<arg_key>KEY</arg_key>")
        at = _space(text, end + len("</arg_key>"))
        if not text.startswith("<arg_value>", at):
            raise _wrong(text, at, "<arg_value>VALUE</arg_value>")
        opening, allowed = f"<arg_value> of {ascii(key)[:80]}", parameters.allowed(key)
        value, at = _value(text, at + len("<arg_value>"), allowed.kinds, opening, _GLM_END, _GLM_NEXT)
        arguments.append((key, value, allowed))
        at = _space(text, at)
    return (name, arguments), _bounded(start, at)


def _qwen3_coder(text: str, at: int, schemas: Schemas) -> tuple[_Body, int]:
    """Parses `<function=NAME>`, `<parameter=KEY>` ... `</parameter>` for each argument, each value on separate lines, and `</function>`."""
    start, at = at, _space(text, at)
    if not text.startswith("<function=", at):
        raise CallError("tool call must be <function=NAME> ... </function> within its tags")
    name, at = _named(text, at, "<function=")
    at, parameters = _space(text, at), declared(schemas, name)
    arguments: list[tuple[str, str, Allowed]] = []
    while not text.startswith("</function>", at):
        key, at = _named(text, at, "<parameter=")
        opening, allowed = f"<parameter={ascii(key)[1:-1][:80]}>", parameters.allowed(key)
        value, at = _value(text, at, allowed.kinds, opening, _QWEN_END, _QWEN_NEXT)
        arguments.append((key, value.removeprefix("\n").removesuffix("\n"), allowed))
        at = _space(text, at)
    return (name, arguments), _bounded(start, at + len("</function>"))


def _value(
    text: str, at: int, kinds: frozenset[str], opening: str, closing: re.Pattern[str], following: re.Pattern[str]
) -> tuple[str, int]:
    """Returns the text up to the closing tag that is followed by an argument or the end of the call, and the position after that tag.

    A value that cannot be a string ends where its JSON ends. A string that contains the opening tag of another argument is an error,
    because its closing tag may be missing.
    """
    start = at
    if kinds and "string" not in kinds and not text.startswith('"', _space(text, at)):
        try:
            _, start = scan_json(text, at)  # tags inside the value close nothing, even if the turn ends before the value's closing tag
            if closed := closing.match(text, _space(text, start)):
                return text[at : closed.start()], closed.end()
        except CallError as error:
            start = max(at, error.at)
    end_tag = closing.search(text, start)
    if end_tag is None:
        raise UnclosedCall(f"{NOT_CLOSED}: {opening} is opened but not closed", at=len(text))
    if swallowed := following.search(text, start, end_tag.start()):
        raise CallError(f"tool call opens {opening} and does not close it before {ascii(swallowed[0])[1:81]}", at=end_tag.end())
    return text[at : end_tag.start()], end_tag.end()


def _bounded(start: int, end: int) -> int:
    if end - start > MAX_CHARS:
        raise CallError(f"tool call has {end - start} characters; the maximum is {MAX_CHARS}", at=end)
    return end


def _named(text: str, at: int, opening: str) -> tuple[str, int]:
    """Returns the name in a tag such as `<function=NAME>`, and the position after the tag."""
    end = text.find(">", at, at + _MOST_TAG) if text.startswith(opening, at) else -1
    name = text[at + len(opening) : max(end, 0)]
    if not name or "\n" in name or "<" in name:
        raise _wrong(text, at, f"{opening}NAME>")
    return name, end + 1


def _wrong(text: str, at: int, wanted: str) -> CallError:
    return CallError(f"tool call must have {wanted} instead of {text[at : at + 40]!a}", at=at)


def _space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _call(body: _Body) -> ToolCall:
    name, written = body
    arguments: dict[str, Any] = {}
    for key, value, allowed in written:
        if key in arguments:
            raise CallError(f"tool call contains the key {ascii(key)[:80]} twice in one object")
        arguments[key] = value_of(value, allowed)
    return build_call(name, arguments)


GLM45 = CallForm(
    name="glm45",
    about="`<tool_call>NAME` with `<arg_key>` and `<arg_value>` pairs `</tool_call>`",
    read=_reader(_glm),
    opens=(OPEN,),
    ends=("<|endoftext|>",),
    hands_over=("<|observation|>", "<|user|>"),
)
QWEN3_CODER = CallForm(
    name="qwen3_coder",
    about="`<tool_call><function=NAME><parameter=KEY>` ... `</parameter></function></tool_call>`",
    read=_reader(_qwen3_coder),
    opens=(OPEN,),
    ends=("<|im_end|>",),
    frame=Frame(begin="<tool_call>\n<function=%>\n", end="\n</function>\n</tool_call>", style="qwen_xml", between="\n", excludes=("</",)),
)
