"""Calls that are JSON objects: between tags (Hermes, Qwen), or as the complete turn (Llama 3)."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from agentrl.agent.calls import MAX_CALLS, OPEN, CallError, InvalidJson, call_from_object, scan_json
from agentrl.agent.forms.base import CallForm, Collected, Frame, Reading, Schemas, read_tagged
from agentrl.records import ToolCall

PYTHON_TAG = "<|python_tag|>"
_BROKEN = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:parameters|arguments)"\s*:')
_OF_A_CALL = {"name", "parameters", "arguments", "type", "id"}
_SPACE = re.compile(r"[\s;]*")


def read_hermes(text: str, schemas: Schemas) -> Reading:
    """Parses calls between `<tool_call>` tags."""
    return read_tagged(text, scan_json, call_from_object)


def read_llama3(text: str, schemas: Schemas) -> Reading:
    """Parses a turn as calls separated by semicolons if it starts with a JSON object that has only the keys of a call: "name", "parameters"
    or "arguments", and optionally "type" and "id".

    Any other JSON is an answer, unless it follows `<|python_tag|>`. The text after the calls is content.
    """
    body = text.strip()
    marked = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).lstrip()
    if not (marked or _is_call(body)):
        return Reading(content=body)
    collected, at = Collected(), 0
    while at < len(body) and collected.tried <= MAX_CALLS and (marked or body[at] == "{"):
        end = at
        try:
            data, end = scan_json(body, at)
        except CallError as error:
            collected.add(error)
            if isinstance(error, InvalidJson) or error.at <= at:  # the end of the call is unknown
                return collected.reading()
            end = error.at
        else:
            collected.build(partial(_llama3, data))
        space = _SPACE.match(body, end)
        at = space.end() if space else end
        marked = marked and at < len(body) and body[at] == "{"
    return collected.reading(body[at:])


def _is_call(body: str) -> bool:
    """Whether a string starts with an object that can only be a call, even if the rest of the string is invalid."""
    if not body.startswith("{"):
        return False
    try:
        data, _ = scan_json(body, 0)
    except CallError:
        return _BROKEN.match(body) is not None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return False
    return ("parameters" in data or "arguments" in data) and data.keys() <= _OF_A_CALL


def _llama3(data: Any) -> ToolCall:
    other = isinstance(data, dict) and "parameters" not in data and "arguments" in data
    return call_from_object(data, key="arguments" if other else "parameters")


HERMES = CallForm(
    name="hermes",
    about='`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, JSON',
    read=read_hermes,
    opens=(OPEN,),
    ends=("<|im_end|>",),
    frame=Frame(
        begin='<tool_call>\n{"name": "%", "arguments": ', end="}\n</tool_call>", style="json", between="\n", excludes=("</tool_call>",)
    ),
)
LLAMA3 = CallForm(
    name="llama3_json",
    about='`{"name": ..., "parameters": {...}}` as the whole turn, several separated by `;`',
    read=read_llama3,
    opens=(PYTHON_TAG, '{"name"'),
    ends=("<|eot_id|>", "<|eom_id|>"),
    frame=Frame(begin='{"name": "%", "parameters": ', end="}", style="json", between="; "),
)
