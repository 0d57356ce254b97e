"""Describes how a task folder is graded: tests, runs, mode. The description is in `Task.data["grading"]`, which stays on the host.

The four modes, from the strongest to the weakest protection against cheating:

    judge   programs under test and tests run in separate sandboxes
    pytest  the tests import the code under test, in one process
    shell   tests/test.sh starts the code under test, in one sandbox
    harbor  like shell, at Harbor's paths: /tests, /logs and the image's working directory
"""

from __future__ import annotations

import ast
import base64
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentrl.errors import TaskError
from agentrl.records import Task
from agentrl.records.fields import json_value
from agentrl.records.paths import is_plain_path

MAX_RUNS = 64
MAX_RUN_SECONDS = 300.0  # limit for all runs of a task together, which limits how long a program under test can delay the grading
MAX_TEST_SECONDS = 3600.0  # maximum deadline that a task can set for its tests
GRADING_KEY = "grading"
JUDGE_ARGUMENTS = ("outputs", "runs")

Mode = Literal["judge", "pytest", "shell", "harbor"]

SCRIPTED: tuple[Mode, ...] = ("shell", "harbor")  # modes with a single test, the script tests/test.sh


class GradingRun(BaseModel):
    """One program under test, or one call of a function in it. The host starts it and reads its results as data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name in the tests: `runs["small"]`."""
    argv: tuple[str, ...] = ()
    """Program and arguments, such as ["python3", "count.py", "--top", "3"]."""
    call: str = ""
    """A function in a Python file instead of a program, such as `count.py:top`. Its result is returned as JSON."""
    args: tuple[Any, ...] = ()
    """Arguments of the call."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the call."""
    stdin: str = ""
    """Standard input."""
    stdin_file: str = ""
    """File in tests/ that is passed as standard input."""
    files: dict[str, str] = {}
    """Hidden inputs: path in the working directory -> file in tests/."""
    reads: tuple[str, ...] = ()
    """Files that the program should write; collected after the run."""
    timeout_sec: float = Field(10.0, gt=0, le=MAX_RUN_SECONDS)
    """Deadline, after which the program is killed."""
    fresh: bool = False
    """Starts in a fresh sandbox instead of one with the files of earlier runs."""

    @field_validator("files", "reads")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        for path in value:
            if not is_plain_path(path):
                raise ValueError(f"{path!r} is not a plain path relative to the working directory")
        return value

    @field_validator("args", "kwargs")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        json_value(value)  # functions receive JSON, which has no dates, for instance
        return value

    @model_validator(mode="after")
    def _one_thing(self) -> GradingRun:
        if bool(self.argv) == bool(self.call):
            raise ValueError("needs either argv (a program) or call (a function)")
        if self.call and not (self.call.partition(":")[0].endswith(".py") and self.call.partition(":")[2].isidentifier()):
            raise ValueError("call must look like count.py:top")
        if self.call and (self.stdin or self.stdin_file):
            raise ValueError("stdin has no effect on a call; use args or kwargs")
        if self.argv and (self.args or self.kwargs):
            raise ValueError("args and kwargs have no effect on a program; use argv")
        if self.stdin and self.stdin_file:
            raise ValueError("stdin and stdin_file are mutually exclusive")
        return self


class Grading(BaseModel):
    """How a task is graded. The agent cannot see any field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode
    tests: dict[str, str]
    """Path in tests/ -> base64 of the file."""
    runs: tuple[GradingRun, ...] = Field((), max_length=MAX_RUNS)
    timeout_s: float = Field(60.0, gt=0, le=MAX_TEST_SECONDS)
    """Deadline for the tests."""
    gold: str = ""
    """Python source of the gold solution. If tests break, it is used to determine whether the task or the outputs are to blame."""

    @model_validator(mode="after")
    def _fits_together(self) -> Grading:
        names = [run.name for run in self.runs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two runs have the name {twice[0]!r}")
        if self.runs and self.mode != "judge":
            raise ValueError(f"runs have no effect with verifier.mode = {self.mode}: its tests start programs themselves")
        if sum(run.timeout_sec for run in self.runs) > MAX_RUN_SECONDS:
            raise ValueError(f"the sum of the runs' timeout_sec exceeds {MAX_RUN_SECONDS:g} s")
        for run in self.runs:
            for path in (*run.files.values(), *([run.stdin_file] if run.stdin_file else [])):
                if path not in self.tests:
                    raise ValueError(f"run {run.name!r}: there is no file tests/{path}")
        if self.mode not in SCRIPTED:
            list(self.test_names())
        elif "test.sh" not in self.tests:
            raise ValueError(f"verifier.mode = {self.mode} needs tests/test.sh")
        return self

    def files(self) -> dict[str, bytes]:
        """Returns the content of tests/: relative path -> bytes."""
        return {path: base64.b64decode(text) for path, text in self.tests.items()}

    def test_names(self) -> tuple[str, ...]:
        """Returns the names of the tests that must all pass, parsed from their source on the host. Raises `ValueError` if there are no
        tests or a test file is invalid."""
        if self.mode in SCRIPTED:
            return ("test.sh",)
        files = self.files()
        names = tuple(
            f"{path}::{name}"
            for path in sorted(files)
            if path.rpartition("/")[2].startswith("test_") and path.endswith(".py")
            for name in _tests(path, files[path], judge=self.mode == "judge")
        )
        if not names:
            raise ValueError("tests/ has no test: write tests/test_*.py with functions test_*")
        return names


def encode_files(files: dict[str, bytes]) -> dict[str, str]:
    """Encodes files for `Grading.tests`."""
    return {path: base64.b64encode(data).decode() for path, data in sorted(files.items())}


def grading_of(task: Task) -> Grading:
    """Returns the grading of a task. Raises `TaskError` if the task has no valid grading."""
    try:
        return Grading.model_validate(task.data[GRADING_KEY])
    except (KeyError, ValidationError) as error:
        raise TaskError(
            f"task {task.id}: its data has no valid grading: {error}", fix="create the task with agentrl.task.TaskFolders"
        ) from None


def _tests(path: str, source: bytes, *, judge: bool) -> Iterator[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests/{path}: {error}") from None
    except (RecursionError, MemoryError):  # the source exceeds the parser's stack
        raise ValueError(f"tests/{path}: is nested too deeply") from None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if judge and (wrong := [name.arg for name in node.args.args if name.arg not in JUDGE_ARGUMENTS]):
                raise ValueError(f"tests/{path}:{node.lineno}: {node.name} has a parameter {wrong[0]!r}; only outputs and runs are allowed")
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not judge:
            inner = [part.name for part in node.body if isinstance(part, ast.FunctionDef) and part.name.startswith("test")]
            yield from (f"{node.name}::{name}" for name in inner)
