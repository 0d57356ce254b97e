"""Memory across episodes: notes that agents write and find again, by scope and version, never from attempts at their own task."""

from agentrl.memory.episode import View, scope_of
from agentrl.memory.store import NoteStore, Written, check_search, written

__all__ = ["NoteStore", "View", "Written", "check_search", "scope_of", "written"]
