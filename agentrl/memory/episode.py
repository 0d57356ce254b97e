"""One episode's access to the memory of a run. The episode's notes are stored only if the episode counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.config.tools import MemoryConfig
from agentrl.errors import TaskError
from agentrl.memory.store import QUERY_CHARS, RESULTS, NoteMatch
from agentrl.records import Task
from agentrl.records.episode import NO_NOTES, Memo

MAX_PROJECT_CHARS = 200
NOTE_CHARS = 400  # maximum length of a note: a few sentences, so that five of them fit into a small context


def scope_of(task: Task, by: str) -> str:
    """Returns the scope of a task's notes. Raises `TaskError` if `by` is `project` and the task has no valid project."""
    if by == "family":
        return f"family:{task.family}"
    project = task.data.get("project")
    if not isinstance(project, str) or not 0 < len(project) <= MAX_PROJECT_CHARS:
        raise TaskError(
            f"task {task.id!r} has no project, which memory.scope=project requires",
            fix=f'add "project" to its data, a string of at most {MAX_PROJECT_CHARS} characters, or set memory.scope=family',
        )
    return f"project:{project}"


class SearchableNotes(Protocol):
    """The notes of a run: a `NoteStore`, or the driver's store accessed from a different host."""

    @property
    def config(self) -> MemoryConfig:
        """The recipe's memory settings."""

    def search(self, query: str, *, scope: str, version: int, task_key: str) -> tuple[NoteMatch, ...]:
        """See `NoteStore.search`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """A `MemoryView`: the notes of one version, for attempts at one task."""

    store: SearchableNotes
    scope: str
    version: int
    task_key: str

    @classmethod
    def of(cls, store: SearchableNotes, task: Task, version: int) -> StoreView:
        """Returns the view for attempts at a task. Version 0 contains no notes. Raises `TaskError` in the same cases as `scope_of`."""
        return cls(store=store, scope=scope_of(task, store.config.scope), version=version, task_key=task.key)

    def begin(self, memo: Memo | None = None) -> EpisodeNotes:
        """Returns the memory for a new or resumed episode."""
        return EpisodeNotes(self, memo or Memo(scope=self.scope))

    def search(self, query: str) -> tuple[NoteMatch, ...]:
        """Returns the notes that match a query, best first."""
        return self.store.search(query, scope=self.scope, version=self.version, task_key=self.task_key)


class EpisodeNotes:
    """An `EpisodeMemory`. The episode's notes and reads are in `memo`, which becomes part of the episode's record."""

    def __init__(self, view: StoreView, memo: Memo) -> None:
        self._view = view
        self._memo = memo
        self._lock = threading.Lock()  # tools of concurrent agents run in threads

    @property
    def memo(self) -> Memo:
        """The notes and reads so far."""
        return self._memo

    def note(self, text: str) -> tuple[bool, str]:
        """Adds a note. Returns whether the note is saved, and a message for the agent."""
        config, cleaned_text = self._view.store.config, printable_note(text)
        with self._lock:
            if not cleaned_text:
                return False, "the note is empty"
            if len(cleaned_text) > NOTE_CHARS:
                return False, f"not saved: the note has {len(cleaned_text)} characters, but the limit is {NOTE_CHARS}"
            if cleaned_text in self._memo.notes:
                return True, "already noted"
            if len(self._memo.notes) >= config.notes:
                return False, f"not saved: the limit of {config.notes} notes for this task is reached"
            self._memo = replace(self._memo, notes=(*self._memo.notes, cleaned_text))
            return True, "noted"

    def recall(self, query: str, own: Sequence[str] = (), most: int | None = None) -> tuple[bool, str]:
        """Searches notes from earlier episodes. Returns whether the query was valid, and the result for the agent. See `EpisodeMemory`."""
        if len(query) > QUERY_CHARS:
            return False, f"the query has {len(query)} characters, but the limit is {QUERY_CHARS}"
        most = RESULTS if most is None else most
        first = [printable_note(note) for note in own][:most]
        matches = [match for match in self._view.search(query) if match.text not in first][: most - len(first)]
        with self._lock:
            read = dict.fromkeys([*self._memo.read, *(match.episode for match in matches)])
            self._memo = replace(self._memo, read=tuple(read))
        notes = [*first, *(match.text for match in matches)]
        return True, notes[0] if notes and most == 1 else format_notes(notes)


def printable_note(text: str) -> str:
    """Returns the stripped text, with each unprintable character except line breaks and tabs replaced by the replacement character."""
    printable = "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text.replace("\r\n", "\n")
    )
    return printable.strip()


def format_notes(notes: Sequence[str]) -> str:
    """Returns the notes, numbered, or `NO_NOTES`. The later lines of a note are indented, so that they do not look like other notes."""
    if not notes:
        return NO_NOTES
    return "\n".join(f"{number}. " + "\n   ".join(note.split("\n")) for number, note in enumerate(notes, 1))
