"""Changes the tasks of a run while it runs: adds families, and removes or reweights families, kinds and tasks.

    task_changes.jsonl   a `TaskChange` per line, appended by `agentrl tasks`
    task_starts.jsonl    a `ChangeStart` for each change, appended by the driver before the first group with the change starts

The task of a group is therefore a pure function of the seed, the group's index and the recorded changes, and a resumed run assigns the same
task to each group. A change that cannot be applied is recorded as rejected.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

from agentrl.base.files import append_lines, complete_lines, wait_for_lock
from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.errors import StoreError, UserError
from agentrl.protocols import TaskFamily
from agentrl.records import Task, codec
from agentrl.records.fields import JsonObject, Record, Text

CHANGES_FILE, STARTS_FILE = "task_changes.jsonl", "task_starts.jsonl"
MAX_WEIGHT, MIN_WEIGHT = 1000.0, 0.001
_DENOMINATOR = 1_000_000  # maximum denominator of a weight that is stored as a fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChange(Record):
    """One change to the tasks of a run."""

    action: str  # add, remove or reweight
    target: str  # family, kind or task
    name: str  # name of the family in this run, name of the kind, or id of the task
    at: str  # time of the request, UTC, ISO 8601
    weight: float = 1.0  # relative to other families, or to other tasks of its family; ignored for remove
    family: str = ""  # added family: folder of task folders, or plug-in reference
    options: JsonObject = field(default_factory=dict)  # options of an added family
    seed: int | None = None  # seed of an added family; None means the recipe's seed

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:  # also rejects NaN
            fix = "" if self.weight else "; to stop using it, remove it"
            raise ValueError(f"weight {self.weight:g} is not a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}{fix}")
        Record.__post_init__(self)
        if self.action not in ("add", "remove", "reweight") or self.target not in ("family", "kind", "task"):
            raise ValueError(f"unknown change: {self.action} {self.target}")

    @property
    def text(self) -> str:
        """The change as a phrase, such as `family chores is added with weight 2`."""
        done = {"add": "is added with weight", "reweight": "gets weight", "remove": "is removed"}[self.action]
        return f"{self.target} {self.name} {done}" + ("" if self.action == "remove" else f" {self.weight:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeStart(Record):
    """The first group to which a change applies. Groups are counted in the order in which they start, excluding extra groups."""

    sha256: str  # hash of the previous record, the change's line and the other fields
    first: int
    rejected: Text = ""  # reason why the change does not apply


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedChange:
    """A change of a run, the hash of the change's line in `task_changes.jsonl`, and the change's start.

    The start is None if no driver has applied or rejected the change.
    """

    change: TaskChange
    sha256: str
    start: ChangeStart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMix:
    """The tasks in use: the families with their shares of the groups, and the weights of kinds and tasks. Weight 0 means removed."""

    families: Mapping[str, Fraction]
    kinds: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_family(cls, name: str) -> TaskMix:
        """Returns the tasks in use in a run that has no changes."""
        return cls(families={name: Fraction(1)})

    def weight_of(self, task: Task) -> float:
        """Returns the weight of a task within its family; 0 for a removed task."""
        return self.kinds.get(task.kind, 1.0) * self.tasks.get(task.id, 1.0)

    def accepts(self, task: Task, *, seed: int, group: int, turn: int) -> bool:
        """Whether a group that has already skipped `turn` tasks uses this task. The result is deterministic."""
        if not self.kinds and not self.tasks:
            return True
        heaviest = max([1.0, *self.kinds.values()]) * max([1.0, *self.tasks.values()])
        return random.Random(f"{seed}/{group}/{turn}/mix").random() < self.weight_of(task) / heaviest

    def after(self, change: TaskChange) -> TaskMix:
        """Returns the tasks in use after a change. Raises `UserError` if the change does not fit the families in use or removes the last
        of them."""
        weight = 0.0 if change.action == "remove" else change.weight
        if change.target != "family":
            weights = {**(self.kinds if change.target == "kind" else self.tasks), change.name: weight}
            return replace(self, kinds=weights) if change.target == "kind" else replace(self, tasks=weights)
        if change.action == "add" and change.name in self.families:
            raise UserError(f"the run already has a task family {change.name}", fix="give the new one a different name: --name NAME")
        if change.action != "add" and change.name not in self.families:
            raise UserError(f"the run uses no task family {change.name}", fix=f"choose from {', '.join(self.families)}")
        families = {name: share for name, share in self.families.items() if name != change.name or weight}
        if weight:
            families[change.name] = Fraction(weight).limit_denominator(_DENOMINATOR)
        if not families:
            raise UserError(
                f"{change.name} is the last task family of the run", fix="add another family first: agentrl tasks add RUN FAMILY"
            )
        return replace(self, families=families)

    def split(self, groups: int) -> Iterator[tuple[str, int, bool]]:
        """Yields, for each family, its name, how many of the first `groups` groups use it, and whether the next group uses it."""
        rest, claimed = sum(self.families.values()), False
        for number, (name, weight) in enumerate(self.families.items(), 1):
            share = weight / rest if number < len(self.families) else Fraction(1)
            before, next_one = math.floor(groups * share), not claimed and math.floor((groups + 1) * share) > math.floor(groups * share)
            yield name, before, next_one
            claimed, groups, rest = claimed or next_one, groups - before, rest - weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Consecutive groups with the same tasks in use."""

    first: int
    mix: TaskMix
    used: Mapping[str, int]  # number of groups of each family before this segment


