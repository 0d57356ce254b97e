"""Which memory an episode has: that of its run, as it was where the episode goes on from."""

from __future__ import annotations

from agentrl.protocols import EpisodeMemory, MemoryView
from agentrl.records import EpisodeState
from agentrl.records.memo import Memo


class EmptyMemory:
    """An `EpisodeMemory` in which nothing is found, and nothing kept: of an episode that goes on from one with a memory, where there is
    none. Its context tells of the tools."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo

    @property
    def memo(self) -> Memo:
        return self._memo

    def note(self, text: str) -> tuple[bool, str]:
        return True, "noted"

    def recall(self, query: str) -> tuple[bool, str]:
        return True, "no notes"


def episode_memory(view: MemoryView | None, start: EpisodeState | None) -> EpisodeMemory | None:
    """The memory of an episode. One that goes on from a state has one where that had one, whatever the recipe says now."""
    if start is None:
        return None if view is None else view.begin()
    if start.memory is None:
        return None
    return EmptyMemory(start.memory) if view is None else view.begin(start.memory)
