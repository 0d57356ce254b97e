"""The practice of a suite: `practice.jsonl` beside its cases, a line for every task that was made from one and proven.

{"format": 1, "suite": "pricing", "family": "tables", "seed": 0, ...}              where it comes from
{"case": "join-0f3a9c", "how": "harder", "key": "9c1e...", "task": {...}}          a task
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import UserError
from agentrl.failure.case import Case
from agentrl.failure.overlap import WithheldTasks
from agentrl.records import Split, Task, codec
from agentrl.records.fields import Record

FILE = "practice.jsonl"
FORMAT = 1
_LARGEST = 512 << 20  # bytes of a file
_MAKE = "make it again: agentrl practice SUITE RECIPE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeTask(Record):
    """A task, the case that it was made from, and how it stands to that (alike, harder, easier, mutated, ...)."""

    case: str
    how: str
    task: Task
    key: str  # of the task, as it was proven


def save_practice(suite: Path, tasks: Sequence[PracticeTask], about: Mapping[str, Any]) -> Path:
    """Writes the practice of the suite in a folder, in place of what there is. Returns the file."""
    path = suite / FILE
    lines = [json.dumps({"format": FORMAT, **about}).encode(), *map(codec.to_json, tasks)]
    write_atomically(path, b"".join(line + b"\n" for line in lines), durable=True)
    return path


def load_practice(suite: Path, *, withheld: WithheldTasks | None = None, file: Path | None = None) -> tuple[PracticeTask, ...]:
    """The practice of a suite, in the order in which it was written.

    Args:
        withheld: the tasks that must not be trained on.
        file: read in place of the suite's own.

    Raises `UserError` that names the file and line: for damage, a task that was changed after its proof, one that is not for training,
    and one that is a case or a near twin of one.
    """
    path = file or suite / FILE
    try:
        head, *lines = read_bytes(path, most=_LARGEST).splitlines() or [b""]
    except FileNotFoundError:
        raise UserError(f"suite {suite} has no practice", fix=f"make some: agentrl practice {suite} RECIPE") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", fix=_MAKE) from None
    _check_head(path, head)
    found = tuple(_practiced(f"{path}, line {number}", line, withheld) for number, line in enumerate(lines, 2))
    if not found:
        raise UserError(f"{path} holds no task", fix=_MAKE)
    return found


def _check_head(path: Path, line: bytes) -> None:
    try:
        known = json.loads(line)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is no file of practice: its first line does not say its format", fix=_MAKE) from None
    if known != FORMAT:
        raise UserError(f"{path} has format {str(known)[:40]}; this version reads {FORMAT}", fix=_MAKE)


def _practiced(where: str, line: bytes, withheld: WithheldTasks | None) -> PracticeTask:
    try:
        one = codec.from_json(PracticeTask, line)
    except ValueError as error:
        raise UserError(f"{where} is no task of practice: {error}"[:2000], fix=_MAKE) from None
    if one.task.key != one.key:
        raise UserError(f"{where}: task {one.task.id!r} is not the one that was proven", fix=_MAKE)
    if one.task.split is not Split.TRAIN:
        raise UserError(f"{where}: task {one.task.id!r} is of split {one.task.split}, and never trained on", fix=_MAKE)
    if withheld is not None and (found := withheld.match(one.task)) is not None:
        case, likeness = found
        raise UserError(f"{where}: task {one.task.id!r} is the {likeness} of case {case.id}, which is measured with", fix=_MAKE)
    return one


def practice_task(case: Case, how: str, task: Task) -> PracticeTask:
    """A task of practice for a case."""
    return PracticeTask(case=case.id, how=how, task=task, key=task.key)
