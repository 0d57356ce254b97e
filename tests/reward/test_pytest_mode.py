"""Cheats against grading in mode `pytest`: the common ones score 0, and those that the mode cannot stop are counted.

docs/security.md states both numbers. The mode is unsafe for training, which `agentrl check` says; mode `judge` stops all of them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.check.access import prove_separation
from agentrl.check.report import CheckReport, render
from agentrl.protocols import SandboxBackend
from agentrl.sandbox import select_backend
from tests.reward.test_cleanroom import (
    BOTH,
    CODE,
    DOUBLE,
    GOLD,
    ROOT,
    START_FILES,
    gather_limited,
    in_mode,
    score,
    task,
    with_short_deadline,
)

WRONG = "def double(n):\n    return 0\n"
FIND = """
import gc
def found(kind, name):
    return next((one for one in gc.get_objects() if type(one).__name__ == kind and getattr(one, "__name__", "") == name), None)
"""
CLOSED: dict[str, str] = {
    "an equality that looks at the kind": (
        "class X(int):\n    def __eq__(s, o): return isinstance(o, int)\n    __hash__ = None\ndef double(n): return X()\n"
    ),
    "an equality that says 1": "class X:\n    def __eq__(s, o): return 1\n    __hash__ = None\ndef double(n): return X()\n",
    "an equality that wants an instance": (
        "class X:\n    def __eq__(s, o): return s is not None\n    __hash__ = None\ndef double(n): return X()\n"
    ),
    "an equality by a callable": (
        "class Eq:\n    def __call__(s, *o): return True\nclass X:\n    __eq__ = Eq()\n    __hash__ = None\ndef double(n): return X()\n"
    ),
    "an equality by a partial": (
        "import functools\nclass X:\n    __eq__ = functools.partialmethod(lambda s, o: True)\n    __hash__ = None\n"
        "def double(n): return X()\n"
    ),
    "an equality set later": (
        "class X(int): pass\ndef double(n):\n    X.__eq__ = lambda s, o: True\n    X.__hash__ = None\n    return X()\n"
    ),
    "an equality of a text": "class X(str):\n    def __eq__(s, o): return True\n    __hash__ = None\ndef double(n): return X()\n",
    "a class made by a metaclass": (
        "class M(type):\n    def __new__(m, n, b, d):\n        d['__eq__'] = lambda s, o: True\n        return type.__new__(m, n, b, d)\n"
        "class X(metaclass=M): pass\ndef double(n): return X()\n"
    ),
    "a mock that is equal to everything": (
        "from unittest.mock import MagicMock\ndef double(n):\n    m = MagicMock()\n    m.__eq__.return_value = True\n    return m\n"
    ),
    "replaces the tests' code": (
        "import sys\ndef double(n):\n    for m in list(sys.modules.values()):\n        for f in list(vars(m).values()) if m else ():\n"
        "            if getattr(f, '__name__', '').startswith('test_') and hasattr(f, '__code__'):\n"
        "                f.__code__ = (lambda: None).__code__\n    return 8\n"
    ),
    "replaces the tests' code, found by gc": (
        FIND + "def double(n):\n    for name in ('test_double', 'test_more'):\n"
        "        found('function', name).__code__ = (lambda: None).__code__\n"
        "    return 8\n"
    ),
    "traces the tests": (
        "import sys\ndef trace(frame, event, arg):\n    if frame.f_code.co_name.startswith('test_'): frame.f_trace_lines = False\n"
        "    return trace\nsys.settrace(trace)\ndef double(n): return 2 * n\n"
    ),
    "profiles the tests": "import sys\nsys.setprofile(lambda *a: None)\ndef double(n): return 2 * n\n",
    "replaces operator.eq": "import operator\noperator.eq = lambda a, b: True\ndef double(n): return 2 * n\n",
    "replaces json.loads": "import json\njson.loads = lambda *a, **k: 0\ndef double(n): return 2 * n\n",
    "replaces math.isclose": "import math\nmath.isclose = lambda *a, **k: True\ndef double(n): return 2 * n\n",
    "replaces re.match": "import re\nre.match = re.fullmatch = lambda *a: True\ndef double(n): return 2 * n\n",
    "replaces a builtin": "import builtins\nbuiltins.abs = lambda n: 0\ndef double(n): return 2 * n\n",
    "replaces the hook caller of pluggy": (
        "import sys\nsys.modules['pluggy._hooks'].HookCaller.__call__ = lambda s, **k: []\ndef double(n): return 0\n"
    ),
    "replaces the repr of assertions": (
        "import sys\nm = sys.modules.get('_pytest.assertion.rewrite')\n"
        "m._call_reprcompare = lambda *a: ''\nm._saferepr = lambda o: ''\ndef double(n): return 0\n"
    ),
    "leaves by pytest.exit": "import pytest\ndef double(n): pytest.exit('done', returncode=0)\n",
    "skips the test": "import pytest\ndef double(n): pytest.skip('later')\n",
    "skips the module": "import pytest\npytest.skip('later', allow_module_level=True)\n",
    "expects to fail": "import pytest\ndef double(n): pytest.xfail('known')\n",
    "marks the tests": "import pytest\npytestmark = pytest.mark.skip\n" + WRONG,
    "raises KeyboardInterrupt": "def double(n): raise KeyboardInterrupt\n",
    "raises SystemExit": "def double(n): raise SystemExit(0)\n",
    "raises GeneratorExit": "def double(n): raise GeneratorExit\n",
    "exits from another thread": "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()\n" + WRONG,
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "executes another program in its place": "import os\nos.execv('/bin/true', ['true'])\n",
    "recurses without end": "def double(n): return double(n)\n",
    "sleeps": "import time\ndef double(n): time.sleep(60)\n",
    "returns what cannot be compared": (
        "class X:\n    def __eq__(s, o): raise AssertionError\n    __hash__ = None\ndef double(n): return X()\n"
    ),
    "returns a coroutine": "async def double(n): return 2 * n\n",
    "prints a summary": "import sys\ndef double(n):\n    print('2 passed in 0.01s')\n    sys.__stdout__.write('2 passed')\n    return 0\n",
    "writes a report in every pipe": (
        "import os\ndef double(n):\n    for fd in range(3, 64):\n"
        '        try: os.write(fd, b\'{"test": "test_it.py::test_double", "error": ""}\\n\')\n'
        "        except OSError: pass\n    return 0\n"
    ),
}
OPEN: dict[str, str] = {
    "reads the expected values": (
        "import re\ntext = open('/home/agent/tests/test_it.py').read()\n"
        "known = {int(a): int(b) for a, b in re.findall(r'double\\((-?\\d+)\\) == (-?\\d+)', text)}\n"
        "def double(n): return known[n]\n"
    ),
    "reads the expected value in the caller's frame": (
        "import linecache, sys\ndef double(n):\n    frame = sys._getframe(1)\n"
        "    return int(linecache.getline(frame.f_code.co_filename, frame.f_lineno).rpartition('==')[2])\n"
    ),
    "an equality that goes when it was used": (
        "def double(n):\n    class X:\n        def __eq__(s, o):\n            del X.__eq__\n            return True\n"
        "        __hash__ = None\n    return X()\n"
    ),
    "an equality that asks who compares": (
        "import sys\nclass X:\n    def __eq__(s, o): return sys._getframe(1).f_code.co_name.startswith('test_')\n    __hash__ = None\n"
        "def double(n): return X()\n"
    ),
    "silences the guard": FIND
    + (
        "def double(n):\n    for one in gc.get_objects():\n        if type(one).__name__ == 'Reports':\n"
        "            one.changed = lambda: ''\n            one.tests = []\n"
        "    class X:\n        def __eq__(s, o): return True\n        __hash__ = None\n    return X()\n"
    ),
    "signs reports of its own": (
        "import gc, os\ndef double(n):\n    for one in gc.get_objects():\n"
        "        if type(one).__name__ == 'function' and 'pipe' in one.__code__.co_freevars:\n"
        "            for name in ('test_double', 'test_more'): one('test_it.py::' + name, '')\n    os._exit(0)\n"
    ),
}
STATEMENT = re.compile(r"[Oo]f (\d+) cheats in mode `pytest`, (\d+) score 0 and (\d+) score 1")


@pytest.fixture(params=BOTH)
async def sandboxes(request: Any) -> AsyncIterator[SandboxBackend]:
    backend = select_backend(request.param, run_label="test", root=ROOT)
    yield backend
    await backend.close()


async def outcomes(cheats: dict[str, str], sandboxes: SandboxBackend) -> dict[str, float | None]:
    graded_task, name = in_mode("pytest")
    graded_task = await with_short_deadline(graded_task, 6.0, {name: DOUBLE.encode()}, sandboxes)
    results = await gather_limited({cheat: score(graded_task, {name: code.encode()}, sandboxes) for cheat, code in cheats.items()})
    return {cheat: result.value for cheat, result in results.items()}


async def test_common_cheats_score_0(sandboxes: SandboxBackend) -> None:
    assert await outcomes(CLOSED, sandboxes) == dict.fromkeys(CLOSED, 0.0)


async def test_known_cheats_that_the_mode_cannot_stop(sandboxes: SandboxBackend) -> None:
    """If a cheat scores 0 here, move it to the other list and correct the page."""
    assert await outcomes(OPEN, sandboxes) == dict.fromkeys(OPEN, 1.0)


async def test_mode_judge_also_stops_those(sandboxes: SandboxBackend) -> None:
    graded_task, name = in_mode("judge")
    results = await gather_limited({cheat: score(graded_task, {name: code.encode()}, sandboxes) for cheat, code in OPEN.items()})
    assert {cheat: result.value for cheat, result in results.items()} == dict.fromkeys(OPEN, 0.0)


async def test_honest_code_and_tests_are_not_reported_as_cheats_in_mode_pytest(sandboxes: SandboxBackend) -> None:
    """Classes with custom equality, mocks, and tests that patch something."""
    code = """
