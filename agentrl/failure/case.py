"""Regression cases and suites. A case is a frozen task that a policy once failed, with its origin. A suite is a folder of cases.

    evals/pricing/suite.toml           name, note, default policy, and number of attempts at each case
    evals/pricing/cases/0f3a9c.json    a case

A case's task includes its verifiers, image and limits, so attempts at the case are scored as in training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files
from agentrl.base.error_text import reason_text
from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import UserError
from agentrl.failure.trace import Tag
from agentrl.records import EpisodeState, Task, codec
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.records.fields import Record, Text

FORMAT = 1
MAX_REPEATS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,80}")
_SETTINGS = "suite.toml"
_MAX_BYTES = 16 << 20  # maximum bytes of one case
_PROMOTE = "promote failures: agentrl failures promote RUN --into SUITE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Record):
    """The scores of one policy on a case: of the policy that failed the case, or of a policy whose scores were pinned later."""

    model: str
    version: int | None = None  # policy version in its run; None means unknown
    scores: tuple[float | None, ...] = ()  # one per attempt; None means unscored
    at: str = ""  # UTC, ISO 8601

    @property
    def mean(self) -> float | None:
        """The mean score of the scored attempts; None if no attempt is scored."""
        scored = [score for score in self.scores if score is not None]
        return sum(scored) / len(scored) if scored else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Record):
    """A regression case: `Case(id="0f3a9c", task=task, trace="run:g000012-3-a0")`."""

    id: str
    task: Task
    trace: str = ""  # id of the trace from which it was promoted
    tags: tuple[Tag, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    note: Text = ""  # why it was promoted
    by: str = ""  # who promoted it
    threshold: float | None = None  # mean score that its attempts must reach; None means the evaluation's threshold
    repeats: int | None = None  # attempts in one evaluation; None means the suite's number
    baseline: Baseline | None = None
    start: EpisodeState | None = None  # state before the turn at which the case starts; None means that it starts with the task
    original: Task | None = None  # the task before it was minimized; it is withheld from training too
    format: int = FORMAT

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not _NAME.fullmatch(self.id):
            raise ValueError(f"Case.id {self.id[:80]!r} is not a valid name: use letters, digits, dots, dashes and underscores")
        if self.format != FORMAT:
            raise ValueError(f"Case.format {self.format} is not known; this version reads {FORMAT}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"Case.threshold must be a finite number, got {self.threshold}")
        if self.repeats is not None and not 1 <= self.repeats <= MAX_REPEATS:
            raise ValueError(f"Case.repeats must be from 1 to {MAX_REPEATS}, got {self.repeats}")
        if self.start is not None and (self.start.task_key != self.task.key or len(self.start.trajectories) != 1):
            raise ValueError("Case.start belongs to a different task, or has several trajectories")

    @property
    def key(self) -> str:
        """Content hash (sha256, hex) of the task and the state at which the case starts."""
        if self.start is None:
            return self.task.key
        return hashlib.sha256(f"{self.task.key} ".encode() + codec.to_json(self.start)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The cases in a folder, ordered by id."""

    folder: Path
    name: str
    repeats: int = 1  # attempts at each case in one evaluation
    note: str = ""
    policy: str = ""  # default policy: RUN@VERSION or a model folder, relative to the project; empty means none
    cases: tuple[Case, ...] = ()


def load_suite(folder: Path) -> Suite:
    """Reads a suite. If the suite is invalid, raises a `UserError` that names the file and describes the problem."""
    _check_folder(folder)
    settings = _settings(folder / _SETTINGS)
    cases = tuple(_case(path) for path in sorted((folder / "cases").glob("*.json")))
    if not cases:
        raise UserError(f"suite {folder} has no cases", fix=_PROMOTE)
    return Suite(folder=folder, cases=cases, **settings)


def load_suites(folder: Path) -> tuple[Suite, ...]:
    """Reads the suite in a folder, or the suites in its subfolders by name. Raises `UserError` if there is none or one is invalid."""
    _check_folder(folder)
    if (folder / _SETTINGS).is_file():
        return (load_suite(folder),)
    suites = sorted(path.parent for path in folder.glob(f"*/{_SETTINGS}"))
    if not suites:
        raise UserError(f"{folder} is not a suite and contains no suites: no {_SETTINGS} was found", fix=_PROMOTE)
    return tuple(map(load_suite, suites))


