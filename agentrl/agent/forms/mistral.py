"""Mistral's calls after the control token `[TOOL_CALLS]`: a JSON list with ids or, since tokenizer v11, a name and arguments after each
token."""

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
    """Parses calls in either notation."""
    thinking, text = _thinking(text)
    content, marked, rest = text.partition(CALLS)
    collected = Collected()
    if not marked:
        return collected.reading(content, thinking=thinking)
    if rest.lstrip().startswith("["):
        content += _listed(rest.lstrip(), collected)
    else:
        _each_named(text, len(text) - len(rest), collected)
    return collected.reading(content, thinking=thinking)


def _each_named(text: str, at: int, collected: Collected) -> None:
    """Reads the calls, starting at the first `[TOOL_CALLS]`. Each call must be followed by another call or the end of the text."""
    while at >= 0:
        if collected.tried >= MAX_CALLS:
            collected.add(None)
            at = after(text, CALLS, at)
            continue
        try:
            name, call_id, at = _parse_head(text, at)
            arguments, at = scan_json(text, at)
            at = skip_space(text, at)
            if at < len(text) and not text.startswith(CALLS, at):
                raise CallError(f"unexpected text after the arguments of a tool call: {text[at : at + 40]!a}", at=at)
        except CallError as error:
            collected.add(error)
            at = after(text, CALLS, max(at, error.at))
        else:
            collected.build(partial(_named_call, name, call_id, arguments), call_id=call_id)
            at = after(text, CALLS, at)


def _thinking(text: str) -> tuple[str, str]:
    """Returns the reasoning and the rest of a string. If the reasoning is not closed, it extends to the end."""
    if not text.lstrip().startswith(_THINK[0]):
        return "", text
    thought, closed, rest = text.lstrip().removeprefix(_THINK[0]).partition(_THINK[1])
    return thought, rest if closed else ""


def _listed(text: str, collected: Collected) -> str:
    """Reads the calls of a JSON list at the start of a string. Returns the text after the list; empty if the list is invalid."""
    try:
        items, end = scan_json(text, 0)
    except CallError as error:
        collected.errors.append(str(error))
        return ""
    if not items:
        collected.errors.append("the list of tool calls is empty")
    for item in items:
        call_id = str(item.get("id") or "") if isinstance(item, dict) else ""
        collected.build(partial(_listed_call, call_id, item), call_id=call_id)
    if CALLS in text[end:]:
        collected.errors.append("a turn contains one list of tool calls; those after the first were not run")
    return text[end:]


def _listed_call(call_id: str, item: Any) -> ToolCall:
    _check_id(call_id)
    return call_from_object(item)


def _parse_head(text: str, at: int) -> tuple[str, str, int]:
    """Returns the name and id (empty if there is none) of a call, and the position of its arguments."""
    end = text.find(ARGS, at, at + _MOST_HEAD)
    head = text[at : max(at, end)]
    if end < 0 or CALLS in head:
        raise CallError(f"{NOT_CLOSED}: [TOOL_CALLS] must be followed by a tool's name, [ARGS] and a JSON object")
    name, _, call_id = head.partition(CALL_ID)
    return name.strip(), call_id.strip(), end + len(ARGS)


def _named_call(name: str, call_id: str, arguments: Any) -> ToolCall:
    if not name:
        raise CallError("tool call has no name between [TOOL_CALLS] and [ARGS]")
    _check_id(call_id)
    return build_call(name, arguments)


def _check_id(call_id: str) -> None:
    if call_id and not ID.fullmatch(call_id):
        raise CallError("tool call has an id that is not 9 letters or digits")


MISTRAL = CallForm(
    name="mistral",
    about="`[TOOL_CALLS]` and a JSON list of calls with ids (tokenizers v3, v7), or `[TOOL_CALLS]NAME[ARGS]{...}` (v11, v13)",
    read=read_mistral,
    opens=(CALLS,),
)
