"""Audits a run's memory from the records of its episodes: which notes each episode read, and whether it was allowed to read them.

The audit does not rely on the note store. For training episodes, the audit looks up the authors of the notes that were read. For evaluation
episodes, the audit uses the authors' ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.error_text import reason_text
from agentrl.base.files import complete_lines
from agentrl.config.recipe import Recipe, load
from agentrl.errors import UserError
from agentrl.experience import GroupOrder, open_store
from agentrl.memory import NoteStore, notes_to_commit
from agentrl.memory.run_memory import ANSWERS_FILE, NOTES_FILE
from agentrl.plugins.parts import STORE
from agentrl.records import Group

SHOWN = 20  # maximum number of wrong reads that the report lists; all are counted

_TRANSCRIPT: Mapping[str, type] = {"phase": str, "split": str, "task_id": str}
_ANSWER: Mapping[str, type] = {"episode": str, "task": str, "how": list}


@dataclass(frozen=True, slots=True)
class _Author:
    """An episode whose notes are stored, and the keys of the tasks whose answers it may know."""

    step: int | None
    knows: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The writes and reads of a run, and the reads that were not allowed."""

    version: int  # number of steps in the store
    kept: Mapping[str, tuple[int, int]]  # scope -> (number of stored notes, number of episodes that wrote them)
    episodes: int  # training episodes
    writers: int
    readers: int
    evaluated: int  # evaluation episodes
    evaluated_readers: int
    wrong: int
    examples: tuple[str, ...]
    answers: tuple[Mapping[str, Any], ...]  # episodes that read a note with the answer to their task

    @property
    def ok(self) -> bool:
        """Whether all reads were allowed, whatever `answers` contains."""
        return not self.wrong

    def to_data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        names = ("version", "episodes", "writers", "readers", "evaluated", "evaluated_readers", "wrong")
        scopes = {scope: {"notes": notes, "writers": writers} for scope, (notes, writers) in self.kept.items()}
        lists = {"examples": list(self.examples), "answers": [dict(answer) for answer in self.answers]}
        return {"ok": self.ok, "kept": scopes, **{name: getattr(self, name) for name in names}, **lists}


def audit_memory(run: Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> MemoryReport:
    """Examines every episode of a run with a memory. `on_progress` is called with the number of finished groups and the number
    of all groups.

    Raises `UserError` if the folder contains no run with a memory or a file of the run is damaged, and `StoreError` if the store cannot be
    read.
    """
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}", fix="use the folder of a run, such as runs/archive")
    try:
        recipe = load(run / "recipe.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} is not a run folder: recipe.json: {reason_text(error)[:500]}", fix="use the folder of a run, such as runs/archive"
        ) from None
    if recipe.memory is None:
        raise UserError(f"the run in {run} has no memory", fix="set memory={} in its recipe and start a new run")
    reads = _Reads(recipe)
    if (run / "experience.sqlite").is_file() or recipe.store.ref not in STORE.shipped:
        store = open_store(run, recipe)
        try:
            entries = [entry for entry in store.entries() if entry.has_episodes and not entry.is_residual]
            for done, entry in enumerate(entries, 1):
                reads.add_group(store.groups([entry.index])[0], step=entry.step)
                on_progress(done, len(entries))
        finally:
            store.close()
    for line in _lines(sorted((run / "episodes").glob("*.jsonl")), _TRANSCRIPT):
        reads.add_evaluated(line)
    version, kept = _stored_notes(run / NOTES_FILE, recipe)
    return MemoryReport(
        version=version,
        kept=kept,
        episodes=reads.episodes,
        writers=reads.writers,
        readers=reads.readers,
        evaluated=reads.of_evaluations,
        evaluated_readers=reads.readers_of_evaluations,
        wrong=len(reads.wrong),
        examples=tuple(reads.wrong[:SHOWN]),
        answers=tuple(_lines([run / ANSWERS_FILE], _ANSWER)),
    )


class _Reads:
    """The reads of a run's episodes, collected group by group in index order."""

    def __init__(self, recipe: Recipe) -> None:
        self.episodes = self.writers = self.readers = self.of_evaluations = self.readers_of_evaluations = 0
        self.wrong: list[str] = []
        self._order = GroupOrder.from_recipe(recipe)
        self._behind = recipe.max_staleness
        self._authors: dict[str, _Author] = {}

    def add_group(self, group: Group, *, step: int | None) -> None:
        """Adds a training group and the learner step that consumed it, if any."""
        version = max(0, self._order.block_of(group.index) - self._behind)
        count = {scored.episode for scored in notes_to_commit(group.episodes)}
        for scored in group.episodes:
            episode, memo = scored.episode, scored.episode.memory
            self.episodes += 1
            if memo is None:
                continue
            self.readers += bool(memo.read)
            authors = [(name, self._authors.get(name)) for name in memo.read]
            self.wrong += [f"{episode.id} {why}" for name, author in authors if (why := self._why(name, author, episode.task_key, version))]
            if episode.id in count:
                self.writers += 1
                knows = frozenset([episode.task_key]).union(*(author.knows for _, author in authors if author is not None))
                self._authors[episode.id] = _Author(step, knows)

    def _why(self, name: str, author: _Author | None, task_key: str, version: int) -> str:
        """Returns why an attempt at a task must not read a note by this author, or an empty string if it may."""
        if author is None:
            return f"read a note of {name}, which is not an earlier, counted training episode"
        if author.step is None or author.step >= version:
            taken = "which no step took" if author.step is None else f"of step {author.step}"
            return f"reads version {version} of the memory, but read a later note of {name}, {taken}"
        return f"read a note of {name}, which may know the answer to its task" if task_key in author.knows else ""

    def add_evaluated(self, line: Mapping[str, Any]) -> None:
        """Adds an evaluation transcript. An evaluated episode may read only notes from the same evaluation and split."""
        if line["phase"] == "train" or not isinstance(memory := line.get("memory"), dict):
            return
        read = memory.get("read")
        names = [str(name) for name in read] if isinstance(read, list) else ["an unknown episode"]
        self.of_evaluations += 1
        self.readers_of_evaluations += bool(names)
        own = f"{line['phase']}-{line['split']}-"
        self.wrong += [f"{line['task_id']} in {own[:-1]} read a note of {name}" for name in names if not name.startswith(own)]


def _lines(paths: Iterable[Path], required: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in files that contain one object per line. Raises `UserError` if a file cannot be read or a line is not an
    object with the required fields."""
    for path in paths:
        try:
            lines = complete_lines(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}", fix="make the file readable") from None
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict) or not all(isinstance(fields.get(name), kind) for name, kind in required.items()):
                raise UserError(
                    f"{path}: line {number} is damaged, so the reads of its episode are unknown",
                    fix="restore the file from a copy, or delete the line to audit the other lines",
                )
            yield fields


def _stored_notes(path: Path, recipe: Recipe) -> tuple[int, Mapping[str, tuple[int, int]]]:
    if not path.is_file() or recipe.memory is None:
        return 0, {}
    store = NoteStore(path, recipe.memory)
    try:
        return store.version, store.counts()
    finally:
        store.close()
