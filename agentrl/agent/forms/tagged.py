"""Calls between tags whose arguments are tagged one by one, without quotes: GLM 4.5 and Qwen3-Coder (and Qwen3.5, 3.6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.agent.calls import CLOSE, MAX_CHARS, OPEN, Refused, made_call, read_tagged
from agentrl.agent.forms.base import CallForm, Reading, Schemas, declared, value_of
from agentrl.records import ToolCall

_SPACE = re.compile(r"\s*")


def read_glm(text: str, schemas: Schemas) -> Reading:
    calls, errors, content = read_tagged(text, OPEN, CLOSE, lambda body: _glm(body, schemas))
    return Reading(calls=calls, errors=errors, content=content)


def read_qwen3_coder(text: str, schemas: Schemas) -> Reading:
    calls, errors, content = read_tagged(text, OPEN, CLOSE, lambda body: _qwen3_coder(body, schemas))
    return Reading(calls=calls, errors=errors, content=content)


def _glm(body: str, schemas: Schemas) -> ToolCall:
    """NAME, then pairs of `<arg_key>` and `<arg_value>`."""
    _bounded(body)
    name, found, rest = body.partition("<arg_key>")
    name = name.strip()
    if not name or "<" in name or "\n" in name:
        raise Refused("tool call must begin with the tool's name, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
    kinds, at = declared(schemas, name), 0
    arguments: dict[str, Any] = {}
    rest = found + rest
    while at < len(rest):
        key, at = _piece(rest, at, "<arg_key>", "</arg_key>")
        value, at = _piece(rest, at, "<arg_value>", "</arg_value>")
        _put(arguments, key, value, kinds.get(key, frozenset()))
    return made_call(name, arguments)


def _qwen3_coder(body: str, schemas: Schemas) -> ToolCall:
    """`<function=NAME>`, then `<parameter=KEY>` ... `</parameter>` for each argument, each value on lines of its own."""
    _bounded(body)
    inner = body.strip()
    if not inner.startswith("<function=") or not inner.endswith("</function>"):
        raise Refused("tool call must be <function=NAME> ... </function> within its tags")
    inner = inner.removesuffix("</function>")
    name, at = _named(inner, 0, "<function=")
    kinds = declared(schemas, name)
    arguments: dict[str, Any] = {}
    at = _SPACE.match(inner, at).end()  # type: ignore[union-attr]
    while at < len(inner):
        key, at = _named(inner, at, "<parameter=")
        end = inner.find("</parameter>", at)
        if end < 0:
            raise Refused(f"tool call opens <parameter={key[:80]}> and does not close it")
        value = inner[at:end].removeprefix("\n").removesuffix("\n")
        _put(arguments, key, value, kinds.get(key, frozenset()))
        at = _SPACE.match(inner, end + len("</parameter>")).end()  # type: ignore[union-attr]
    return made_call(name, arguments)


def _bounded(body: str) -> None:
    if len(body) > MAX_CHARS:
        raise Refused(f"tool call of {len(body)} characters; it may have {MAX_CHARS}")


def _piece(text: str, at: int, opening: str, closing: str) -> tuple[str, int]:
    """What stands between two tags that begin at a place, and the place of what comes after white space."""
    end = text.find(closing, at) if text.startswith(opening, at) else -1
    if end < 0:
        raise Refused(f"tool call must have {opening}...{closing} where it has {text[at : at + 40]!a}")
    return text[at + len(opening) : end], _SPACE.match(text, end + len(closing)).end()  # type: ignore[union-attr]


def _named(text: str, at: int, opening: str) -> tuple[str, int]:
    """The name in a tag such as `<function=NAME>`, and where the tag ends."""
    end = text.find(">", at) if text.startswith(opening, at) else -1
    name = text[at + len(opening) : end]
    if end < 0 or not name or "\n" in name or "<" in name:
        raise Refused(f"tool call must have {opening}NAME> where it has {text[at : at + 40]!a}")
    return name, end + 1


def _put(arguments: dict[str, Any], key: str, value: str, kinds: frozenset[str]) -> None:
    if key in arguments:
        raise Refused(f"tool call names {ascii(key)[:80]} twice in one object")
    arguments[key] = value_of(value, kinds)


def _form(name: str, about: str, read: Callable[[str, Schemas], Reading], **more: Any) -> CallForm:
    return CallForm(name=name, about=about, read=read, opens=(OPEN,), **more)


GLM45 = _form(
    "glm45",
    "`<tool_call>NAME` with `<arg_key>` and `<arg_value>` pairs `</tool_call>`",
    read_glm,
    ends=("<|endoftext|>",),
    hands_over=("<|observation|>", "<|user|>"),
)
QWEN3_CODER = _form(
    "qwen3_coder",
    "`<tool_call><function=NAME><parameter=KEY>` ... `</parameter></function></tool_call>`",
    read_qwen3_coder,
    ends=("<|im_end|>",),
)
