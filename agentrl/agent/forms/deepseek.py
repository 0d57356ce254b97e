"""DeepSeek's calls, between control tokens: with a JSON block in V3, R1 and their descendants, with bare JSON since V3.1."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.agent.calls import NOT_CLOSED, Refused, made_call, read_json
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas
from agentrl.records import ToolCall

_BAR, _GAP = "\uff5c", "\u2581"
CALLS = (f"<{_BAR}tool{_GAP}calls{_GAP}begin{_BAR}>", f"<{_BAR}tool{_GAP}calls{_GAP}end{_BAR}>")
CALL = (f"<{_BAR}tool{_GAP}call{_GAP}begin{_BAR}>", f"<{_BAR}tool{_GAP}call{_GAP}end{_BAR}>")
SEP = f"<{_BAR}tool{_GAP}sep{_BAR}>"


def read_v3(text: str, schemas: Schemas) -> Reading:
    return _read(text, _v3)


def read_v31(text: str, schemas: Schemas) -> Reading:
    return _read(text, _v31)


def _read(text: str, make: Callable[[str], ToolCall]) -> Reading:
    content, opened, rest = text.partition(CALLS[0])
    found = Collected()
    if not opened:
        return found.reading(content)
    block, closed, after = rest.partition(CALLS[1])
    at = 0
    while (begin := block.find(CALL[0], at)) >= 0 and (end := block.find(CALL[1], begin)) >= 0:
        if block[at:begin].strip():
            break
        body = block[begin + len(CALL[0]) : end]
        found.take(lambda body=body: make(body))  # type: ignore[misc]
        at = end + len(CALL[1])
    if block[at:].strip() or not closed:
        found.errors.append(NOT_CLOSED if not closed or block.find(CALL[0], at) >= 0 else "between tool calls stands something else")
    elif not found.tried:
        found.errors.append("the list of tool calls is empty")
    if CALLS[0] in after:
        found.errors.append("a turn holds one list of tool calls; those after the first were not made")
    return found.reading(content + after)


def _v31(body: str) -> ToolCall:
    name, parted, arguments = body.partition(SEP)
    if not parted or not name.strip():
        raise Refused(f"tool call must be a tool's name, {SEP} and a JSON object")
    return made_call(name.strip(), read_json(arguments))


def _v3(body: str) -> ToolCall:
    kind, parted, rest = body.partition(SEP)
    name, _, block = rest.partition("\n")
    block = block.strip()
    if not parted or kind.strip() != "function" or not name.strip():
        raise Refused(f"tool call must be the word function, {SEP}, a tool's name, and its arguments in a ```json block")
    if not block.startswith("```json\n") or not block.endswith("\n```"):
        raise Refused("tool call must have its arguments between ```json and ```, each on a line of its own")
    return made_call(name.strip(), read_json(block.removeprefix("```json\n").removesuffix("\n```")))


DEEPSEEK_V3 = CallForm(
    name="deepseek_v3",
    about="between control tokens: `function`, the name, and arguments in a JSON block (V3, R1)",
    read=read_v3,
    opens=(CALLS[0], CALL[0]),
)
DEEPSEEK_V31 = CallForm(
    name="deepseek_v31",
    about="between control tokens: the name and bare JSON (V3.1, V3.2)",
    read=read_v31,
    opens=(CALLS[0], CALL[0]),
)
