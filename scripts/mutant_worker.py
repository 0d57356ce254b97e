"""Runs tests for `mutants.py`, each time in a fork of a process that has imported the slow packages and nothing of agentrl.

Reads one JSON request per line from standard input and writes one JSON answer per line:
    {"do": "cover", "tests", "files", "limit_s"} -> {"lines": file -> line -> tests, "imported": file -> lines, "seconds", "failed"}
                                                    (line 0: the test runs code that the file's decorators generated)
    {"do": "run", "tests", "limit_s"}            -> {"passed", "killer"}

`passed`: all passed within the limit, and at least one ran. `killer`: the first that failed.

`limit_s` is CPU time, so that no mutant counts as detected because the machine is busy. The wall-clock limit is `PATIENCE` times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SLOW = ("numpy", "torch", "hypothesis", "httpx", "typer.testing", "xdist.scheduler", "rich.console", "pydantic", "jinja2", "transformers")
OPTIONS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "--hypothesis-profile=quick",
    "--hypothesis-seed=0",
    "--no-header",
    "--no-summary",
]
OPTIONS += ["-m", "not (slow or vllm or deepspeed or docker or bubblewrap or e2e or models or browser)"]


GENERATED = "0"  # the line of code that is generated at import


class Cover:
    """A pytest plugin that records which test executes which line of some files."""

    def __init__(self, files: list[str]) -> None:
        self._files = {str(Path(file).resolve()): file for file in files}
        self._test = ""
        self.lines: dict[str, dict[str, set[str]]] = {file: {} for file in files}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename in self._files:
            return self._line
        if frame.f_code.co_filename == "<string>":  # such as the `__init__` of a dataclass, whose defaults are evaluated at import
            file = self._files.get(str(frame.f_globals.get("__file__")))
            if file is not None and self._test:
                self.lines[file].setdefault(GENERATED, set()).add(self._test)
        return None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        file = self._files[frame.f_code.co_filename]
        self.lines[file].setdefault(str(frame.f_lineno), set()).add(self._test)
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test, began = item.nodeid, time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid], self._test = time.monotonic() - began, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def cover(request: Any) -> dict[str, object]:
    plugin = Cover(request["files"])
    sys.settrace(plugin.trace)  # code that runs at import belongs to no test
    threading.settrace(plugin.trace)
    code = pytest.main([*OPTIONS, *request["tests"]], plugins=[plugin])
    sys.settrace(None)
    if code not in (0, 1):
        plugin.failed.append(f"pytest ended with {code}")
    lines = {file: {line: sorted(tests - {""}) for line, tests in hits.items() if tests - {""}} for file, hits in plugin.lines.items()}
    imported = {file: [int(line) for line, tests in hits.items() if "" in tests] for file, hits in plugin.lines.items()}
    return {"lines": lines, "imported": imported, "seconds": plugin.seconds, "failed": plugin.failed}


class FirstFailure:
    """A pytest plugin that records the first test that fails."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def run(request: Any) -> dict[str, object]:
    failure = FirstFailure()
    passed = pytest.main([*OPTIONS, "-x", *request["tests"]], plugins=[failure]) == 0
    return {"passed": passed, "killer": failure.test}


PATIENCE = 10.0
PR_SET_PDEATHSIG = 1  # prctl(2)


def forked(request: Any) -> dict[str, object]:
    """The answer of a forked child in a separate process group, which is killed at the limit and after the answer."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in a separate group, it would survive the worker
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(request["limit_s"]), int(request["limit_s"]) + 1))
            silence = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silence, descriptor)
            answer.write_text(json.dumps(cover(request) if request["do"] == "cover" else run(request)))
            os._exit(0)
        deadline = time.monotonic() + PATIENCE * request["limit_s"]
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        return {"passed": False, "killer": "", "failed": ["no answer within the limit"]}


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    for name in SLOW:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.partition(".")[0] == "agentrl" for name in sys.modules), "agentrl is imported in the forked children alone"
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
