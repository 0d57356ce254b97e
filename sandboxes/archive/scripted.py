"""Two strategies for `archive`. A strategy maps a context, in the chat format of `agentrl.testing`, to the next turn.

`alone` looks into as many drawers as its turns allow. `noting` first recalls notes, opens the drawer that they name, and writes notes about
what it saw. Both are for `agentrl.testing.ReadingPolicy`.
"""

from __future__ import annotations

import json
import re
import zlib

from sandboxes.archive.family import KINDS

NOWHERE = "unknown"


def alone(context: str, turns: int = 4) -> str:
    """Looks into drawers in an order that depends on the question, and gives up in the last turn."""
    outputs = _tool_outputs(context)
    if (amount := _amount(context, outputs)) or len(outputs) >= turns - 1:
        return _call("submit", answer=amount or NOWHERE)
    return _call("look", drawer=_order(context)[len(outputs)])


def noting(context: str, turns: int = 4) -> str:
    """Recalls notes in the first turn, and writes notes in the last turn."""
    kind, outputs = _sought(context)[0], _tool_outputs(context)
    if not outputs:
        return _call("recall", query=f"drawer {kind}s")
    seen = _drawers(outputs[1:])
    if (amount := _amount(context, outputs[1:])) or len(outputs) >= turns - 1:
        notes = "".join(_call("note", text=f"drawer {drawer}: {of}s") for drawer, of in seen.items())
        return notes + _call("submit", answer=amount or NOWHERE)
    noted = _drawers(outputs[:1])
    known = [drawer for drawer, of in noted.items() if of == kind]
    left = [drawer for drawer in (*known, *_order(context)) if drawer not in seen and noted.get(drawer, kind) == kind]
    return _call("look", drawer=left[0])


def _sought(context: str) -> tuple[str, str]:
    """Returns the kind and the number of the record for which the task asks."""
    matches = re.findall(r"amount of (\w+) (\d+) in project", context)
    return matches[0][0], matches[0][1]


def _tool_outputs(context: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)


def _amount(context: str, outputs: list[str]) -> str:
    kind, number = _sought(context)
    amounts = re.findall(rf"^{kind} {number}: (\d+)$", "\n".join(outputs), re.MULTILINE)
    return str(amounts[0]) if amounts else ""


def _drawers(outputs: list[str]) -> dict[int, str]:
    """Returns a mapping from drawer to kind of record, for the drawers that were seen or noted."""
    return {int(drawer): kind for drawer, kind in re.findall(r"drawer (\d): (\w+)s\b", "\n".join(outputs)) if kind in KINDS}


def _order(context: str) -> list[int]:
    """Returns the drawers in an order that depends on the question."""
    first = zlib.crc32(" ".join(_sought(context)).encode())
    return [(first + step) % len(KINDS) + 1 for step in range(len(KINDS))]


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
