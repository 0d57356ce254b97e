"""Runs pytest with configuration, rootdir and conftest files of the hidden tests only, and reports each test through a pipe.

python3 -I -B -c SOURCE FD FILE ...   the key is on stdin; the code under test can be imported, and comes last on the path
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TESTS, WORK = "/home/agent/tests", "/home/agent/work"


def reporter() -> Callable[[str, str], None]:
    """Returns a function that writes signed lines. Only its closure holds the key; code in the same process can dig it out."""
    key, pipe = hmac.new(sys.stdin.buffer.read(), b"", hashlib.sha256), int(sys.argv[1])
    write, dumps = os.write, json.dumps

    def report(test: str, error: str) -> None:
        text = dumps({"test": test, "error": error[-600:]}).encode()
        code = key.copy()
        code.update(text)
        write(pipe, code.hexdigest().encode() + b" " + text + b"\n")

    return report


class Reports:
    """The plugin: a test passes when its call does; every other outcome, including a skip, is an error."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.report = report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed or report.when == "call":
            error = "" if report.passed else f"{report.when} {report.outcome}: {report.longrepr}"
            self.report(report.nodeid.partition("[")[0], error)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.report(f"collecting {report.nodeid}", f"{report.longrepr}")


sys.path += [TESTS, WORK]
options = ["-q", "-p", "no:cacheprovider", f"--rootdir={TESTS}", f"--confcutdir={TESTS}", "-c", os.devnull, "--import-mode=importlib"]
sys.exit(pytest.main([*options, *(os.path.join(TESTS, name) for name in sys.argv[2:])], plugins=[Reports(reporter())]))
