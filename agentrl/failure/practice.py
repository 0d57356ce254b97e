"""Practice: training tasks derived from the cases of a suite, stored in `practice.jsonl` in its folder, and mixed into a run's schedule.

{"format": 1, "suite": "pricing", "family": "tables", "seed": 0, ...}              settings
{"case": "join-0f3a9c", "how": "harder", "key": "9c1e...", "task": {...}}          a task

`agentrl.check.practice` generates and proves the tasks. No practice task is a case or a near duplicate of a case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from agentrl.base.error_text import reason_text
from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.config.tasks import TasksConfig
from agentrl.errors import TaskError, UserError
from agentrl.failure.case import Case
from agentrl.failure.overlap import WithheldTasks
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task, codec
from agentrl.records.fields import Record
from agentrl.task import gold_of

FILE = "practice.jsonl"
FORMAT = 1
MUTATED = "mutated"
_MAX_BYTES = 512 << 20  # maximum bytes of a file
_FIX = "generate it again: agentrl practice SUITE RECIPE"
_NUMBER = re.compile(r"(?<![\w.:/-])[0-9]+(?:\.[0-9]+)?(?![\w:/-]|\.\w)")  # a separate number: not part of an id, date or time
_UNKNOWN = "\x00the answer is not known\x00"
_DRAWS = 20  # attempts to draw a copy that differs from the task


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeTask(Record):
    """A task, the case from which it was derived, and its relation to the case (alike, harder, easier, mutated, ...)."""

    case: str
    how: str
    task: Task
    key: str  # key of the task that was proven


def practice_task(case: Case, how: str, task: Task) -> PracticeTask:
    """Returns a `PracticeTask` for a task that was derived from a case."""
    return PracticeTask(case=case.id, how=how, task=task, key=task.key)


def save_practice(suite: Path, tasks: Sequence[PracticeTask], about: Mapping[str, Any]) -> Path:
    """Writes the practice tasks of the suite in a folder, replacing an existing file. Returns the file's path."""
    path = suite / FILE
    lines = [json.dumps({"format": FORMAT, **about}).encode(), *map(codec.to_json, tasks)]
    write_atomically(path, b"".join(line + b"\n" for line in lines), durable=True)
    return path


def load_practice(suite: Path, *, withheld: WithheldTasks | None = None, file: Path | None = None) -> tuple[PracticeTask, ...]:
    """Returns the practice tasks of a suite, in the order of the file.

    Args:
        withheld: the tasks that must not be trained on.
        file: the file to read; None means the suite's file.

    Raises `UserError` if the file is missing or damaged or has no tasks, or if a task was changed after it was proven, is not for training,
    or overlaps with a withheld task.
    """
    path = file or suite / FILE
    try:
        head, *lines = read_bytes(path, most=_MAX_BYTES).splitlines() or [b""]
    except FileNotFoundError:
        raise UserError(f"suite {suite} has no practice tasks", fix=f"generate them: agentrl practice {suite} RECIPE") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason_text(error)}", fix=_FIX) from None
    try:
        known = json.loads(head)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a practice file: its first line has no format", fix=_FIX) from None
    if known != FORMAT:
        raise UserError(f"{path} has format {str(known)[:40]}; this version reads {FORMAT}", fix=_FIX)
    tasks = tuple(_parse(f"{path}, line {number}", line, withheld) for number, line in enumerate(lines, 2))
    if not tasks:
        raise UserError(f"{path} contains no tasks", fix=_FIX)
    return tasks


@dataclass(frozen=True, slots=True)
class PracticeSchedule:
    """Assigns the practice tasks of weighted suites to a share of all groups. The result depends only on the seed and the group index.

    Of the first `n` groups, `floor(n * share)` are practice groups, evenly spread. Suites take turns in proportion to their weights. The
    tasks of a suite are shuffled in each epoch with a generator derived from the seed.
    """

    tasks: Sequence[Sequence[Task]]  # [suite][task]
    weights: Sequence[int]  # [suite]
    share: Fraction
    seed: int
    _round: list[tuple[int, int]] = field(default_factory=list, repr=False)  # (suite, number of its earlier turns in the round)

    def __post_init__(self) -> None:
        turns = sorted(((turn + 0.5) / weight, suite) for suite, weight in enumerate(self.weights) for turn in range(weight))
        seen = [0] * len(self.weights)
        for _, suite in turns:
            self._round.append((suite, seen[suite]))
            seen[suite] += 1

    def practice_groups_before(self, group_index: int) -> int:
        """Returns the number of practice groups among the groups before `group_index`."""
        return group_index * self.share.numerator // self.share.denominator

    def task_of_group(self, group_index: int) -> Task | None:
        """Returns the practice task of a group, or None if the group belongs to the family's schedule."""
        number = self.practice_groups_before(group_index)
        if self.practice_groups_before(group_index + 1) == number:
            return None
        rounds, turn = divmod(number, len(self._round))
        suite, before = self._round[turn]
        tasks = self.tasks[suite]
        epoch, position = divmod(rounds * self.weights[suite] + before, len(tasks))
        order = list(range(len(tasks)))
        Random(f"practice:{self.seed}:{suite}:{epoch}").shuffle(order)
        return tasks[order[position]]


