"""The notes that an episode wrote to the memory of its run, and those that it read."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo(Record):
    """The notes of one episode for later episodes, and the authors of the notes that it read. All its agents share it."""

    scope: str  # the set of notes that it reads and adds to, such as "family:pages"
    notes: tuple[Text, ...] = ()
    read: tuple[str, ...] = ()  # ids of the episodes whose notes it read, in order, without duplicates
