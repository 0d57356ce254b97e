"""Memory across episodes: notes that agents write and later episodes search, by scope and version. Attempts at a task never see notes of
other attempts at it.
"""

from agentrl.memory.episode import View, scope_of
from agentrl.memory.store import NoteStore, Written, check_search, written

__all__ = ["NoteStore", "View", "Written", "check_search", "scope_of", "written"]
