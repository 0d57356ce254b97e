"""Mistral's calls, after the control token `[TOOL_CALLS]`: a JSON list with ids, or since tokenizer v11 a name and arguments each."""

from __future__ import annotations

import re
from typing import Any

from agentrl.agent.calls import NOT_CLOSED, Refused, made_call, read_json, read_json_at
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas
from agentrl.records import ToolCall

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID = re.compile(r"[A-Za-z0-9]{9}")
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
        for part in rest.split(CALLS):
            call_id = _id_of(part)
            found.take(lambda part=part: _named(part), number=call_id)  # type: ignore[misc]
    return found.reading(content, thinking=thinking)


def _thinking(text: str) -> tuple[str, str]:
    """What the model thought, and the rest; of thinking that is not closed, everything is."""
    if not text.lstrip().startswith(_THINK[0]):
        return "", text
    thought, closed, rest = text.lstrip().removeprefix(_THINK[0]).partition(_THINK[1])
    return thought, rest if closed else ""


def _listed(text: str, found: Collected) -> str:
    """Takes the calls of a JSON list at the begin of a text; returns what comes after the list."""
    try:
        items, end = read_json_at(text, 0)
    except Refused as error:
        found.errors.append(str(error))
        return ""
    if not items:
        found.errors.append("the list of tool calls is empty")
    for item in items:
        found.take(lambda item=item: _item(item), number=str(item.get("id", "")) if isinstance(item, dict) else "")  # type: ignore[misc]
    return text[end:]


def _item(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise Refused('tool call must be an object with "name" and "arguments"')
    _check_id(str(item.get("id", "")))
    return made_call(item["name"], item.get("arguments", {}))


def _id_of(part: str) -> str:
    head = part.partition(ARGS)[0]
    return head.partition(CALL_ID)[2].strip()


def _named(part: str) -> ToolCall:
    head, found, arguments = part.partition(ARGS)
    if not found:
        raise Refused(f"{NOT_CLOSED}: after [TOOL_CALLS] come a tool's name, [ARGS] and a JSON object")
    name, _, number = head.partition(CALL_ID)
    _check_id(number.strip())
    if not name.strip():
        raise Refused("tool call has no name between [TOOL_CALLS] and [ARGS]")
    return made_call(name.strip(), read_json(arguments.strip() or "{}"))


def _check_id(number: str) -> None:
    if number and not ID.fullmatch(number):
        raise Refused("tool call has an id that is not 9 letters or digits")


MISTRAL = CallForm(
    name="mistral",
    about="`[TOOL_CALLS]` and a JSON list of calls with ids (tokenizers v3, v7), or `[TOOL_CALLS]NAME[ARGS]{...}` (v11, v13)",
    read=read_mistral,
    opens=(CALLS,),
)
