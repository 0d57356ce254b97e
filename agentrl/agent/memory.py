"""The tools of a run's memory: `note` and `recall`. What they keep is the episode's, on the host (`agentrl.protocols.EpisodeMemory`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.agent.tools import Tool, ToolOutcome
from agentrl.agent.typed import TypedTool, tool, typed_tool
from agentrl.protocols import EpisodeMemory, Sandbox
from agentrl.records import Limits

NOTE, RECALL = "note", "recall"


class Notebook:
    """Its methods are the tools, of one episode."""

    def __init__(self, memory: EpisodeMemory) -> None:
        self._memory = memory

    @tool
    def note(self, text: str) -> ToolOutcome:
        """Keep a note for later tasks like this one. It is all that remains of this one.

        Args:
            text: what would have helped you, had you known it before
        """
        return _outcome(NOTE, self._memory.note(text))

    @tool(together=True)
    def recall(self, query: str = "") -> ToolOutcome:
        """Show notes that were kept in earlier tasks like this one. Nobody has checked them.

        Args:
            query: words to look for; empty for the newest notes
        """
        return _outcome(RECALL, self._memory.recall(query))


_METHODS = tuple(typed_tool(one, method=True) for one in (Notebook.note, Notebook.recall))
SCHEMAS: tuple[Mapping[str, Any], ...] = tuple(one.schema for one in _METHODS)
"""What an agent is told of the tools that it has beside those of its task."""


class MemoryTool:
    """One of the tools, in one episode."""

    needs_sandbox = False

    def __init__(self, method: TypedTool, notebook: Notebook) -> None:
        self.name, self.schema = method.name, method.schema
        self.bounds, self.together = method.bounds, method.together
        self._method = method
        self._notebook = notebook

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        return await self._method.call(getattr(self._notebook, self.name), arguments, sandbox, limits)


def memory_tools(memory: EpisodeMemory) -> tuple[Tool, ...]:
    """The tools of an episode that has a memory."""
    notebook = Notebook(memory)
    return tuple(MemoryTool(method, notebook) for method in _METHODS)


def _outcome(name: str, told: tuple[bool, str]) -> ToolOutcome:
    ok, text = told
    return ToolOutcome(output=text if ok else f"error: {name}: {text}", ok=ok)
