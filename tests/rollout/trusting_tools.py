"""User-supplied tools that trust their input. They are in their own file, because it is imported where they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.agent import ToolOutcome
from agentrl.agent.tools import function_schema
from agentrl.protocols import Sandbox
from agentrl.records import Limits


class Trusting:
    """Computes with its arguments, and returns a long answer."""

    name, needs_sandbox = "trusting", False
    schema = function_schema("trusting", "Believes.", "text", "anything")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        text = arguments["text"]
        output = text * 10**4 + str(1 / len(text)) + str(int(text) + arguments["n"])
        return ToolOutcome(output=output, ok=True, answer=arguments.get("done"))


class Inside:
    """Writes and reads files of the sandbox by the given names."""

    name, needs_sandbox = "inside", True
    schema = function_schema("inside", "Reads.", "text", "anything")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        assert sandbox is not None
        await sandbox.write(arguments["text"], arguments["data"].encode())
        return ToolOutcome(output=(await sandbox.read(arguments["text"], max_bytes=10)).decode(), ok=arguments["ok"])


trusting, inside = Trusting(), Inside()
