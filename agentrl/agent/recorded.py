"""Tools that answer from an imported trace: a recorded call returns its recorded result, and any other call returns an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent.tools import FREE, ToolOutcome
from agentrl.contract.recorded import RecordedCall, Recording
from agentrl.protocols import Sandbox
from agentrl.records import Limits, Task

_SHOWN = 5  # recorded calls whose arguments an error shows
_LONGEST = 400  # characters shown for each


class RecordedTool:
    """One tool of a recording. It has no state: if several recorded calls have the same arguments, the first one's output counts."""

    needs_sandbox = False
    bounds, together = FREE, False

    def __init__(self, schema: Mapping[str, Any], calls: Sequence[RecordedCall]) -> None:
        self.schema = schema
        self.name = str(schema["function"]["name"])
        self._calls: dict[tuple[str, str], RecordedCall] = {}
        for call in calls:
            self._calls.setdefault(call.key, call)

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        found = self._calls.get((self.name, json.dumps(arguments, sort_keys=True)))
        if found is not None:
            return ToolOutcome(output=found.output, ok=not found.failed)
        known = "; ".join(text[:_LONGEST] for _, text in list(self._calls)[:_SHOWN]) or "nothing"
        return ToolOutcome(output=f"error: {self.name} has no recorded answer to this call; it was called with {known}", ok=False)


def recorded_tools(task: Task | None) -> tuple[RecordedTool, ...]:
    """The tools of a task's recording; none without a task, when only names are checked. Raises `TaskError`."""
    if task is None:
        return ()
    recording = Recording.of(task)
    return tuple(
        RecordedTool(schema, [call for call in recording.calls if call.name == schema["function"]["name"]]) for schema in recording.tools
    )