class TaskChanges:
    """The tasks in use for each group of a run, and the changes that have not started.

    Args:
        folder: the run folder.
        base: the recipe's family, and a change that would add this family.
        open_added: opens the family of a change. Raises `UserError`.
        position: maps the number of a group to its position in the families' schedule. The schedule skips groups reserved for practice.

    Raises `StoreError` if `task_changes.jsonl` and `task_starts.jsonl` do not match.
    """

    def __init__(
        self,
        folder: Path,
        base: tuple[TaskChange, TaskFamily],
        open_added: Callable[[TaskChange], TaskFamily],
        position: Callable[[int], int] = lambda group: group,
    ) -> None:
        self._folder, self._open, self._position = folder, open_added, position
        self._families = {base[0].name: base[1]}
        self._changes = {base[0].name: base[0]}  # the change that added each family, by name
        self._segments = [_Segment(first=0, mix=TaskMix.of_family(base[0].name), used={})]
        self._read_size, self._newest = -1, ""
        for logged in read_changes(folder):
            self._newest = self._newest if logged.start is None else logged.start.sha256
            if logged.start is not None and not logged.start.rejected:
                self._apply(logged.change, logged.start.first)

    @property
    def mix(self) -> TaskMix:
        """The tasks in use for the next group."""
        return self._segments[-1].mix

    def family(self, name: str) -> TaskFamily:
        """Returns a family that the run has used."""
        return self._families[name]

    def draw(self, position: int, group: int) -> tuple[TaskFamily, int, TaskMix]:
        """Returns the family of a group, the group's position in the family's schedule, and the weights of the family's tasks.

        Args:
            position: position of the group in the schedule of the families.
            group: number of the group; for an extra group, the number of the first group of its block.
        """
        segment = self._segments[bisect_right(self._segments, group, key=lambda segment: segment.first) - 1]
        for name, before, drawn in segment.mix.split(position - self._position(segment.first)):
            if drawn:
                return self._families[name], segment.used.get(name, 0) + before, segment.mix
        raise AssertionError("one family gets the group")

    def pending(self) -> Sequence[LoggedChange]:
        """Returns the changes that have not started."""
        try:
            size = (self._folder / CHANGES_FILE).stat().st_size
        except FileNotFoundError:
            return ()
        if size == self._read_size:
            return ()
        changes = [logged for logged in read_changes(self._folder) if logged.start is None]
        if not changes:
            self._read_size = size
        return changes

    def start(self, logged: LoggedChange, first: int) -> ChangeStart:
        """Records durably that a change applies from group `first` on, or that it is rejected. Call this method for each change in the
        order of `pending`."""
        first, rejected = max(first, self._segments[-1].first), ""
        try:
            self._apply(logged.change, first)
        except UserError as error:
            rejected = str(error)
        record = ChangeStart(sha256="", first=first, rejected=rejected)
        record = replace(record, sha256=_chain(self._newest, logged.sha256, record))
        self._newest = record.sha256
        append_lines(self._folder / STARTS_FILE, [codec.to_json(record) + b"\n"], durable=True)
        return record

    def _apply(self, change: TaskChange, first: int) -> None:
        last = self._segments[-1]
        mix = last.mix.after(change)
        if change.action == "add":
            self._add(change)
        used = dict(last.used)
        for name, before, _ in last.mix.split(self._position(first) - self._position(last.first)):
            used[name] = used.get(name, 0) + before
        if first == last.first:
            self._segments.pop()  # no group used the last segment, and each segment has all weights
        self._segments.append(_Segment(first=first, mix=mix, used=used))

    def _add(self, change: TaskChange) -> None:
        if (known := self._changes.get(change.name)) is not None:
            check_same_family(known, change)
        else:
            self._families[change.name] = self._open(change)
            self._changes[change.name] = change


