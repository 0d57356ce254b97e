"""The tools in an imported trace: their schemas, and the result of each call.

A task with the tool `recorded` contains the recording in its data. Its tools return results only for recorded calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TaskError
from agentrl.records import Task, codec
from agentrl.records.fields import JsonObject, Record, Text

RECORDED_TOOLS = "recorded"  # name of the recorded tools in `Task.tools`, and their key in `Task.data`


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall(Record):
    """One call and its result."""

    name: str
    arguments: JsonObject
    output: Text
    failed: bool = False


def arguments_key(arguments: Mapping[str, Any]) -> str:
    """Returns the arguments of a call as a string. Equal arguments have equal strings."""
    return json.dumps(arguments, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Record):
    """The offered tools, as function schemas, and the calls in order."""

    tools: tuple[JsonObject, ...]
    calls: tuple[RecordedCall, ...]

    def data(self) -> dict[str, Any]:
        """Returns a mapping with the recording, to be merged into `Task.data`."""
        recording: dict[str, Any] = codec.to_data(self)
        return {RECORDED_TOOLS: recording}

    @classmethod
    def of(cls, task: Task) -> Recording:
        """Returns the recording of a task. Raises `TaskError` if its data contains no valid recording."""
        try:
            return codec.from_json(cls, codec.to_json(task.data[RECORDED_TOOLS]))
        except (KeyError, ValueError) as error:
            raise TaskError(
                f"task {task.id!r} has the tool {RECORDED_TOOLS}, but no valid recording in its data: {str(error)[:300]}",
                fix="promote its trace again: agentrl failures promote",
            ) from None
