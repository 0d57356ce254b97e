"""Whether a task is one that a suite holds, or nearly: what is measured with must not be trained on.

Two foldings of a text: runs of white space become one space, and case goes; then ids become `#`. An id is a word of letters and
figures, with hyphens and underscores or without: `order-10432`, `T0017`, `sales_7`, a UUID, a hash. A number or a date is none: it is
what a question is about.

    SAME    the tasks have one key; or one prompt (by roles and folded texts), the same tools, and the same files by names and folded
            texts. Names, split, limits, verifiers and even the truth may differ.
            Tasks without files in different images are the same only where their answers are, too: the image may hold what is asked.
    TWIN    prompts that are equal once ids are folded, files that are alike, and the same truth, ids told by their places; or prompts that
            are equal with their ids, and files that are alike, whatever the truth.

Files are alike when both tasks have none, or when at least `MIN_SHARED_LINES` of the lines of both, ids folded, are common to them
(Jaccard's index of the multisets; a binary file is one line). So a question of the same words about other files is neither: that is a
neighbour, which one may learn from."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.failure.case import Case, load_suite
from agentrl.records import Task

MIN_SHARED_LINES = 0.9
_ID = re.compile(r"\b(?=[a-z_-]{0,64}\d)(?=[\d_-]{0,64}[a-z])[a-z\d]+(?:[_-][a-z\d]+)*\b")


class Overlap(StrEnum):
    """How a task stands to one of a suite."""

    SAME = "same"
    TWIN = "twin"


def normalize_text(text: str) -> str:
    """White space and case folded."""
    return " ".join(text.split()).casefold()


def normalize_ids(text: str) -> str:
    """White space, case and ids folded."""
    return _ID.sub("#", normalize_text(text))


def overlap_of(case: Task, task: Task) -> Overlap | None:
    """What a task is to the task of a case; None when it may be trained on."""
    if case.key == task.key:
        return Overlap.SAME
    if not _one_world(case, task):
        return None
    if _prompt(case, normalize_text) == _prompt(task, normalize_text) and case.tools == task.tools and _files(case) == _files(task):
        return Overlap.SAME
    if _prompt(case, normalize_ids) != _prompt(task, normalize_ids) or not _files_alike(case, task):
        return None
    return Overlap.TWIN if _prompt(case, normalize_text) == _prompt(task, normalize_text) or _truth(case) == _truth(task) else None


class WithheldTasks:
    """The tasks of some suites. Asking about a task takes time proportional to its prompt, unless a case has one like it."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.cases = tuple(cases)
        self._by_prompt: dict[str, list[tuple[Task, Case]]] = {}
        for case in self.cases:
            for task in (case.task, case.original):
                if task is not None:
                    self._by_prompt.setdefault(_digest(task), []).append((task, case))

    def __len__(self) -> int:
        return len(self.cases)

    def match(self, task: Task) -> tuple[Case, Overlap] | None:
        """The case that a task is the same as, else one that it is a twin of; None for a task that may be trained on."""
        twin = None
        for known, case in self._by_prompt.get(_digest(task), ()) if self._by_prompt else ():
            found = overlap_of(known, task)
            if found is Overlap.SAME:
                return case, found
            if found is not None and twin is None:
                twin = case, found
        return twin

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and self.match(task) is not None


def load_withheld(suites: Sequence[str | Path], *, root: Path) -> WithheldTasks:
    """The tasks of suites, folders relative to `root`. Raises `UserError` for one that is none."""
    return WithheldTasks(case for suite in suites for case in load_suite(root / suite).cases)


def _prompt(task: Task, folded: Callable[[str], str]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, folded(message.content)) for message in task.prompt)


def _digest(task: Task) -> str:
    """Equal for tasks whose prompts are equal once ids are folded, which both kinds of likeness ask for."""
    return hashlib.sha256(repr(_prompt(task, normalize_ids)).encode("utf-8", "replace")).hexdigest()


def _one_world(one: Task, other: Task) -> bool:
    """Whether prompt and files tell all of what two tasks are about. Where the image holds the rest, it must be one, or the answer."""
    if one.sandbox.image == other.sandbox.image or one.files or one.binary_files or other.files or other.binary_files:
        return True
    return "answer" in one.data and one.data["answer"] == other.data.get("answer")


def _files(task: Task) -> dict[str, str]:
    return {path: normalize_text(text) for path, text in task.files.items()} | dict(task.binary_files)


def _files_alike(one: Task, other: Task) -> bool:
    mine, theirs = _file_lines(one), _file_lines(other)
    every = (mine | theirs).total()
    return every == 0 or (mine & theirs).total() >= MIN_SHARED_LINES * every


def _file_lines(task: Task) -> Counter[str]:
    texts = [normalize_ids(line) for text in task.files.values() for line in text.split("\n") if line.strip()]
    return Counter([*texts, *task.binary_files.values()])


def _truth(task: Task) -> str:
    """What is right: the answer where the task has one, else all that it keeps from the agent. An id is told by its place among those of
    prompt and files; one that an answer is made of, and that they do not hold, stays: it was worked out, as 0x2f is."""
    truth: Any = task.data.get("answer", dict(task.data))
    text = normalize_text(json.dumps(truth, sort_keys=True, ensure_ascii=False))
    if not _ID.search(text):
        return text
    seen: dict[str, int] = {}
    for words in (*(message.content for message in task.prompt), *(task.files[path] for path in sorted(task.files))):
        for found in _ID.finditer(normalize_text(words)):
            seen.setdefault(found[0], len(seen))
    worked_out = "answer" in task.data
    return _ID.sub(lambda found: f"#{seen[found[0]]}" if found[0] in seen else found[0] if worked_out else "#", text)
