"""An experience store of plain files: one for each group, and one that says which step took which."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config import Recipe
from agentrl.errors import StoreError
from agentrl.experience import new_entry
from agentrl.records import Group, GroupUse, LedgerEntry, codec


class FolderStore:
    """An `ExperienceStore` in `folder` of the run folder. A group's file appears whole or not at all, by a hard link."""

    def __init__(self, run_dir: Path, recipe: Recipe, *, folder: str = "groups") -> None:
        self._folder = run_dir / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._taken = self._folder / "taken.json"

    def put(self, group: Group) -> bool:
        part = self._folder / f".{group.index}.{os.getpid()}.{time.monotonic_ns()}.part"
        with part.open("wb") as file:
            file.write(codec.to_json(group))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, self._path(group.index))
            return True
        except FileExistsError:
            return False
        finally:
            part.unlink()

    def has(self, index: int) -> bool:
        return self._path(index).exists()

    def entries(self, *, first: int = 0, step: int | None = None) -> tuple[LedgerEntry, ...]:
        taken = self._read()
        indices = sorted(int(path.stem) for path in self._folder.glob("[0-9]*.json"))
        some = (replace(new_entry(group), **taken.get(group.index, {})) for group in self.groups(indices))
        return tuple(entry for entry in some if (entry.index >= first if step is None else entry.step == step))

    def assign(self, step: int, indices: Sequence[int]) -> None:
        with self._changing() as taken:
            unused = {index: known["step"] for index, known in taken.items() if known["use"] is None and known["step"] >= step}
            if {index for index, taker in unused.items() if taker == step} != set(indices):
                for index in unused:
                    del taken[index]
        self._take(step, dict.fromkeys(indices))

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        self._take(step, uses)

    def reconcile(self, consumed: Mapping[int, Mapping[int, GroupUse]]) -> None:
        with self._changing() as taken:
            later = {index: known | {"use": None} for index, known in taken.items() if known["step"] > max(consumed, default=-1)}
            taken.clear()
            taken |= later
            for step, uses in consumed.items():
                taken |= {index: {"step": step, "use": use} for index, use in uses.items()}

    def _take(self, step: int, uses: Mapping[int, GroupUse | None]) -> None:
        with self._changing() as taken:
            for index in [index for index, known in taken.items() if known == {"step": step, "use": None}]:
                del taken[index]
            for index, use in uses.items():
                if not self.has(index) or index in taken:
                    raise StoreError(f"step {step} cannot take group {index}: {taken.get(index, 'it is not there')}")
                taken[index] = {"step": step, "use": use}

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        try:
            return tuple(codec.from_json(Group, self._path(index).read_bytes()) for index in indices)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder}: {error}") from error

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:06d}.json"

    @contextmanager
    def _changing(self) -> Iterator[dict[int, dict[str, Any]]]:
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken = self._read()
            yield taken
            part = self._taken.with_suffix(".part")
            part.write_bytes(codec.to_json(taken))
            part.replace(self._taken)

    def _read(self) -> dict[int, dict[str, Any]]:
        known = json.loads(self._taken.read_text()) if self._taken.exists() else {}
        return {int(index): {"step": one["step"], "use": one["use"] and GroupUse(**one["use"])} for index, one in known.items()}
