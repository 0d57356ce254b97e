"""Runs hidden tests on the results of programs under test, in a sandbox that never executes such a program.

    python3 -I -B -c SOURCE   in the working directory, with tests/, outputs/ and runs/ in it; the first line of stdin is a secret

Standard library only, Python 3.9 or later. Tests are the functions `test_*` of tests/test_*.py, with parameters `outputs` and `runs`.
Each line of the report starts with the secret; output of the tests goes to stderr. The tests are loaded before any of the agent's files
is read, so the agent cannot affect whether they load.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

HOME = "/home/agent"
LONGEST = 600


class Files:
    """Files by path, read on access.

    `files[path]` is bytes, `text(path)` a string, `json(path)` a JSON value. A missing file fails the test.
    """

    def __init__(self, folder: str, what: str) -> None:
        self.folder, self.what = folder, what
        self.names = sorted(os.path.relpath(os.path.join(top, name), folder) for top, _, names in os.walk(folder) for name in names)

    def __contains__(self, path: str) -> bool:
        return path in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, path: str) -> bytes:
        if path not in self.names:
            raise AssertionError(f"there is no {self.what} {path}")
        with open(os.path.join(self.folder, path), "rb") as file:
            return file.read()

    def text(self, path: str) -> str:
        """Returns the file as UTF-8 text."""
        try:
            return self[path].decode()
        except UnicodeDecodeError as error:
            raise AssertionError(f"{path} is not UTF-8: {error}") from None

    def json(self, path: str) -> Any:
        """Returns the file as a JSON value."""
        return parsed(self.text(path), path)


class Run:
    """Results of one run: `exit` (None if it was killed because of `reason`), `stdout`, `stderr`, `files`, and the printed JSON `value`."""

    def __init__(self, number: int, fields: dict[str, Any]) -> None:
        self.name, self.exit, self.reason = fields["name"], fields["exit"], fields["reason"]
        self.stdout, self.stderr, self.truncated = fields["stdout"], fields["stderr"], fields["truncated"]
        self.files = Files(os.path.join(HOME, "runs", str(number)), f"file of run {self.name}:")

    @property
    def value(self) -> Any:
        """Returns the JSON value on stdout. Fails the test if the run did not exit with 0."""
        assert self.exit == 0, f"run {self.name}: exit {self.exit} {self.reason} {self.stderr[-300:]}"
        return parsed(self.stdout, f"the output of run {self.name}")

    @property
    def error(self) -> str:
        """The last line of stderr, which contains the type and the message of a Python exception."""
        return str((self.stderr.strip().splitlines() or [""])[-1])


def parsed(text: str, what: str) -> Any:
    """Returns the JSON value of a string. Fails the test if the string is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AssertionError(f"{what} is not JSON: {error}") from None


def load(path: str) -> dict[str, Callable[..., None]]:
    """Returns a mapping name -> test function for one test file."""
    name = os.path.basename(path)[: -len(".py")]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return {key: value for key, value in vars(module).items() if key.startswith("test") and inspect.isfunction(value)}


def collect(folder: str) -> dict[str, Callable[..., None]]:
    """Returns a mapping name -> test function for all test files."""
    sys.path.append(folder)
    tests: dict[str, Callable[..., None]] = {}
    for top, _, names in os.walk(folder):
        for name in sorted(names):
            if name.startswith("test_") and name.endswith(".py"):
                path = os.path.join(top, name)
                tests.update({f"{os.path.relpath(path, folder)}::{key}": value for key, value in load(path).items()})
    return tests


def explain(error: BaseException) -> str:
    """Returns the error as text, with the line of the test file that failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(HOME)]
    where = f"line {frames[-1].lineno}: {frames[-1].line}  " if frames else ""
    return f"{where}{type(error).__name__}: {error}"[:LONGEST]


def main() -> None:
    """Loads the tests, runs them, and prints one line for each test."""
    secret = sys.stdin.readline().strip()
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(fields: dict[str, Any]) -> None:
        report.write(f"{secret} {json.dumps(fields)}\n")
        report.flush()

    tests = collect(os.path.join(HOME, "tests"))
    say({"loaded": sorted(tests)})
    with open(os.path.join(HOME, "runs", "results.json"), encoding="utf-8") as file:
        runs = {fields["name"]: Run(number, fields) for number, fields in enumerate(json.load(file))}
    given: dict[str, Any] = {"outputs": Files(os.path.join(HOME, "outputs"), "output"), "runs": runs}
    for name, test in tests.items():
        call = functools.partial(test, **{key: given[key] for key in inspect.signature(test).parameters})
        try:
            call()
        except BaseException as error:  # a test fails if it ends with any exception
            say({"test": name, "error": explain(error)})
        else:
            say({"test": name, "error": ""})


main()
