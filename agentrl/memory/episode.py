"""The memory of a run as one episode has it: within bounds, and with what it writes kept apart until the episode counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.errors import TaskError
from agentrl.memory.store import QUERY_CHARS, NoteMatch, NoteStore
from agentrl.records import Task
from agentrl.records.memo import Memo

MAX_PROJECT_CHARS = 200
NO_NOTES = "no notes"
"""What an agent is told that finds none."""


def scope_of(task: Task, by: str) -> str:
    """The scope of a task's notes. Raises `TaskError` where it must name its project, and does not."""
    if by == "family":
        return f"family:{task.family}"
    project = task.data.get("project")
    if not isinstance(project, str) or not 0 < len(project) <= MAX_PROJECT_CHARS:
        raise TaskError(
            f"task {task.id!r} names no project, by which memory.scope=project keeps notes",
            fix=f'give its data "project", a text of at most {MAX_PROJECT_CHARS} characters, or set memory.scope=family',
        )
    return f"project:{project}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """A `MemoryView`: the notes of one version for attempts at one task."""

    store: NoteStore
    scope: str
    version: int
    task_key: str

    @classmethod
    def of(cls, store: NoteStore, task: Task, version: int) -> StoreView:
        """Version 0 is empty. Raises `TaskError` as `scope_of` does."""
        return cls(store=store, scope=scope_of(task, store.config.scope), version=version, task_key=task.key)

    def begin(self, memo: Memo | None = None) -> EpisodeNotes:
        return EpisodeNotes(self, memo or Memo(scope=self.scope))

    def search(self, query: str) -> tuple[NoteMatch, ...]:
        return self.store.search(query, scope=self.scope, version=self.version, task_key=self.task_key)


class EpisodeNotes:
    """An `EpisodeMemory`. What it writes is in `memo` alone, with which it becomes a part of the episode's record."""

    def __init__(self, view: StoreView, memo: Memo) -> None:
        self._view = view
        self._memo = memo
        self._lock = threading.Lock()  # tools of agents that work side by side run in threads

    @property
    def memo(self) -> Memo:
        return self._memo

    def note(self, text: str) -> tuple[bool, str]:
        config, kept = self._view.store.config, cleaned(text)
        with self._lock:
            if not kept:
                return False, "a note needs words"
            if len(kept) > config.note_chars:
                return False, f"a note may have {config.note_chars} characters, not {len(kept)}: it was not kept"
            if kept in self._memo.notes:
                return True, "noted before"
            if len(self._memo.notes) >= config.notes:
                return False, f"{config.notes} notes are kept of a task, and were written: it was not kept"
            self._memo = replace(self._memo, notes=(*self._memo.notes, kept))
            return True, "noted"

    def recall(self, query: str) -> tuple[bool, str]:
        if len(query) > QUERY_CHARS:
            return False, f"a query may have {QUERY_CHARS} characters, not {len(query)}"
        found = self._view.search(query)
        with self._lock:
            read = dict.fromkeys([*self._memo.read, *(one.episode for one in found)])
            self._memo = replace(self._memo, read=tuple(read))
        return True, shown(found)


def cleaned(text: str) -> str:
    """Text with replacement characters for what cannot be printed, and without white space around it."""
    kept = "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text.replace("\r\n", "\n"))
    return kept.strip()


def shown(found: Sequence[NoteMatch]) -> str:
    """The notes, numbered. Lines of a note after its first are indented, so that none can look like another note."""
    if not found:
        return NO_NOTES
    return "\n".join(f"{number}. " + "\n   ".join(one.text.split("\n")) for number, one in enumerate(found, 1))
