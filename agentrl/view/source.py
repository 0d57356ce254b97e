"""Reads one run for the pages: metrics, ledger, groups and vocabulary. A file that has changed is read again, even while the run is in
progress.

A note describes each part that is missing, damaged or from an older version. All other parts are shown. Memory is bounded: one decoded
group, one vocabulary and the newest columns of metrics stay in memory.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import RLock
from typing import ClassVar

from agentrl.config.recipe import Recipe, build
from agentrl.errors import StoreError, UserError
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.reading import StoreReader
from agentrl.observe.rundata import Line, read_object
from agentrl.observe.tails import MetricsTable, TaskTable, read_new_lines
from agentrl.records import Group
from agentrl.view.vocabulary import Vocabulary, read_vocabulary

MAX_RECIPE = 1 << 20
_GROUPS_KEPT = 2
_KEPT_TOKENS = 200_000  # maximum number of tokens in a group that stays in memory


class Missing(UserError):
    """A run, group, episode or turn does not exist, or was removed."""


class RunSource:
    """The content of one run folder. Hold `lock` while you use it, because several threads read it."""

    _groups: ClassVar[OrderedDict[tuple[Path, int, tuple[int, ...]], Group]] = OrderedDict()  # cached groups of all runs
    _vocabularies: ClassVar[OrderedDict[tuple[Path, int, int], Vocabulary]] = OrderedDict()
    _shared = RLock()

    def __init__(self, path: Path, *, run_id: str, name: str) -> None:
        self.path, self.id, self.name = path, run_id, name
        self.lock = RLock()
        self.metrics = MetricsTable(path / "metrics.jsonl")
        self.tasks = TaskTable(path / "tasks.jsonl")
        self._store: tuple[StoreReader, tuple[int, int]] | None = None  # reader, device and inode of the file
        self._index: EpisodeIndex | None = None
        self._recipe: tuple[object, Line, Recipe | None, str] | None = None

    def refresh(self) -> list[str]:
        """Reads the lines that were added to the files of metrics and tasks.

        Returns notes about files that cannot be read. Raises `Missing` if the folder was removed.
        """
        if not self.path.is_dir():
            raise Missing(f"the run {self.name} was removed or renamed", fix="return to the list of runs")
        notes: list[str] = []
        for table in (self.metrics, self.tasks):
            read_new_lines(table, notes)
        return notes

    def recipe_data(self) -> Line:
        """Returns the content of recipe.json; empty if it cannot be read."""
        return self._read_recipe()[1]

    def recipe(self) -> tuple[Recipe | None, str]:
        """Returns the recipe, or None and the reason why it cannot be used. Does not import the code that the recipe names."""
        _, _, recipe, why = self._read_recipe()
        return recipe, why

    def store(self) -> StoreReader:
        """Returns the reader of the store, which is opened on first use. Raises `StoreError` if there is no readable store."""
        path = self.path / "experience.sqlite"
        try:
            status = os.stat(path)
            file = (status.st_dev, status.st_ino)
        except OSError:
            self.close()
            raise StoreError(f"{self.name} has no stored groups yet: experience.sqlite does not exist") from None
        if self._store is None or self._store[1] != file:
            self.close()
            self._store = StoreReader(path), file
        return self._store[0]

    def index(self) -> EpisodeIndex:
        """Returns the index of episodes, which is opened on first use. Raises `UserError` if the run has no index, and `StoreError` if
        there is no readable store."""
        self.store()  # closes the index if the file was replaced
        if self._index is None:
            self._index = EpisodeIndex(self.path)
        return self._index

    def group(self, index: int) -> Group:
        """Returns a group. Raises `Missing` if the group is not stored, and `StoreError` if it cannot be read."""
        store = self.store()
        entry = store.entry(index)
        if entry is None:
            raise Missing(f"group {index} is not stored", fix="return to the step: groups are numbered from 0")
        key = (self.path, index, (entry.pending, entry.late_parts))
        with self._shared:
            group = self._groups.pop(key, None)
            if group is None:
                self._groups.clear()  # before the next group is decoded
                (group,) = store.groups((index,))
            if entry.tokens_sampled <= _KEPT_TOKENS:
                self._groups[key] = group
                while len(self._groups) > _GROUPS_KEPT:
                    self._groups.popitem(last=False)
            return group

    def vocabulary(self) -> tuple[Vocabulary | None, str]:
        """Returns the vocabulary of the run's model, or None and the reason why there is none.

        Files outside the run folder are not read.
        """
        why = "the run folder has no tokenizer.json, so tokens are shown as numbers"
        for path in (self.path / "versions" / "000000" / "tokenizer.json", self.path / "model" / "tokenizer.json"):
            try:
                status = os.stat(path)
                key = (path, status.st_mtime_ns, status.st_size)
                with self._shared:
                    if (known := self._vocabularies.get(key)) is None:
                        self._vocabularies.clear()
                        known = self._vocabularies[key] = read_vocabulary(path, inside=self.path)
                return known, ""
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                why = f"{path.relative_to(self.path)} {_reason(error)}, so tokens are shown as numbers"
        return None, why

    def close(self) -> None:
        """Closes the store and its index."""
        if self._store is not None:
            self._store[0].close()
            self._store = None
        if self._index is not None:
            self._index.close()
            self._index = None

    def _read_recipe(self) -> tuple[object, Line, Recipe | None, str]:
        path = self.path / "recipe.json"
        try:
            status = os.stat(path)
            mark: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            mark = None
        if self._recipe is None or self._recipe[0] != mark:
            notes: list[str] = []
            data = read_object(path, notes, most=MAX_RECIPE) if mark else {}
            recipe, why = None, "; ".join(notes) or ("" if data else "the run has no recipe.json")
            if data:
                try:
                    recipe = build(data)
                except (UserError, ValueError, RecursionError) as error:
                    why = f"recipe.json belongs to a different version of agentrl: {str(error).splitlines()[0][:200]}"
            self._recipe = (mark, data, recipe, why)
        return self._recipe


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:300]
