"""An experience store of plain files: one for each group, and one that says which step consumed which."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.config import Recipe
from agentrl.errors import StoreError
from agentrl.records import Group, codec


class FolderStore:
    """An `ExperienceStore` in `folder` of the run folder. A group's file appears whole or not at all, by a hard link."""

    def __init__(self, run_dir: Path, recipe: Recipe, *, folder: str = "groups") -> None:
        self._folder = run_dir / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._consumed = self._folder / "consumed.json"

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

    def take(self, step: int, indices: Sequence[int], *, timeout_s: float) -> tuple[Group, ...]:
        deadline = time.monotonic() + timeout_s
        while missing := [index for index in indices if not self.has(index)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step}: groups {missing} are missing after {timeout_s:g} s")
            time.sleep(0.02)
        return self.groups(indices)

    def commit(self, step: int, indices: Sequence[int], checkpoint: str) -> None:
        with self._changing() as consumed:
            for index in indices:
                if not self.has(index) or str(index) in consumed:
                    raise StoreError(f"step {step} cannot consume group {index}: {consumed.get(str(index), 'it is not there')}")
            consumed |= {str(index): step for index in indices}

    def reconcile(self, consumed: Mapping[int, Sequence[int]]) -> None:
        with self._changing() as known:
            known.clear()
            known |= {str(index): step for step, indices in consumed.items() for index in indices}

    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(int(path.stem) for path in self._folder.glob("[0-9]*.json")))

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
    def _changing(self) -> Iterator[dict[str, Any]]:
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            consumed = json.loads(self._consumed.read_text()) if self._consumed.exists() else {}
            yield consumed
            part = self._consumed.with_suffix(".part")
            part.write_text(json.dumps(consumed))
            part.replace(self._consumed)
