"""Memory across episodes: notes that agents write and find again, by scope and version, never from attempts at their own task."""

from agentrl.memory.episode import StoreView, scope_of
from agentrl.memory.store import NoteStore, WrittenNotes, notes_to_commit, require_full_text_search

__all__ = ["NoteStore", "StoreView", "WrittenNotes", "notes_to_commit", "require_full_text_search", "scope_of"]
