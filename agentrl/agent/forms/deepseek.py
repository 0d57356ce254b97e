"""DeepSeek's calls between control tokens: with a JSON block in V3 and R1, with bare JSON since V3.1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agentrl.agent.calls import MAX_CALLS, MAX_NAME, NOT_CLOSED, CallError, after, build_call, call_at, scan_json, skip_space
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas
from agentrl.records import ToolCall

_BAR, _GAP = "\uff5c", "\u2581"
CALLS = (f"<{_BAR}tool{_GAP}calls{_GAP}begin{_BAR}>", f"<{_BAR}tool{_GAP}calls{_GAP}end{_BAR}>")
CALL = (f"<{_BAR}tool{_GAP}call{_GAP}begin{_BAR}>", f"<{_BAR}tool{_GAP}call{_GAP}end{_BAR}>")
SEP = f"<{_BAR}tool{_GAP}sep{_BAR}>"
_BLOCK = ("```json\n", "```")
_IN_A_BLOCK = "tool call must have its arguments between ```json and ```, each on a separate line"
_MOST_HEAD = MAX_NAME + 64  # characters


def _read(text: str, schemas: Schemas, *, scan: Callable[[str, int], tuple[tuple[str, Any], int]]) -> Reading:
    content, opened, _ = text.partition(CALLS[0])
    collected = Collected()
    call: ToolCall | CallError | None
    if not opened:
        return collected.reading(content)
    at = skip_space(text, len(content) + len(opened))
    while text.startswith(CALL[0], at):
        body = at + len(CALL[0])
        if collected.tried < MAX_CALLS:
            call, end = call_at(text, body, CALL[1], scan, lambda parsed: build_call(*parsed))
        else:
            call, end = None, after(text, CALL[1], body)
        if end < 0:
            break
        collected.add(call)
        at = skip_space(text, end)
    closed = after(text, CALLS[1], at)
    if closed < 0:
        collected.errors.append(NOT_CLOSED)
    elif not text.startswith(CALLS[1], at):
        collected.errors.append(f"unexpected text between tool calls: {text[at : at + 40]!a}")
    elif not collected.tried:
        collected.errors.append("the list of tool calls is empty")
    rest = text[closed:] if closed >= 0 else ""
    if CALLS[0] in rest:
        collected.errors.append("a turn contains one list of tool calls; those after the first were not run")
    return collected.reading(content + rest)


def _v31(text: str, at: int) -> tuple[tuple[str, Any], int]:
    name, at = _until(text, at, SEP)
    if not name:
        raise CallError(f"tool call must be a tool's name, {SEP} and a JSON object")
    arguments, end = scan_json(text, at)
    return (name, arguments), end


def _v3(text: str, at: int) -> tuple[tuple[str, Any], int]:
    kind, at = _until(text, at, SEP)
    name, at = _until(text, at, "\n")
    if kind != "function" or not name:
        raise CallError(f"tool call must be the word function, {SEP}, a tool's name, and its arguments in a ```json block")
    at = skip_space(text, at)
    if not text.startswith(_BLOCK[0], at):
        raise CallError(_IN_A_BLOCK)
    arguments, end = scan_json(text, at + len(_BLOCK[0]))
    end = skip_space(text, end)
    if not text.startswith(_BLOCK[1], end):
        raise CallError(_IN_A_BLOCK, at=end)
    return (name, arguments), end + len(_BLOCK[1])


def _until(text: str, at: int, mark: str) -> tuple[str, int]:
    """Returns the name before a mark and the position after the mark; an empty name if there is no mark in the call."""
    end = text.find(mark, at, at + _MOST_HEAD)
    name = text[at : max(at, end)].strip()
    return ("", at) if CALL[1] in name else (name, end + len(mark))


DEEPSEEK_V3 = CallForm(
    name="deepseek_v3",
    about="between control tokens: `function`, the name, and arguments in a JSON block (V3, R1)",
    read=partial(_read, scan=_v3),
    opens=(CALLS[0], CALL[0]),
)
DEEPSEEK_V31 = CallForm(
    name="deepseek_v31",
    about="between control tokens: the name and bare JSON (V3.1, V3.2)",
    read=partial(_read, scan=_v31),
    opens=(CALLS[0], CALL[0]),
)
