"""The tools of an agent elsewhere, as its trace has them: their schemas, and what each call gave.

A task that names the tool `recorded` holds them in its data. Its tools answer the calls that were made, and no others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentrl import codec
from agentrl.errors import TaskError
from agentrl.fields import JsonObject, Record, Text
from agentrl.records import Task

NAME = "recorded"
"""Stands for all of them in `Task.tools`; and their key in `Task.data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall(Record):
    """One call, and what it gave."""

    name: str
    arguments: JsonObject
    output: Text
    failed: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.name, json.dumps(self.arguments, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Record):
    """The tools that were offered, as function schemas, and the calls in their order."""

    tools: tuple[JsonObject, ...]
    calls: tuple[RecordedCall, ...]

    def data(self) -> dict[str, Any]:
        """For `Task.data`."""
        found: dict[str, Any] = codec.to_data(self)
        return {NAME: found}

    @classmethod
    def of(cls, task: Task) -> Recording:
        """Raises `TaskError` for a task whose data hold none."""
        try:
            return codec.from_json(cls, codec.to_json(task.data[NAME]))
        except (KeyError, ValueError) as error:
            raise TaskError(
                f"task {task.id!r} names the tool {NAME}, and its data hold no recording: {str(error)[:300]}",
                fix="promote its trace again: agentrl failures promote",
            ) from None
