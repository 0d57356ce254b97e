"""What an episode has to do with the memory of its run. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo(Record):
    """What one episode wrote for later ones, and whose notes it was shown. All its agents write to the same one."""

    scope: str  # which notes it reads and adds to, such as "family:pages"
    notes: tuple[Text, ...] = ()
    read: tuple[str, ...] = ()  # ids of the episodes that wrote what it was shown, each once, in the order of reading