from dataclasses import dataclass
@dataclass
class Pair:
    one: int
class Own:
    def __eq__(self, other): return isinstance(other, Own)
    __hash__ = None
def double(n): return 2 * n
"""
    tests = """
from unittest.mock import ANY, Mock
from twice import Own, Pair, double
def test_a(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("builtins.input", lambda: "3")
    assert double(int(input())) == 6 and Pair(1) == Pair(1) and Own() == Own()
def test_b():
    assert [double(2), Mock()] == [4, ANY]
"""
    graded_task = task("pytest", ("twice.py",), tests={"test_it.py": tests}, gold=GOLD.replace("code.py", "twice.py"))
    right = await score(graded_task, {"twice.py": code.encode()}, sandboxes)
    assert right.value == 1.0, right


def test_documentation_states_their_number() -> None:
    closed = len(CODE) + len(START_FILES) + len(CLOSED)
    (stated,) = STATEMENT.findall((Path(ROOT) / "docs" / "security.md").read_text())
    assert tuple(map(int, stated)) == (closed + len(OPEN), closed, len(OPEN))
    assert len(CLOSED) + len(OPEN) >= 32


def test_the_pytest_mode_is_reported_as_unsafe() -> None:
    graded_task, _ = in_mode("pytest")
    proof = prove_separation([graded_task, task()])
    assert [(finding.severity, finding.tasks) for finding in proof.findings] == [("unsafe", (graded_task.id,))]
    assert "unsafe: not for training: mode pytest of demo" in render(CheckReport(cases=(), proofs=(proof,), not_proven=()))
