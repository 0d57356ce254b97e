"""What agents are told, in the words of a recipe: instructions in place of a task's, and descriptions of tools.

Tasks and their keys stay what they are, so that two wordings are compared on the same cases.
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
    """What a tool's schema says of it, in place of its own words; an empty text changes nothing."""

    description: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)  # argument -> what it means


def main_prompt(line: LiveTrajectory, task: Task, instructions: str | None) -> tuple[Message, ...]:
    """The prompt of a task as its main agent is told it, which the record says where it is not the task's own."""
    prompt = with_instructions(task.prompt, instructions)
    if instructions is not None:
        line.describe("main", prompt)
    return prompt


def with_instructions(prompt: Sequence[Message], instructions: str | None) -> tuple[Message, ...]:
    """The prompt with these instructions in place of its system messages; None: as it is."""
    if instructions is None:
        return tuple(prompt)
    return (Message(role="system", content=instructions), *(message for message in prompt if message.role != "system"))


def reworded_schema(schema: Mapping[str, Any], words: ToolWording) -> Mapping[str, Any]:
    """A tool's OpenAI function schema with other words. Raises `UserError` for an argument that the tool does not take."""
    made = copy.deepcopy(dict(schema))
    function = made["function"]
    if words.description:
        function["description"] = words.description
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    known: dict[str, Any] = properties if isinstance(properties, dict) else {}
    for name, meaning in words.arguments.items():
        if not isinstance(known.get(name), dict):
            raise UserError(
                f"tools.words.{function['name']}.arguments.{name}: the tool takes no such argument",
                fix=f"use one of {', '.join(known) or 'none'}, or leave it out",
            )
        if meaning:
            known[name]["description"] = meaning
    return made
