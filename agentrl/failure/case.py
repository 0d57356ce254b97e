"""A regression case: a task that a policy once failed, frozen, with where it comes from. A suite is a folder of them.

    evals/pricing/suite.toml           what the suite is for, and how often each case is tried
    evals/pricing/cases/0f3a9c.json    a case

Each task names its verifiers, image and limits itself, so a case is judged as training is.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base import toml
from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import UserError
from agentrl.failure.trace import Tag
from agentrl.records import EpisodeState, Task, codec
from agentrl.records.fields import Record, Text

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,80}")
_SETTINGS = "suite.toml"
_LARGEST = 16 << 20  # bytes of one case
MAX_REPEATS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Record):
    """What a policy scored at a case once: the one that failed it, or the one that the case was pinned to later."""

    model: str
    version: int | None = None  # of its run; None: not known
    scores: tuple[float | None, ...] = ()  # of its attempts; None: unscored
    at: str = ""  # when, UTC, ISO 8601

    @property
    def mean(self) -> float | None:
        """Of the attempts that have a score."""
        scored = [score for score in self.scores if score is not None]
        return sum(scored) / len(scored) if scored else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Record):
    """One case: `Case(id="0f3a9c", task=task, trace="run:g000012-3-a0")`."""

    id: str
    task: Task
    trace: str = ""  # the trace that it was promoted from
    tags: tuple[Tag, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    note: Text = ""  # why it is kept
    by: str = ""  # who promoted it
    threshold: float | None = None  # the mean score that its attempts must reach; None: the evaluation's
    repeats: int | None = None  # attempts at it in one evaluation; None: the suite's
    baseline: Baseline | None = None
    start: EpisodeState | None = None  # the episode as it was before the turn that the case begins at; None: it begins with the task
    original: Task | None = None  # the task before it was made smaller, which must not be trained on either
    format: int = FORMAT

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not _NAME.fullmatch(self.id):
            raise ValueError(f"Case.id {self.id[:80]!r} is no name: letters, digits, dots, dashes, underscores")
        if self.format != FORMAT:
            raise ValueError(f"Case.format {self.format} is not known; this version reads {FORMAT}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"Case.threshold must be a finite number, got {self.threshold}")
        if self.repeats is not None and not 1 <= self.repeats <= MAX_REPEATS:
            raise ValueError(f"Case.repeats must be from 1 to {MAX_REPEATS}, got {self.repeats}")
        if self.start is not None and (self.start.task_key != self.task.key or len(self.start.trajectories) != 1):
            raise ValueError("Case.start is a state of another task, or of several trajectories")

    @property
    def key(self) -> str:
        """Content hash (sha256, hex) of what is asked: the task, and where it begins."""
        if self.start is None:
            return self.task.key
        return hashlib.sha256(f"{self.task.key} ".encode() + codec.to_json(self.start)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The cases of a folder, by id, in the order of their ids."""

    folder: Path
    name: str
    repeats: int = 1  # attempts at each case in one evaluation
    note: str = ""
    policy: str = ""  # default policy: RUN@VERSION or a model folder, relative to the project; empty means none
    cases: tuple[Case, ...] = ()


def load_suite(folder: Path) -> Suite:
    """Reads a suite. Raises `UserError` that names the file and what is wrong with it."""
    _check_folder(folder)
    settings = _settings(folder / _SETTINGS)
    cases = tuple(_case(path) for path in sorted((folder / "cases").glob("*.json")))
    if not cases:
        raise UserError(f"suite {folder} has no cases", fix="promote some: agentrl failures promote RUN --into SUITE")
    return Suite(folder=folder, cases=cases, **settings)


def load_suites(folder: Path) -> tuple[Suite, ...]:
    """The suite in a folder, or all suites in a folder of them, by name. Raises `UserError` where there is none."""
    _check_folder(folder)
    if (folder / _SETTINGS).is_file():
        return (load_suite(folder),)
    inside = sorted(path.parent for path in folder.glob(f"*/{_SETTINGS}"))
    if not inside:
        raise UserError(
            f"{folder} is no suite, and holds none: no {_SETTINGS}", fix="promote failures: agentrl failures promote RUN --into SUITE"
        )
    return tuple(map(load_suite, inside))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}", fix="give the folder of a suite: one that holds suite.toml and cases/")


def load_case(folder: Path, name: str) -> tuple[Suite, Case]:
    """The suite in a folder, and the case of this id in it. Raises `UserError` where there is none."""
    suite = load_suite(folder)
    found = next((case for case in suite.cases if case.id == name), None)
    if found is None:
        raise UserError(f"suite {folder} has no case {name[:80]!r}", fix=f"its cases are the files in {folder / 'cases'}")
    return suite, found


def check_attempt_options(*, repeats: int | None, threshold: float | None) -> None:
    """Raises `UserError` for a number of attempts, or a threshold, that no evaluation can use."""
    if repeats is not None and not 1 <= repeats <= MAX_REPEATS:
        raise UserError(f"--repeats {repeats}", fix=f"give a number from 1 to {MAX_REPEATS}")
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold {threshold}", fix="give the mean score to be reached, such as 0.75")


def save_case(folder: Path, case: Case) -> Path:
    """Adds a case to the suite in `folder`, made where there is none; a case of this id is replaced. Returns the case's file.

    Raises `UserError` for a case that is too large to be read again.
    """
    about, path, text = folder / _SETTINGS, folder / "cases" / f"{case.id}.json", codec.to_json(case)
    if len(text) > _LARGEST:
        raise UserError(
            f"case {case.id} has {len(text) >> 20} MiB; at most {_LARGEST >> 20} are kept", fix="give its task smaller files, or none"
        )
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    if not about.exists():
        write_atomically(about, f'name = "{folder.name}"\nrepeats = 1\n', durable=True)
    write_atomically(path, text, durable=True)
    return path


def _settings(path: Path) -> dict[str, Any]:
    try:
        tables = toml.loads(read_bytes(path, most=_LARGEST, inside=path.parent).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no suite: it has no {path.name}", fix="give a folder that holds suite.toml and cases/") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}", fix="a suite.toml holds name, repeats, note and policy") from None
    known = {"name": str, "repeats": int, "note": str, "policy": str}
    for key, value in tables.items():
        if key not in known or type(value) is not known[key]:
            raise UserError(
                f"{path}: {key} = {value!r} is not a valid setting", fix="name, note and policy are texts, repeats a whole number"
            )
    if not 1 <= tables.get("repeats", 1) <= MAX_REPEATS:
        raise UserError(f"{path}: repeats = {tables['repeats']}", fix=f"give a number from 1 to {MAX_REPEATS}")
    return {"name": path.parent.name, **tables}


def _case(path: Path) -> Case:
    try:
        case = codec.from_json(Case, read_bytes(path, most=_LARGEST, inside=path.parent.parent))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no case: {error}"[:2000], fix="move it away, or promote the failure again") from None
    if case.id != path.stem:
        raise UserError(f"{path} says it is case {case.id}", fix=f"name it {case.id}.json")
    return case
