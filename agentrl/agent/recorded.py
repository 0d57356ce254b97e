"""Tools that answer from an imported trace: a recorded call returns its recorded result, and any other call returns an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent.tools import NO_BOUNDS, ToolOutcome
from agentrl.protocols import Sandbox
from agentrl.records import Limits, Task
from agentrl.task.recorded_tools import RecordedCall, Recording, arguments_key

_SHOWN, _LONGEST = 20, 80  # names of arguments in an error, and characters of each


class RecordedTool:
    """One tool of a recording. It has no state: if several recorded calls have the same arguments, the first one's output counts."""

    needs_sandbox = False
    bounds, together = NO_BOUNDS, False

    def __init__(self, schema: Mapping[str, Any], calls: Sequence[RecordedCall]) -> None:
        self.schema = schema
        self.name = str(schema["function"]["name"])
        parameters = schema["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        self._declared = frozenset(properties if isinstance(properties, dict) else ())
        self._calls: dict[str, RecordedCall] = {}
        for call in calls:
            self._calls.setdefault(arguments_key(call.arguments), call)

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        call = self._calls.get(arguments_key(arguments))
        if call is not None:
            return ToolOutcome(output=call.output, ok=not call.failed)
        recorded = (
            "no call of it is recorded" if not self._calls else f"{len(self._calls)} calls are recorded, with the arguments {self._names()}"
        )
        return ToolOutcome(output=f"error: {self.name} has no recorded answer to this call; {recorded}", ok=False)

    def _names(self) -> str:
        """Names of arguments. Values stay hidden: what the recorded agent passed may be the answer to the task."""
        names = dict.fromkeys(name[:_LONGEST] for call in self._calls.values() for name in call.arguments if name in self._declared)
        return ", ".join(list(names)[:_SHOWN]) or "that its schema does not declare"


def recorded_tools(task: Task | None) -> tuple[RecordedTool, ...]:
    """The tools of a task's recording; none without a task, when only names are checked. Raises `TaskError`."""
    if task is None:
        return ()
    recording = Recording.of(task)
    return tuple(
        RecordedTool(schema, [call for call in recording.calls if call.name == schema["function"]["name"]]) for schema in recording.tools
    )
