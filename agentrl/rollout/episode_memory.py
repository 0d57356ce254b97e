"""Chooses the memory of an episode."""

from __future__ import annotations

from agentrl.protocols import EpisodeMemory, MemoryView
from agentrl.records import EpisodeState
from agentrl.records.memo import Memo


class EmptyMemory:
    """An `EpisodeMemory` without notes, for an episode that continues one with a memory in a run without: its context describes the
    tools."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo

    @property
    def memo(self) -> Memo:
        """The notes of the state that it started from."""
        return self._memo

    def note(self, text: str) -> tuple[bool, str]:
        """Accepts a note and drops it."""
        return True, "noted"

    def recall(self, query: str) -> tuple[bool, str]:
        """Finds no notes."""
        return True, "no notes"


def episode_memory(view: MemoryView | None, start: EpisodeState | None) -> EpisodeMemory | None:
    """Returns the memory of an episode. An episode that continues a state has one exactly if that state had one."""
    if start is None:
        return None if view is None else view.begin()
    if start.memory is None:
        return None
    return EmptyMemory(start.memory) if view is None else view.begin(start.memory)
