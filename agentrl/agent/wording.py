"""Prompts and tool descriptions of a recipe, in place of a task's own.

Tasks and their keys stay unchanged, so that two wordings can be compared on the same cases.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UserError
from agentrl.protocols import LiveTrajectory
from agentrl.records import Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWording:
    """Descriptions for a tool's schema, in place of its own. An empty text changes nothing."""

    description: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)  # argument -> its description


def main_prompt(trajectory: LiveTrajectory, task: Task, instructions: str | None) -> tuple[Message, ...]:
    """Returns the main agent's prompt for a task, and records it if it is not the task's own."""
    prompt = with_instructions(task.prompt, instructions)
    if instructions is not None:
        trajectory.describe("main", prompt)
    return prompt


def with_instructions(prompt: Sequence[Message], instructions: str | None) -> tuple[Message, ...]:
    """Returns the prompt with these instructions in place of its system messages; None changes nothing."""
    if instructions is None:
        return tuple(prompt)
    return (Message(role="system", content=instructions), *(message for message in prompt if message.role != "system"))


def reworded_schema(schema: Mapping[str, Any], words: ToolWording) -> Mapping[str, Any]:
    """Returns a tool's function schema with other descriptions. Raises `UserError` for an argument that it does not have."""
    changed = copy.deepcopy(dict(schema))
    function = changed["function"]
    if words.description:
        function["description"] = words.description
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    known: dict[str, Any] = properties if isinstance(properties, dict) else {}
    for name, meaning in words.arguments.items():
        if not isinstance(known.get(name), dict):
            raise UserError(
                f"tools.words.{function['name']}.arguments.{name}: the tool has no such argument",
                fix=f"use one of {', '.join(known) or 'none'}, or remove it",
            )
        if meaning:
            known[name]["description"] = meaning
    return changed
