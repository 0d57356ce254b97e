"""The tools for a run's memory: `note` and `recall`. The tools use the episode's memory on the host (`agentrl.protocols.EpisodeMemory`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.agent.tools import Tool, ToolOutcome
from agentrl.agent.typed import tool, typed_tool
from agentrl.protocols import EpisodeMemory

NOTE, RECALL = "note", "recall"


class Notebook:
    """The memory of one episode. The methods of this class are the memory tools."""

    def __init__(self, memory: EpisodeMemory) -> None:
        self._memory = memory

    @tool
    def note(self, text: str) -> ToolOutcome:
        """Keep a note for later tasks like this one. Nothing else of this task is kept.

        Args:
            text: what would have helped you in this task
        """
        return _outcome(NOTE, self._memory.note(text))

    @tool(together=True)
    def recall(self, query: str = "") -> ToolOutcome:
        """Show notes from earlier tasks like this one. They were not checked.

        Args:
            query: words to search for; empty for the newest notes
        """
        return _outcome(RECALL, self._memory.recall(query))


_METHODS = tuple(typed_tool(method, method=True) for method in (Notebook.note, Notebook.recall))
SCHEMAS: tuple[Mapping[str, Any], ...] = tuple(method.schema for method in _METHODS)
"""The schemas of the memory tools, which an agent has in addition to its task's tools."""


def memory_tools(memory: EpisodeMemory) -> tuple[Tool, ...]:
    """Returns the memory tools of one episode."""
    notebook = Notebook(memory)

    async def owner() -> Notebook:
        return notebook

    return tuple(replace(method, owner=owner) for method in _METHODS)


def _outcome(name: str, result: tuple[bool, str]) -> ToolOutcome:
    ok, text = result
    return ToolOutcome(output=text if ok else f"error: {name}: {text}", ok=ok)