def load_case(folder: Path, name: str) -> tuple[Suite, Case]:
    """Returns the suite in a folder and its case with the id `name`. Raises `UserError` if the suite is invalid or has no such case."""
    suite = load_suite(folder)
    for case in suite.cases:
        if case.id == name:
            return suite, case
    raise UserError(f"suite {folder} has no case {name[:80]!r}", fix=f"use one of the cases in {folder / 'cases'}")


def own_threshold(task: Task) -> float | None:
    """Returns the pass threshold that a task declares; None if it is missing or the default, so that the evaluation's applies."""
    return None if task.pass_threshold == PASS_THRESHOLD else task.pass_threshold


def check_attempt_options(*, repeats: int | None, threshold: float | None) -> None:
    """Raises `UserError` if the number of attempts is out of range or the threshold is not finite."""
    if repeats is not None and not 1 <= repeats <= MAX_REPEATS:
        raise UserError(f"--repeats {repeats} is out of range", fix=f"give a number from 1 to {MAX_REPEATS}")
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold {threshold} is not a finite number", fix="give the mean score to reach, such as 0.75")


def save_case(folder: Path, case: Case) -> Path:
    """Adds a case to the suite in `folder`, or replaces the case with the same id. Returns the case's file.

    Creates the suite if it does not exist. Raises `UserError` if the case is too large to be read back, or if the name of a new suite
    contains a character that is not printable.
    """
    settings, path, text = folder / _SETTINGS, folder / "cases" / f"{case.id}.json", codec.to_json(case)
    name = _folder_name(folder)
    if len(text) > _MAX_BYTES:
        problem = f"case {case.id} has {len(text) >> 20} MiB; the limit is {_MAX_BYTES >> 20} MiB"
        raise UserError(problem, fix="use smaller files in the task, or remove files")
    if (new := not settings.exists()) and not name.isprintable():  # TOML forbids some of these characters
        problem = f"the name {name!a} of a new suite contains a character that is not printable"
        raise UserError(problem, fix="use a folder whose name has only printable characters")
    path.parent.mkdir(parents=True, exist_ok=True)
    if new:
        write_atomically(settings, f"name = {json.dumps(name, ensure_ascii=False)}\nrepeats = 1\n", durable=True)
    write_atomically(path, text, durable=True)
    return path


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", fix="give the folder of a suite, which contains suite.toml and cases/")


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = untrusted_files.loads(read_bytes(path, most=_MAX_BYTES, inside=path.parent).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a suite: it has no {path.name}", fix="use a folder with suite.toml and cases/") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_text(error)}", fix="a suite.toml contains name, repeats, note and policy") from None
    known = {"name": str, "repeats": int, "note": str, "policy": str}
    for key, value in settings.items():
        if key not in known or type(value) is not known[key]:
            fix = "name, note and policy must be strings, and repeats an integer"
            raise UserError(f"{path}: {key} = {value!r} is not a valid setting", fix=fix)
    if not 1 <= settings.get("repeats", 1) <= MAX_REPEATS:
        raise UserError(f"{path}: repeats = {settings['repeats']} is out of range", fix=f"give a number from 1 to {MAX_REPEATS}")
    return {"name": _folder_name(path.parent), **settings}


def _folder_name(folder: Path) -> str:
    """Returns the name of a folder, also for `.` and `..`. Does not follow links."""
    return os.path.basename(os.path.abspath(folder))


def _case(path: Path) -> Case:
    try:
        case = codec.from_json(Case, read_bytes(path, most=_MAX_BYTES, inside=path.parent.parent))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a case: {reason_text(error)}"[:2000], fix="move it out of the folder, or promote the failure again"
        ) from None
    if case.id != path.stem:
        raise UserError(f"{path} has the wrong name: it contains case {case.id}", fix=f"rename it to {case.id}.json")
    return case