def check_same_family(known: TaskChange, change: TaskChange) -> None:
    """Raises `UserError` if a change adds a different family under a name that the run has used."""
    if (known.family, known.options, known.seed) != (change.family, change.options, change.seed):
        raise UserError(
            f"the run already used a different task family with the name {change.name}",
            fix="give the new one a different name: --name NAME",
        )


def read_changes(folder: Path) -> list[LoggedChange]:
    """Returns the changes of a run in order. Raises `StoreError` if the files are damaged."""
    try:
        starts, changes = complete_lines(folder / STARTS_FILE), complete_lines(folder / CHANGES_FILE)  # each start follows its change
        started = [codec.from_json(ChangeStart, line) for line in starts]
        requested = [codec.from_json(TaskChange, line) for line in changes]
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{CHANGES_FILE} or {STARTS_FILE} in {folder} is damaged: {str(error)[:200]}\n  fix: restore both files"
        ) from error
    before = ["", *(group_start.sha256 for group_start in started)]
    hashes = [_chain(last, _hash(line), start) for last, line, start in zip(before, changes, started, strict=False)]
    if hashes != before[1:]:
        raise StoreError(f"{CHANGES_FILE} and {STARTS_FILE} in {folder} do not match\n  fix: restore both files")
    return [
        LoggedChange(change=change, sha256=_hash(line), start=start) for change, line, start in zip_longest(requested, changes, started)
    ]


@contextmanager
def changing(folder: Path) -> Iterator[Callable[[TaskChange], None]]:
    """Yields a function that appends a change durably. No other process can append a change during the block.

    Raises `UserError` if another process holds the lock for too long.
    """
    handle = os.open(folder / CHANGES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not wait_for_lock(handle, fcntl.LOCK_EX, within_s=LOCK_WAIT_S):
            raise UserError(
                f"another process is changing the tasks of {folder}", fix=f"stop it (see lsof {folder / CHANGES_FILE}), then retry"
            )
        yield lambda change: append_lines(folder / CHANGES_FILE, [codec.to_json(change) + b"\n"], durable=True)
    finally:
        os.close(handle)


def _chain(before: str, line: str, start: ChangeStart) -> str:
    """Returns the hash of a change's start. It makes damage detectable, because a damaged start would assign different tasks to groups."""
    return _hash(codec.to_json(replace(start, sha256=f"{before} {line}")))


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
