"""Mistral's calls, after the control token `[TOOL_CALLS]`: a JSON list with ids, or since tokenizer v11 a name and arguments each."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from agentrl.agent.calls import MAX_CALLS, MAX_NAME, NOT_CLOSED, CallError, after, build_call, call_from_object, scan_json, skip_space
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas
from agentrl.records import ToolCall

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID = re.compile(r"[A-Za-z0-9]{9}")
_MOST_HEAD = MAX_NAME + 64  # characters
_THINK = ("[THINK]", "[/THINK]")


def read_mistral(text: str, schemas: Schemas) -> Reading:
    thinking, text = _thinking(text)
    content, marked, rest = text.partition(CALLS)
    found = Collected()
    if not marked:
        return found.reading(content, thinking=thinking)
    if rest.lstrip().startswith("["):
        content += _listed(rest.lstrip(), found)
    else:
        _each_named(text, len(text) - len(rest), found)
    return found.reading(content, thinking=thinking)


def _each_named(text: str, at: int, found: Collected) -> None:
    """Reads the calls after the first `[TOOL_CALLS]`, each followed by another call or the end of the text."""
    while at >= 0:
        if found.tried >= MAX_CALLS:
            found.add(None)
            at = after(text, CALLS, at)
            continue
        try:
            name, number, at = _head(text, at)
            arguments, at = scan_json(text, at)
            at = skip_space(text, at)
            if at < len(text) and not text.startswith(CALLS, at):
                raise CallError(f"unexpected text after the arguments of a tool call: {text[at : at + 40]!a}", at=at)
        except CallError as error:
            found.add(error)
            at = after(text, CALLS, max(at, error.at))
        else:
            found.take(partial(_made, name, number, arguments), number=number)
            at = after(text, CALLS, at)


def _thinking(text: str) -> tuple[str, str]:
    """What the model thought, and the rest; of thinking that is not closed, everything is."""
    if not text.lstrip().startswith(_THINK[0]):
        return "", text
    thought, closed, rest = text.lstrip().removeprefix(_THINK[0]).partition(_THINK[1])
    return thought, rest if closed else ""


def _listed(text: str, found: Collected) -> str:
    """Takes the calls of a JSON list at the begin of a text; returns what comes after the list."""
    try:
        items, end = scan_json(text, 0)
    except CallError as error:
        found.errors.append(str(error))
        return ""
    if not items:
        found.errors.append("the list of tool calls is empty")
    for item in items:
        found.take(lambda item=item: _item(item), number=str(item.get("id") or "") if isinstance(item, dict) else "")  # type: ignore[misc]
    if CALLS in text[end:]:
        found.errors.append("a turn holds one list of tool calls; those after the first were not made")
    return text[end:]


def _item(item: Any) -> ToolCall:
    if isinstance(item, dict):
        _check_id(str(item.get("id") or ""))
    return call_from_object(item)


def _head(text: str, at: int) -> tuple[str, str, int]:
    """Name and id of a call, and the position of its arguments."""
    end = text.find(ARGS, at, at + _MOST_HEAD)
    head = text[at : max(at, end)]
    if end < 0 or CALLS in head:
        raise CallError(f"{NOT_CLOSED}: after [TOOL_CALLS] come a tool's name, [ARGS] and a JSON object")
    name, _, number = head.partition(CALL_ID)
    return name.strip(), number.strip(), end + len(ARGS)


def _made(name: str, number: str, arguments: Any) -> ToolCall:
    if not name:
        raise CallError("tool call has no name between [TOOL_CALLS] and [ARGS]")
    _check_id(number)
    return build_call(name, arguments)


def _check_id(number: str) -> None:
    if number and not ID.fullmatch(number):
        raise CallError("tool call has an id that is not 9 letters or digits")


MISTRAL = CallForm(
    name="mistral",
    about="`[TOOL_CALLS]` and a JSON list of calls with ids (tokenizers v3, v7), or `[TOOL_CALLS]NAME[ARGS]{...}` (v11, v13)",
    read=read_mistral,
    opens=(CALLS,),
)
