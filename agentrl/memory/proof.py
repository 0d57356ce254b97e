"""What went through a run's memory, judged by the records of its episodes alone: who was shown whose notes, and whether that was right.

The store has rules of its own; here nothing of it is believed. For every training episode the episodes whose notes it was shown are
looked up, and for every evaluation the ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.files import complete_lines
from agentrl.config.recipe import Recipe, load
from agentrl.errors import UserError
from agentrl.experience import StepGroups, open_store
from agentrl.memory import NoteStore, notes_to_commit
from agentrl.memory.run_memory import ANSWERS_FILE, NOTES_FILE
from agentrl.records import Group

SHOWN = 20
"""Wrong readings that are told; all are counted."""

_TRANSCRIPT: Mapping[str, type] = {"phase": str, "split": str, "task_id": str}
_ANSWER: Mapping[str, type] = {"episode": str, "task": str, "how": list}


@dataclass(frozen=True, slots=True)
class _Author:
    """An episode that wrote notes which count, and the keys of the tasks whose attempts may have told it something."""

    step: int
    knows: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What was written and read in a run, and what must not have been."""

    version: int  # steps whose notes are in the store
    kept: Mapping[str, tuple[int, int]]  # scope -> notes that are kept, and episodes that wrote them
    episodes: int  # of training
    writers: int
    readers: int
    evaluated: int  # episodes of evaluations
    evaluated_readers: int
    wrong: int
    examples: tuple[str, ...]
    answers: tuple[Mapping[str, Any], ...]  # episodes that were shown words with an answer to their own task

    @property
    def ok(self) -> bool:
        return not self.wrong

    def to_data(self) -> dict[str, Any]:
        names = ("version", "episodes", "writers", "readers", "evaluated", "evaluated_readers", "wrong")
        kept = {scope: {"notes": notes, "writers": writers} for scope, (notes, writers) in self.kept.items()}
        told = {"examples": list(self.examples), "answers": [dict(one) for one in self.answers]}
        return {"ok": self.ok, "kept": kept, **{name: getattr(self, name) for name in names}, **told}


def audit_memory(run: Path, *, telling: Callable[[int, int], None] = lambda done, total: None) -> MemoryReport:
    """Looks at every episode of a run with a memory. `telling`: how many groups of how many are done.

    Raises `UserError` for a folder that holds no such run, and `StoreError`.
    """
    if not run.is_dir():
        raise UserError(f"no run folder {run}", fix="give the folder of a run, such as runs/archive")
    try:
        recipe = load(run / "recipe.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{run} holds no run: {str(error)[:500]}", fix="give the folder of a run, such as runs/archive") from None
    if recipe.memory is None:
        raise UserError(f"the run in {run} has no memory", fix="set memory={} in its recipe, and begin another run")
    found = _Readings(recipe)
    if (run / "experience.sqlite").is_file() or recipe.store != "sqlite":
        store = open_store(run, recipe)
        try:
            indices = store.indices()
            for done, index in enumerate(indices):
                telling(done, len(indices))
                found.group(store.groups([index])[0])
        finally:
            store.close()
    for line in _lines(sorted((run / "episodes").glob("*.jsonl")), _TRANSCRIPT):
        found.evaluated(line)
    version, kept = _kept(run / NOTES_FILE, recipe)
    return MemoryReport(
        version=version,
        kept=kept,
        episodes=found.episodes,
        writers=found.writers,
        readers=found.readers,
        evaluated=found.of_evaluations,
        evaluated_readers=found.readers_of_evaluations,
        wrong=len(found.wrong),
        examples=tuple(found.wrong[:SHOWN]),
        answers=tuple(_lines([run / ANSWERS_FILE], _ANSWER)),
    )


class _Readings:
    """What the episodes of a run were shown, group after group in the order of their indices."""

    def __init__(self, recipe: Recipe) -> None:
        self.episodes = self.writers = self.readers = self.of_evaluations = self.readers_of_evaluations = 0
        self.wrong: list[str] = []
        self._steps = StepGroups.from_config(recipe.rollout)
        self._behind = recipe.max_staleness
        self._min_score = None if recipe.memory is None else recipe.memory.min_score
        self._authors: dict[str, _Author] = {}

    def group(self, group: Group) -> None:
        step, count = self._steps.step_of(group.index), {one.episode for one in notes_to_commit(group.episodes, min_score=self._min_score)}
        for one in group.episodes:
            episode, memo = one.episode, one.episode.memory
            self.episodes += 1
            if memo is None:
                continue
            self.readers += bool(memo.read)
            authors = [(name, self._authors.get(name)) for name in memo.read]
            self.wrong += [f"{episode.id} {why}" for name, author in authors if (why := self._why(name, author, episode.task_key, step))]
            if episode.id in count:
                self.writers += 1
                knows = frozenset([episode.task_key]).union(*(author.knows for _, author in authors if author is not None))
                self._authors[episode.id] = _Author(step, knows)

    def _why(self, name: str, author: _Author | None, task_key: str, step: int) -> str:
        """What is wrong with an attempt at a task that was shown a note of this author."""
        if author is None:
            return f"was shown a note of {name}, which is no earlier training episode that counts"
        if author.step >= max(0, step - self._behind):
            return f"of step {step} was shown a note of {name}, of step {author.step}: the version that it reads ends before"
        return f"was shown a note of {name}, which may know the answer to its task" if task_key in author.knows else ""

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """A transcript of an evaluation: what it was shown is of the same evaluation and split."""
        if line["phase"] == "train" or not isinstance(memory := line.get("memory"), dict):
            return
        read = memory.get("read")
        names = [str(name) for name in read] if isinstance(read, list) else ["nobody knows whom"]
        self.of_evaluations += 1
        self.readers_of_evaluations += bool(names)
        own = f"{line['phase']}-{line['split']}-"
        self.wrong += [f"{line['task_id']} in {own[:-1]} was shown a note of {name}" for name in names if not name.startswith(own)]


def _lines(paths: Iterable[Path], required: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """The objects that the files hold, a line each. Raises `UserError` for a line that is not one with the fields that are required."""
    for path in paths:
        try:
            lines = complete_lines(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}", fix="make it readable") from None
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in required.items()):
                raise UserError(
                    f"{path}: line {number} is damaged, and what its episode was shown is not known",
                    fix="bring the file back from a copy, or delete the line to have the others judged without it",
                )
            yield found


def _kept(path: Path, recipe: Recipe) -> tuple[int, Mapping[str, tuple[int, int]]]:
    if not path.is_file() or recipe.memory is None:
        return 0, {}
    store = NoteStore(path, recipe.memory)
    try:
        return store.version, store.counts()
    finally:
        store.close()
