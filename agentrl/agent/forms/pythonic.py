"""Pythonic calls of Llama 3.2 and 4: `[python(code="print(1)"), submit(answer=4)]` as the complete turn.

The parser accepts only literals (strings, numbers, lists, dictionaries, and the constants of Python and JSON) and evaluates nothing.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from agentrl.agent.calls import MAX_CALLS, MAX_CHARS, CallError, build_call, integer, number
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas, name_of
from agentrl.records.fields import MAX_DEPTH

_TAGS = ("<|python_start|>", "<|python_end|>")
_START = re.compile(r"\[\s*([A-Za-z_][\w.-]*)\(\s*(\)|[A-Za-z_]\w*\s*=(?!=))?")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*+)"' + r"|'((?:[^'\\\n]|\\.)*+)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def read_pythonic(text: str, schemas: Schemas) -> Reading:
    """Parses a turn that is a list of calls. A list such as `[sin(x), cos(x)]`, whose first call has a positional argument, is text
    unless it has tags, `schemas` is empty or `schemas` contains the tool `sin`."""
    body = text.strip()
    for tag in _TAGS:
        body = body.removeprefix(tag).removesuffix(tag).strip()
    collected = Collected()
    start = _START.match(body)
    if not (start and (start[2] or body != text.strip() or not schemas or start[1] in map(name_of, schemas))):
        return collected.reading(body)
    if len(body) > MAX_CHARS:
        collected.errors.append(f"tool calls of {len(body)} characters; they may have {MAX_CHARS}")
        return collected.reading()
    reader = _Reader(body)
    try:
        reader.expect("[")
        while not collected.tried or reader.take(","):
            if collected.tried and reader.next() == "]":
                break
            collected.build(partial(build_call, *reader.call()))
            if collected.tried > MAX_CALLS:
                return collected.reading()
        reader.expect("]")
    except CallError as error:
        collected.errors.append(str(error))
        return collected.reading()
    return collected.reading(body[reader.at :])


class _Reader:
    """Parses literals in a string, starting at position `at`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def next(self) -> str:
        """Returns the next character that is not white space; empty at the end."""
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.text[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        present = self.next() == character
        self.at += present
        return present

    def expect(self, character: str) -> None:
        if not self.take(character):
            raise self.error(f"{character!r} is missing")

    def error(self, problem: str) -> CallError:
        return CallError(f"tool calls are invalid: {problem} at character {self.at}: {self.text[self.at : self.at + 30]!a}")

    def call(self) -> tuple[str, dict[str, Any]]:
        self.next()
        name = _NAME.match(self.text, self.at)
        if name is None:
            raise self.error("a tool's name is missing")
        self.at = name.end()
        self.expect("(")
        arguments: dict[str, Any] = {}
        while self.next() != ")":
            key = _NAME.match(self.text, self.at)
            if key is None:
                raise self.error("an argument has no name")
            self.at = key.end()
            self.expect("=")
            _put(arguments, key[0], self.value(1))
            if not self.take(","):
                break
        self.expect(")")
        return name[0], arguments

    def value(self, depth: int) -> Any:
        first = self.next()
        if depth > MAX_DEPTH:
            raise CallError(f"tool call is nested deeper than {MAX_DEPTH} levels")
        if first in ('"', "'"):
            return self.string()
        if first == "[":
            return self.items(depth)
        if first == "{":
            return self.pairs(depth)
        if digits := _NUMBER.match(self.text, self.at):
            self.at = digits.end()
            return number(digits[0]) if digits[1] or digits[2] else integer(digits[0])
        word = _NAME.match(self.text, self.at)
        if word is None or word[0] not in _CONSTANTS:
            raise self.error("a value must be a string in quotes, a number, True, False, None, a list or a dictionary; it is not")
        self.at = word.end()
        return _CONSTANTS[word[0]]

    def string(self) -> str:
        match = _TEXT.match(self.text, self.at)
        if match is None:
            raise self.error("a string is not closed on its line")
        self.at = match.end()
        raw: str = match[1] if match[1] is not None else match[2]
        return _ESCAPE.sub(_plain, raw) if "\\" in raw else raw

    def items(self, depth: int) -> list[Any]:
        self.expect("[")
        items: list[Any] = []
        while self.next() != "]":
            items.append(self.value(depth + 1))
            if not self.take(","):
                break
        self.expect("]")
        return items

    def pairs(self, depth: int) -> dict[str, Any]:
        self.expect("{")
        pairs: dict[str, Any] = {}
        while self.next() != "}":
            if self.next() not in ('"', "'"):
                raise self.error("a key must be a string in quotes; it is not")
            key = self.string()
            self.expect(":")
            _put(pairs, key, self.value(depth + 1))
            if not self.take(","):
                break
        self.expect("}")
        return pairs


def _put(into: dict[str, Any], key: str, value: Any) -> None:
    if key in into:
        raise CallError(f"tool call contains the key {ascii(key)[:80]} twice in one object")
    into[key] = value


def _plain(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is not None:
        if int(code, 16) > 0x10FFFF:
            raise CallError(f"tool call contains {escape[0]}, which is not a character")
        return chr(int(code, 16))
    return _ESCAPED.get(escape[4], escape[4] if escape[4] in "\\'\"" else escape[0])


PYTHONIC = CallForm(
    name="pythonic",
    about="`[NAME(KEY=VALUE, ...), ...]` as the whole turn, with Python's literals",
    read=read_pythonic,
    argument=_NAME.pattern,
    opens=(_TAGS[0],),
    ends=("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
)