def open_practice(
    config: TasksConfig, *, seed: int, root: Path, withheld: WithheldTasks, files: Mapping[str, Path] = MappingProxyType({})
) -> PracticeSchedule:
    """Loads the practice tasks that a recipe uses, and returns their schedule. Raises the same errors as `load_practice`.

    Args:
        files: suite -> file to read instead of the suite's file.
    """
    tasks = [
        [drawn_task.task for drawn_task in load_practice(root / suite, withheld=withheld, file=files.get(suite))]
        for suite in config.practice
    ]
    return PracticeSchedule(tasks, tuple(config.practice.values()), Fraction(config.practice_share).limit_denominator(1000), seed)


def gold_without_answer(family: TaskFamily, task: Task) -> str:
    """Returns the task's gold program, which computes the answer from the files.

    Raises `TaskError` if the program depends on the answer, or if the task's answer is missing or not a string.
    """
    fix = "add a method `variants` to its family"
    if not isinstance(task.data.get("answer"), str):
        raise TaskError(f"task {task.id!r} has no answer in its data that could be recomputed", fix=fix)
    program = gold_of(family, task)
    if program != gold_of(family, replace(task, data={**task.data, "answer": _UNKNOWN})):
        raise TaskError(f"task {task.id!r}: its gold solution depends on the answer, so it cannot compute a different one", fix=fix)
    return program


def mutate_task(task: Task, *, seed: int) -> Iterator[Task]:
    """Yields copies of a task with different numbers in its files, for families without variants.

    The answers of the copies must be recomputed. Numbers that occur in the prompt or the task's data are not changed, and equal numbers
    stay equal in all files. The copies depend only on the task's content and the seed. The iterator ends after 20 successive draws that
    change nothing. So it is empty if there is no number to change, and in practice endless otherwise.
    """
    about = [*(message.content for message in task.prompt), *(repr(value) for key, value in task.data.items() if key != "answer")]
    fixed = set(_NUMBER.findall(" ".join(about).replace("'", " ").replace(",", " ")))
    unchanged = 0
    for number in count():
        other = _other_numbers(Random(f"mutant:{task.key}:{seed}:{number}"), fixed)
        files = {path: _NUMBER.sub(other, text) for path, text in task.files.items()}
        unchanged = unchanged + 1 if files == dict(task.files) else 0
        if unchanged == _DRAWS:
            return
        if not unchanged:
            yield replace(task, id=f"mutant-{task.key[:16]}-{seed}-{number}", files=files, split=Split.TRAIN)


def _parse(where: str, line: bytes, withheld: WithheldTasks | None) -> PracticeTask:
    try:
        one = codec.from_json(PracticeTask, line)
    except ValueError as error:
        raise UserError(f"{where} is not a practice task: {error}"[:2000], fix=_FIX) from None
    if one.task.key != one.key:
        raise UserError(f"{where}: task {one.task.id!r} differs from the task that was proven", fix=_FIX)
    if one.task.split is not Split.TRAIN:
        raise UserError(f"{where}: task {one.task.id!r} belongs to split {one.task.split}, which is never used for training", fix=_FIX)
    if withheld is not None and (match := withheld.match(one.task)) is not None:
        case, overlap = match
        raise UserError(f"{where}: task {one.task.id!r} overlaps ({overlap}) with case {case.id}, on which the run is evaluated", fix=_FIX)
    return one


def _other_numbers(rng: Random, fixed: set[str]) -> Callable[[re.Match[str]], str]:
    """Returns a function that replaces a number with a random number of the same length.

    Equal numbers receive the same replacement, and different numbers receive different replacements, even if few numbers are free.
    """
    replacements: dict[str, str] = {number: number for number in fixed}
    taken = set(fixed)

    def other(match: re.Match[str]) -> str:
        number = match.group()
        if number not in replacements:
            while (drawn := _draw(rng, number)) in taken:  # ends, because only numbers with the same form are replaced with its draws
                pass
            replacements[number] = drawn
            taken.add(drawn)
        return replacements[number]

    return other


def _draw(rng: Random, number: str) -> str:
    """Returns a random number of the same form: the same length, position of the point, and a leading zero if there is one."""
    digits = [str(rng.randint(0, 9)) if sign.isdigit() else sign for sign in number]
    digits[0] = str(rng.randint(1, 9)) if number[0] != "0" else "0"
    return "".join(digits)
