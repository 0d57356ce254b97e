"""Finds tasks that overlap with the cases in suites, so that no run trains on tasks on which it is evaluated.

Text is compared in two normal forms. The first form ignores case and extra white space. The second form also replaces ids with `#`. An id
is a word with both letters and digits, optionally with hyphens and underscores: `order-10432`, `T0017`, a UUID, a hash. Numbers and dates
are not ids.

    SAME    equal keys; or equal prompts (roles and normalized texts), tools and files (names and normalized texts). Id, split, limits,
            verifiers and truth may differ. If the images differ and there are no files, the answers must also be equal.
    TWIN    similar files, and equal prompts, even if the truths differ; or similar files, prompts that are equal up to ids, and equal
            truths (ids numbered by first occurrence).

Files are similar if neither task has any, or if the tasks share at least `MIN_SHARED_LINES` of their lines (Jaccard index of multisets,
ids replaced; a binary file counts as one line). A task with the same question about different files does not overlap, so a run may train
on it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.base.files import append_lines, json_line, read_json_lines
from agentrl.failure.case import Case, load_suite
from agentrl.records import Task

log = logging.getLogger(__name__)

MIN_SHARED_LINES = 0.9
FILE = "withheld.jsonl"
_ID = re.compile(r"\b(?=[a-z_-]{0,64}\d)(?=[\d_-]{0,64}[a-z])[a-z\d]+(?:[_-][a-z\d]+)*\b")


class Overlap(StrEnum):
    """How a task overlaps with a case."""

    SAME = "same"
    TWIN = "twin"


def normalize_text(text: str) -> str:
    """Returns the case-folded text with each run of white space replaced by one space."""
    return " ".join(text.split()).casefold()


def normalize_ids(text: str) -> str:
    """Returns the result of `normalize_text` with ids replaced by `#`."""
    return _ID.sub("#", normalize_text(text))


def overlap_of(case: Task, task: Task) -> Overlap | None:
    """Returns how a task overlaps with the task of a case, or None if a run may train on it."""
    if case.key == task.key:
        return Overlap.SAME
    if not _comparable(case, task):
        return None
    equal_prompts = _prompt(case, normalize_text) == _prompt(task, normalize_text)
    if equal_prompts and case.tools == task.tools and _files(case) == _files(task):
        return Overlap.SAME
    if _prompt(case, normalize_ids) != _prompt(task, normalize_ids):
        return None
    mine, theirs = _file_lines(case), _file_lines(task)
    if (mine & theirs).total() < MIN_SHARED_LINES * (mine | theirs).total():
        return None
    return Overlap.TWIN if equal_prompts or _truth(case) == _truth(task) else None


class WithheldTasks:
    """The tasks in suites, which are withheld from training.

    The time that `match` takes is proportional to the length of the prompt, unless a case has a similar prompt.
    """

    def __init__(self, cases: Iterable[Case]) -> None:
        self.cases = tuple(cases)
        self._by_prompt: dict[str, list[tuple[Task, Case]]] = {}
        for case in self.cases:
            for task in (case.task, case.original):
                if task is not None:
                    self._by_prompt.setdefault(_prompt_digest(task), []).append((task, case))

    def __len__(self) -> int:
        return len(self.cases)

    def match(self, task: Task) -> tuple[Case, Overlap] | None:
        """Returns a case that overlaps with a task, preferably with the overlap `SAME`, and the kind of overlap; None if there is none."""
        twin = None
        for known, case in self._by_prompt.get(_prompt_digest(task), ()) if self._by_prompt else ():
            overlap = overlap_of(known, task)
            if overlap is Overlap.SAME:
                return case, overlap
            if overlap is not None and twin is None:
                twin = case, overlap
        return twin

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and self.match(task) is not None


def load_withheld(suites: Sequence[str | Path], *, root: Path) -> WithheldTasks:
    """Loads the cases of suites, whose folders are relative to `root`, as tasks to withhold.

    Raises `UserError` if a folder is not a valid suite.
    """
    return WithheldTasks(case for suite in suites for case in load_suite(root / suite).cases)


class WithholdingLog:
    """Wraps `WithheldTasks` and records each matching task once in `withheld.jsonl` in a run folder."""

    def __init__(self, run_dir: Path, withheld: WithheldTasks) -> None:
        self._path, self._withheld = run_dir / FILE, withheld
        self._recorded = {line["task_key"] for line in read_json_lines(self._path, "task_key")}

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, Task) or (match := self._withheld.match(task)) is None:
            return False
        if task.key not in self._recorded:
            self._recorded.add(task.key)
            case, overlap = match
            line = {"task_id": task.id, "task_key": task.key, "case": case.id, "likeness": str(overlap)}
            append_lines(self._path, [json_line(line)])
            log.info("task %s is withheld from training: it overlaps (%s) with case %s", task.id, overlap, case.id)
        return True


def count_withheld(run_dir: Path) -> int:
    """Returns the number of training tasks that a run withheld."""
    return len({line["task_key"] for line in read_json_lines(run_dir / FILE, "task_key")})


def _prompt(task: Task, normalize: Callable[[str], str]) -> tuple[tuple[str, str], ...]:
    spec = task.environment
    environment = () if spec is None else (("environment", f"{spec.ref} {spec.seed} {json.dumps(dict(spec.options), sort_keys=True)}"),)
    return (*((message.role, normalize(message.content)) for message in task.prompt), *environment)


def _prompt_digest(task: Task) -> str:
    """Returns a hash that is equal for tasks whose prompts are equal up to ids. Tasks with different hashes do not overlap."""
    return hashlib.sha256(repr(_prompt(task, normalize_ids)).encode("utf-8", "replace")).hexdigest()


def _comparable(one: Task, other: Task) -> bool:
    """Whether comparing the prompts and files of two tasks is enough to find an overlap.

    If neither task has files, the tasks must have the same image or the same answer.
    """
    images = {"" if task.sandbox is None else task.sandbox.image for task in (one, other)}
    if len(images) == 1 or one.files or one.binary_files or other.files or other.binary_files:
        return True
    return "answer" in one.data and one.data["answer"] == other.data.get("answer")


def _files(task: Task) -> dict[str, str]:
    return {path: normalize_text(text) for path, text in task.files.items()} | dict(task.binary_files)


def _file_lines(task: Task) -> Counter[str]:
    lines = [normalize_ids(line) for text in task.files.values() for line in text.split("\n") if line.strip()]
    return Counter([*lines, *task.binary_files.values()])


def _truth(task: Task) -> str:
    """Returns the answer or, if there is none, all of the task's data, in a normal form that is equal for twins.

    Each id is replaced by its number in the order of first occurrence in the prompt and the files. An id that occurs in neither, such as
    0x2f, is kept if it is part of an answer, because the answer was computed.
    """
    truth: Any = task.data.get("answer", dict(task.data))
    text = normalize_text(json.dumps(truth, sort_keys=True, ensure_ascii=False))
    if not _ID.search(text):
        return text
    numbers: dict[str, int] = {}
    for content in (*(message.content for message in task.prompt), *(task.files[path] for path in sorted(task.files))):
        for match in _ID.finditer(normalize_text(content)):
            numbers.setdefault(match[0], len(numbers))
    computed = "answer" in task.data
    return _ID.sub(lambda match: f"#{numbers[match[0]]}" if match[0] in numbers else match[0] if computed else "#", text)
