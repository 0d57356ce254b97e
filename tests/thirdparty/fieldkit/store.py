"""An experience store of plain files: one per group, and one with the step that consumed each group."""

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
from agentrl.experience.late_parts import LatePart, reused_key, unknown_part
from agentrl.experience.residuals import split_group
from agentrl.records import Group, GroupUse, LateScore, LedgerEntry, PendingScore, ScoreReceipt, codec


class FolderStore:
    """An `ExperienceStore` in `folder` of the run folder. The file of a group is created atomically, with a hard link."""

    def __init__(self, run_dir: Path, recipe: Recipe, *, folder: str = "groups") -> None:
        self._folder = run_dir / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._taken = self._folder / "taken.json"
        self._late = self._folder / "late.json"  # [episode id, part, state] of each part that has arrived or expired
        self._replaced = self._folder / "replaced.json"  # key -> state of the part before a score replaced it
        self._blocks = self._folder / "blocks.json"

    def put(self, group: Group) -> bool:
        group, *residual = split_group(group)
        if residual and not self.has(group.index):
            self._path(residual[0].index).unlink(missing_ok=True)  # of a process that was killed before it stored the group
            self._link(residual[0])
        return self._link(group)

    def _link(self, group: Group) -> bool:
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

    def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        taken = self._read()
        indices = self._indices()
        parts = {index: new_entry(self._stored(index)).late_parts for index in indices}
        groups = self.groups(indices)
        some = (replace(new_entry(group), late_parts=parts[group.index], **taken.get(group.index, {})) for group in groups)
        if step is not None:
            return tuple(entry for entry in some if entry.step == step)
        return tuple(entry for entry in some if first is None or entry.index >= first or (entry.late_parts and entry.use is None))

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
                if not self.has(index) or index in taken or index in self.parked():
                    raise StoreError(f"step {step} cannot take group {index}: {taken.get(index, 'it is not there')}")
                taken[index] = {"step": step, "use": use}

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        try:
            closed = {key: part.value for key, part in self._closed().items()}
            return tuple(self._stored(index).with_parts(closed) for index in indices)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder}: {error}") from error

    def add_score(self, score: LateScore, *, now: float) -> ScoreReceipt:
        with self._changing() as taken:
            closed, key = self._closed(), (score.episode_id, score.part)
            part = closed.get(key) or next((part for group in self._all() for own, part in _parts(group) if own == key), None)
            if part is None:
                raise unknown_part(score)
            replaced = self._read_replaced()
            if score.key in replaced or any(other.key == score.key for own, other in closed.items() if own != key):
                raise reused_key(score)
            consumed = taken.get(part.group, {}).get("use") is not None
            new = part.accept(score, now=now, parked=part.group in self.parked(), consumed=consumed)
            if new:
                if part.key is not None:
                    self._write(self._replaced, replaced | {part.key: part})
                closed[key] = replace(part, value=score.value, scored_by=score.scored_by, key=score.key, closed_at=now)
                self._write(self._late, [[*own, other] for own, other in closed.items()])
            (group,) = self.groups([part.group])
            return ScoreReceipt(
                group=part.group,
                attempt=part.attempt,
                remaining=len([*group.pending]),
                repeated=not new,
                replaced=part.value if new else None,
            )

    def expire_scores(self, *, now: float) -> tuple[int, ...]:
        with self._changing():
            parts = {key: part for group in self.groups(self._indices()) for key, part in _parts(group)}
            overdue = {episode for (episode, _), part in parts.items() if part.expires_at is not None and part.expires_at <= now}
            closed = self._closed() | {key: replace(part, closed_at=now) for key, part in parts.items() if key[0] in overdue}
            self._write(self._late, [[*key, part] for key, part in closed.items()])
            return tuple(sorted({part.group for key, part in parts.items() if key[0] in overdue}))

    def pending_scores(self, *, limit: int, after: str = "") -> tuple[PendingScore, ...]:
        some = {}
        for group in self.groups(self._indices()):
            for (episode, name), part in _parts(group):
                shown = {"group": part.group, "attempt": part.attempt, "low": part.low, "high": part.high, "expires_at": part.expires_at}
                some[episode, name] = PendingScore(episode_id=episode, part=name, task_id=group.task_id, **shown)
        episodes = sorted({episode for episode, _ in some if episode > after})[:limit]
        return tuple(some[key] for key in sorted(some) if key[0] in episodes)

    def parked(self) -> tuple[int, ...]:
        return tuple(group.index for group in self.groups(self._indices()) if [*group.pending])

    def start_block(self, block: int, version: int) -> None:
        with self._changing():
            self._write(self._blocks, {block: version} | self.block_versions())

    def block_versions(self) -> dict[int, int]:
        known = json.loads(self._blocks.read_text()) if self._blocks.exists() else {}
        return {int(block): version for block, version in known.items()}

    def _stored(self, index: int) -> Group:
        return codec.from_json(Group, self._path(index).read_bytes())

    def _indices(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*[0-9].json"))

    def _all(self) -> Iterator[Group]:
        return map(self._stored, self._indices())

    def _closed(self) -> dict[tuple[str, str], LatePart]:
        known = json.loads(self._late.read_text()) if self._late.exists() else []
        return {(episode, part): LatePart(**state) for episode, part, state in known}

    def _read_replaced(self) -> dict[str, Any]:
        return dict(json.loads(self._replaced.read_text())) if self._replaced.exists() else {}

    def _write(self, path: Path, content: Any) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(codec.to_json(content))
        part.replace(path)

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
            self._write(self._taken, taken)

    def _read(self) -> dict[int, dict[str, Any]]:
        data = json.loads(self._taken.read_text()) if self._taken.exists() else {}
        return {int(index): {"step": known["step"], "use": known["use"] and GroupUse(**known["use"])} for index, known in data.items()}


def _parts(group: Group) -> Iterator[tuple[tuple[str, str], LatePart]]:
    """Yields (episode id, part) and the state of each part that a group waits for."""
    for attempt, scored, part in group.pending:
        state = LatePart(group=group.index, attempt=attempt, low=part.low, high=part.high, expires_at=part.expires_at)
        yield (scored.episode.id, part.name), state
