"""Memory across episodes: notes that agents write and later episodes search, by scope and version. Attempts at a task never see notes
from other attempts at the same task.
"""

from agentrl.memory.episode import StoreView, scope_of
from agentrl.memory.store import NoteStore, WrittenNotes, notes_to_commit

__all__ = ["NoteStore", "StoreView", "WrittenNotes", "notes_to_commit", "scope_of"]
