"""Runs pytest with only the configuration, rootdir and conftest files of the hidden tests, and reports each test through a pipe.

    python3 -I -B -c SOURCE FD FILE ...   the key is on stdin; the code under test can be imported and comes last on the path

The code under test shares this process. After every test, this module checks objects that such code can easily change: functions and
classes of pytest, unittest, builtins and common modules, the tests' own code, and trace functions. It also looks for new classes whose
instances compare equal to several different objects. Any difference fails the test.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import hmac
import importlib
import json
import os
import sys
import unittest.mock
from pathlib import Path

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

TESTS, WORK = "/home/agent/tests", "/home/agent/work"
CHANGING = ("_", "_getini_unknown_type")  # names whose values change in normal operation
OF_TESTS = ("pytest", "_pytest", "pluggy", "unittest")
COMMON = "operator json math re collections functools itertools decimal fractions statistics string copy pathlib os io csv datetime random"


def reporter() -> Callable[[str, str], None]:
    """Returns a function that writes signed lines. Only its closure holds the key, but code in the same process can extract it."""
    key, pipe = hmac.new(sys.stdin.buffer.read(), b"", hashlib.sha256), int(sys.argv[1])
    write, dumps = os.write, json.dumps

    def report(test: str, error: str) -> None:
        text = dumps({"test": test, "error": error[-600:]}).encode()
        code = key.copy()
        code.update(text)
        write(pipe, code.hexdigest().encode() + b" " + text + b"\n")

    return report


def equality_check() -> Callable[[type, Any], bool]:
    """Returns a function that checks whether an instance of a class equals several different objects, or an object that it has never
    seen."""
    nothing, size = NotImplemented, len
    makers = (int, float, str, bytes, list, tuple, dict, set, object)
    missing = object()
    samples = (missing, 7919, -1, 0.5, "a text", b"bytes", [1], (2,), {"a": 3}, {4})

    def equals(kind: type, compare: Any) -> bool:
        blanks: list[Any] = [None]
        for maker in makers:
            try:
                blanks.append(maker.__new__(kind))
                break
            except BaseException:  # a different base class, or not constructible
                continue
        for blank in blanks:
            equal = []
            for sample in samples:
                try:
                    is_equal = compare(None, sample) if blank is None else blank == sample
                    if is_equal is not nothing and is_equal:
                        equal.append(sample)
                except BaseException:  # not comparable with this sample
                    continue
            if size(equal) > 1 or (equal and equal[0] is missing):
                return True
        return False

    return equals


def guard() -> Callable[[], str]:
    """Returns a function whose result describes changes by the code under test; "" if there are none.

    The function uses no name that the code under test can replace.
    """
    listed, sort, function_type, text, get = list, type, type(guard), str, getattr
    objects, known = gc.get_objects, {id(kind) for kind in gc.get_objects() if isinstance(kind, type)}
    traced, profiled = sys.gettrace, sys.getprofile
    missing, proxy, equals = object(), unittest.mock.MagicProxy, equality_check()

    def parts(module: ModuleType) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
        for owner in (
            module,
            *(value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__),
        ):
            for name, value in list(vars(owner).items()):
                if callable(value) and name not in CHANGING:
                    yield vars(owner), name, value, getattr(value, "__code__", None)

    common = [importlib.import_module(name) for name in COMMON.split()]
    watched = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] in OF_TESTS]
    before = [part for module in (builtins, *common, *watched) for part in parts(module)]

    def changed() -> str:
        for owner, name, value, code in before:
            if owner.get(name, missing) is not value or (sort(value) is function_type and value.__code__ is not code):
                return f"{name} of pytest or Python was replaced during the tests"
        if traced() is not None or profiled() is not None:
            return "the tests are traced"
        for function in listed(objects()):
            if (
                sort in sort(function).__mro__ and id_of(function) not in known and "__eq__" in function.__dict__
            ):  # a class with any metaclass
                compare = function.__dict__["__eq__"]
                of_tests = text(get(get(compare, "__code__", None), "co_filename", "")).startswith(TESTS)
                if not of_tests and sort(compare) is not proxy and equals(function, compare):  # a comparison would call a mock
                    return f"instances of {text(function.__qualname__)} are equal to different things"
        return ""

    id_of = id
    return changed


class Reports:
    """The pytest plugin.

    A test passes if its call phase passes and no change is detected. Every other outcome, including a skip, is an error.
    """

    def __init__(self, report: Callable[[str, str], None], changed: Callable[[], str]) -> None:
        self.report, self.changed = report, changed
        self.called: set[str] = set()
        self.tests: list[tuple[Any, Any]] = []  # each test's function, and its code

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Records the code object of each test, to detect replaced tests."""
        functions = [item.function for item in session.items if isinstance(item, pytest.Function)]
        self.tests = [(function, function.__code__) for function in functions if hasattr(function, "__code__")]

    def wrong(self) -> str:
        """Returns the changes that the code under test made, or "" if there are none."""
        if any(function.__code__ is not code for function, code in self.tests):
            return "a test was replaced during the tests"
        return self.changed()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Reports the test, immediately if it failed, otherwise after its teardown."""
        test = report.nodeid.partition("[")[0]
        if not report.passed:
            self.report(test, f"{report.when} {report.outcome}: {report.longrepr}")
        elif report.when == "call":
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self.called:  # the test's patches have been undone
            self.report(test, self.wrong())

    def pytest_sessionfinish(self) -> None:
        """Reports changes that happened after the last test."""
        if error := self.wrong():
            self.report("the process of the tests", error)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Reports test files that cannot be collected."""
        if not report.passed:
            self.report(f"collecting {report.nodeid}", f"{report.longrepr}")


sources = [os.path.join(TESTS, name) for name in sys.argv[2:]]
if not any(b"ANY" in Path(path).read_bytes() for path in sources):
    anything: Any = unittest.mock._ANY
    anything.__eq__ = object.__eq__  # the code under test could return ANY, and no test uses it
sys.path += [TESTS, WORK]
options = ["-q", "-p", "no:cacheprovider", f"--rootdir={TESTS}", f"--confcutdir={TESTS}", "-c", os.devnull, "--import-mode=importlib"]
sys.exit(pytest.main([*options, *sources], plugins=[Reports(reporter(), guard())]))
