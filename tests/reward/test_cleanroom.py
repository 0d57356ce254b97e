"""Attacks on the clean-room grader, on both backends. The files that an attack leaves are graded for real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agentrl.check import cheats
from agentrl.errors import TaskError
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, ExecResult, Limits, Message, SandboxSpec, Score, Split, Task
from agentrl.reward import TaskScorer, cleanroom
from agentrl.sandbox import select_backend
from agentrl.task.grading import Grading, Mode, encode_files, grading_of
from agentrl.task.outputs import collect_outputs, run_and_collect
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
VERIFIER = "agentrl.reward.cleanroom:grade"
NEEDLE = "needle-" + "7c1d"  # in two pieces, so that a search for it does not match this line
DOUBLE = "def double(n):\n    return 2 * n\n"
GOLD = f"open('code.py', 'w').write({DOUBLE!r})"
RUNS = ({"name": "four", "call": "code.py:double", "args": [4]}, {"name": "also", "argv": ["python3", "code.py"]})
JUDGE = (
    f"# {NEEDLE}\ndef test_double(runs):\n    assert runs['four'].value == 8\n\ndef test_runs(runs):\n    assert runs['also'].exit == 0\n"
)
PYTEST = f"""# {NEEDLE}
import wave  # nothing else has loaded it, so it shows whose modules come first

from code_ import double

def test_double():
    assert double(4) == 8

def test_more():
    assert double(-1) == -2
"""
SHELL = f"# {NEEDLE}\nset -eu\n[ \"$(python3 -c 'import code; print(code.double(4))')\" = 8 ]\n"
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


@pytest.fixture(params=BOTH)
async def sandboxes(request: Any) -> AsyncIterator[SandboxBackend]:
    backend = select_backend(request.param, run_label="test", root=ROOT)
    yield backend
    await backend.close()


def task(mode: Mode = "judge", outputs: tuple[str, ...] = ("code.py",), *, tests: dict[str, str] | None = None, **fields: Any) -> Task:
    sources = {"judge": {"test_it.py": JUDGE}, "pytest": {"test_it.py": PYTEST.replace("code_", "code")}, "shell": {"test.sh": SHELL}}
    runs = RUNS if mode == "judge" and "runs" not in fields else fields.pop("runs", ())
    files = {name: text.encode() for name, text in (tests or sources[mode]).items()}
    plan = Grading(mode=mode, tests=encode_files(files), runs=runs, gold=fields.pop("gold", GOLD), timeout_s=fields.pop("timeout_s", 120.0))
    return Task(
        id="demo",
        family="f",
        prompt=(Message(role="user", content="q"),),
        tools=("python",),
        sandbox=SandboxSpec(image="sandboxes/chores", memory_mb=128, processes=16, disk_mb=16),
        verifiers=(VERIFIER,),
        data={"grading": plan.model_dump(mode="json")},
        split=Split.TRAIN,
        outputs=outputs,
        limits=Limits(tool_timeout_s=60.0, wall_s=120.0),
        **fields,
    )


def outputs_of(**files: str | bytes) -> dict[str, bytes]:
    names = {"code": "code.py"}
    return {names.get(name, name): data.encode() if isinstance(data, str) else data for name, data in files.items()}


async def score(graded_task: Task, outputs: dict[str, bytes], sandboxes: SandboxBackend) -> Score:
    episode = Episode(id="e", task_id=graded_task.id, task_key=graded_task.key, trajectories=(), outputs=outputs)
    return await TaskScorer(sandboxes=sandboxes)(graded_task, episode)


async def with_short_deadline(graded_task: Task, timeout_s: float, gold: dict[str, bytes], sandboxes: SandboxBackend) -> Task:
    """Returns the task with a short deadline for tests that hang. The gold solution is graded without it."""
    short = replace(graded_task, data={"grading": {**graded_task.data["grading"], "timeout_s": timeout_s}})
    cleanroom.grade._gold[short.key] = await cleanroom.grade_outputs(graded_task, grading_of(graded_task), gold, sandboxes)
    assert not cleanroom.grade._gold[short.key].broken
    return short


# Tests that import `code` would get the module of the standard library, so the file has another name in those modes.
def in_mode(mode: Mode) -> tuple[Task, str]:
    if mode == "judge":
        return task(), "code.py"
    tests = {"pytest": {"test_it.py": PYTEST.replace("code_", "twice")}, "shell": {"test.sh": SHELL.replace("code", "twice")}}[mode]
    return task(mode, ("twice.py",), tests=tests, gold=GOLD.replace("code.py", "twice.py")), "twice.py"


MODES: tuple[Mode, ...] = ("judge", "pytest", "shell")


@pytest.mark.parametrize("mode", MODES)
async def test_right_outputs_score_1_and_wrong_ones_0(mode: Mode, sandboxes: SandboxBackend) -> None:
    graded_task, name = in_mode(mode)
    right = await score(graded_task, {name: DOUBLE.encode()}, sandboxes)
    assert right.value == 1.0 and list(right.parts.values())[-1] == 1.0, right
    wrong = await score(graded_task, {name: DOUBLE.replace("2 * n", "8").encode()}, sandboxes)
    assert wrong.value == (0.0 if mode == "pytest" else 1.0), wrong  # only the pytest tests call it twice
    nothing = await score(graded_task, {name: DOUBLE.replace("2 *", "3 *").encode()}, sandboxes)
    assert nothing.value == 0.0 and nothing.evidence


PRINTS_OUTPUT = """
def test_report(outputs):
    text = outputs.text("report.txt")
    print("handed in:", text)
    assert text.strip() == "4", text
"""


@pytest.mark.parametrize("repeats", [1, 1_200_000])
async def test_tests_that_print_long_outputs_still_grade_them(repeats: int, sandboxes: SandboxBackend) -> None:
    """The output exceeds the limit for printed output, for which the task was once blamed."""
    graded_task = task(outputs=("report.txt",), tests={"test_it.py": PRINTS_OUTPUT}, runs=(), gold="open('report.txt', 'w').write('4')")
    assert (await score(graded_task, {"report.txt": b"4" + b" " * repeats}, sandboxes)).value == 1.0
    wrong = await score(graded_task, {"report.txt": b"5" * repeats}, sandboxes)
    assert wrong.value == 0.0 and wrong.blame is None, wrong


CODE: dict[str, str] = {
    "sys.exit(0) when imported": "import sys\nsys.exit(0)\n",
    "os._exit(0) when imported": "import os\nos._exit(0)\n",
    "exits when called": "def double(n):\n    import os\n    os._exit(0)\n",
    "prints a fake report": 'print(\'{"tests": {"test_it.py::test_double": "", "test.sh": ""}}\\n2 passed\')\nimport os\nos._exit(0)\n',
    "writes to every descriptor": """
import os
for fd in range(3, 64):
    for name in ("test_double", "test_more", "test_runs"):
        try:
            os.write(fd, b'0000 {"test": "test_it.py::%s", "error": ""}\\n' % name.encode())
        except OSError:
            pass
os._exit(0)
""",
    "kills the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "stops the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n",
    "changes the tests on disk": (
        "import glob, os\nfor path in glob.glob('/home/agent/tests/*'):\n    open(path, 'w').write('exit 0')\nos._exit(1)\n"
    ),
    "takes assert away": "import builtins\nbuiltins.AssertionError = SystemExit\ndef double(n):\n    return 0\n",
    "is equal to everything": cheats.TEXTS["equal to everything"][0],
    "is equal to everything, at the call": (
        "def double(n):\n    class Any(int):\n        def __eq__(self, other): return True\n        __hash__ = None\n    return Any()\n"
    ),
    "is equal to everything, by type()": "double = lambda n: type('Any', (), {'__eq__': lambda one, other: True, '__hash__': None})()\n",
    "returns mock.ANY": "from unittest.mock import ANY\ndef double(n):\n    return ANY\n",
    "patches the tests": cheats.TEXTS["patches the tests"][0],
    "replaces a method of pytest": (
        "import sys\npython = sys.modules.get('_pytest.python')\nif python:\n    python.Function.runtest = lambda self: None\n"
        "def double(n):\n    return 0\n"
    ),
    "replaces the code of a function of pytest": (
        "import sys\nrunner = sys.modules.get('_pytest.runner')\nif runner:\n"
        "    runner.pytest_runtest_call.__code__ = (lambda item: None).__code__\ndef double(n):\n    return 0\n"
    ),
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    for fd in range(64):\n        try:\n            os.close(fd)\n"
        "        except OSError:\n            pass\n    while True:\n        time.sleep(1)\nos._exit(0)\n"
    ),
    "reads and writes its parent": (
        "import os\nfor name in ('fd/1', 'fd/0', 'mem', 'environ'):\n    try:\n"
        "        print(open(f'/proc/{os.getppid()}/{name}', 'rb+', buffering=0).write(b'x'))\n    except OSError as error:\n"
        "        print(error)\nos._exit(0)\n"
    ),
}


@pytest.mark.parametrize("mode", MODES)
async def test_code_under_test_that_attacks_the_grader_scores_0(mode: Mode, sandboxes: SandboxBackend) -> None:
    graded_task, name = in_mode(mode)
    graded_task = await with_short_deadline(graded_task, 4.0, {name: DOUBLE.encode()}, sandboxes)
    results = await gather_limited({attack: score(graded_task, {name: code.encode()}, sandboxes) for attack, code in CODE.items()})
    assert {attack: result.value for attack, result in results.items()} == dict.fromkeys(CODE, 0.0), results


async def gather_limited(work: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    """Awaits all items, three at a time."""
    slots = asyncio.Semaphore(3)

    async def limited(item: Awaitable[T]) -> T:
        async with slots:
            return await item

    return dict(zip(work, await asyncio.gather(*(limited(item) for item in work.values())), strict=True))


async def test_skipped_or_missing_test_has_not_passed(sandboxes: SandboxBackend) -> None:
    """Every test that the host finds in the source must report success; parametrized ones in every case."""
    head = "import pytest\nfrom twice import double\n\n"
    cases = {
        "def test_a():\n    pytest.skip('no time')\n": 0.0,
        "@pytest.mark.xfail\ndef test_a():\n    assert double(1) == 3\n": 0.0,
        "@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_a(n):\n    assert double(n) == 2 * n\n": 1.0,
        "@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_a(n):\n    assert double(n) < 5\n": 0.0,
        "class TestAll:\n    def test_a(self, tmp_path):\n        assert double(2) == 4\n": 1.0,
        "def test_a():\n    pass\n\ndel test_a\n": None,
    }
    work = {}
    for text in cases:
        tests = {"test_it.py": head + text}
        graded_task = task("pytest", ("twice.py",), tests=tests, gold=GOLD.replace("code.py", "twice.py"))
        work[text] = score(graded_task, {"twice.py": DOUBLE.encode()}, sandboxes)
    results = await gather_limited(work)
    assert {text: result.value for text, result in results.items()} == cases, results


WIN = "import os\nos._exit(0)\n"
START_FILES: dict[str, dict[str, bytes]] = {
    "conftest.py": outputs_of(**{"conftest.py": WIN, "tests/conftest.py": WIN}),
    "sitecustomize.py": outputs_of(**{"sitecustomize.py": WIN, "usercustomize.py": WIN}),
    ".pth files": outputs_of(
        **{".local/lib/python3.11/site-packages/win.pth": "import os; os._exit(0)\n", "win.pth": "import os; os._exit(0)\n"}
    ),
    "pytest.ini": outputs_of(
        **{"pytest.ini": "[pytest]\naddopts = --collect-only\npython_functions = no\n", "tox.ini": "[pytest]\naddopts = -k no\n"}
    ),
    "a module of the library's name": outputs_of(
        **{"json.py": WIN, "hmac.py": WIN, "wave.py": WIN, "pytest.py": WIN, "subprocess.py": WIN, "os.py": WIN}
    ),
    "a module of a test's name": outputs_of(
        **{"test_it.py": "def test_double():\n    pass\n", "tests/test_it.py": "", "tests/test.sh": "exit 0\n"}
    ),
    "visible tests edited": outputs_of(**{"tests/test_it.py": "def test_double(runs):\n    pass\n\ndef test_runs(runs):\n    pass\n"}),
    "a report left behind": outputs_of(**{"runs/results.json": "[]", "outputs/x": "x", "work/x": "x"}),
    "shims on the path": outputs_of(
        **{"bin/python3": "#!/bin/sh\nexit 0\n", "python3": "#!/bin/sh\nexit 0\n", "bash": "exit 0\n", "sh": "exit 0\n"}
    ),
    "shell start files": outputs_of(**{".profile": "exit 0\n", ".bashrc": "exit 0\n", ".bash_env": "exit 0\n", ".inputrc": "x\n"}),
    "a git repository": outputs_of(**{".git/config": "[core]\nfsmonitor = exit 0\n", ".git/hooks/post-checkout": "#!/bin/sh\nexit 0\n"}),
}


@pytest.mark.parametrize("mode", MODES)
async def test_startup_files_do_not_run_in_the_grader(mode: Mode, sandboxes: SandboxBackend) -> None:
    """Every file is a declared output here, the worst case. A wrong solution next to them must still score 0.

    A right solution next to them shows that they do not merely break the tests.
    """
    graded_task, name = in_mode(mode)
    graded_task = replace(graded_task, outputs=("**",))
    wrong = DOUBLE.replace("2 * n", "3 * n").encode()
    results = await gather_limited({attack: score(graded_task, {**files, name: wrong}, sandboxes) for attack, files in START_FILES.items()})
    assert {attack: result.value for attack, result in results.items()} == dict.fromkeys(START_FILES, 0.0), results
    everything = {path: data for files in START_FILES.values() for path, data in files.items() if mode == "pytest" or not shadows(path)}
    right = await score(graded_task, {**everything, name: DOUBLE.encode()}, sandboxes)
    assert right.value == 1.0, right


def shadows(path: str) -> bool:
    """Modules next to a script take precedence over the library's: a program with its own `os` breaks only itself.

    Under pytest the library comes first.
    """
    return path in ("json.py", "wave.py", "hmac.py", "os.py", "subprocess.py")


SEARCH = f"""
import os, subprocess
needle = ("needle-" "{NEEDLE[7:]}").encode()
found = []
for top in ("/home", "/tmp", "/agentrl", "/dev/shm", "/var", "/proc"):
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in ("task", "fd", "map_files", "fdinfo", "net")]
        for name in files:
            if folder.startswith("/proc") and name not in ("cmdline", "environ"):
                continue
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    if needle in file.read(1 << 20) and not name.startswith(("code", "twice", "x")):
                        found.append(os.path.join(folder, name))
            except OSError:
                pass
"""


async def test_program_cannot_find_the_expected_values(sandboxes: SandboxBackend) -> None:
    """A program that finds the tests fails its own assertion. In mode judge it finds nothing, not even in git objects or /proc."""
    code = f"{SEARCH}\ndef double(n):\n    return 8 if not found else 0\nassert not found, found\n"
    assert (await score(task(), outputs_of(code=code), sandboxes)).value == 1.0
    graded_task, name = in_mode("pytest")
    assert (await score(graded_task, {name: code.encode()}, sandboxes)).value == 0.0, "the control: in a shared sandbox it finds them"


async def test_agent_cannot_find_tests_or_gold_solution(sandboxes: SandboxBackend) -> None:
    graded_task = task(gold=f"# {NEEDLE}\n{GOLD}")
    result, _ = await run_and_collect(graded_task, SEARCH + "\nprint(found)", sandboxes, timeout_s=120)
    assert result.stdout == "[]\n", result


async def test_run_cannot_reach_the_tests(sandboxes: SandboxBackend) -> None:
    """A daemon continues only in the sandbox of its run, and later runs with `fresh` do not share it."""
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        open('mark', 'w').write('x')
        time.sleep(0.01)
"""
    wait = "import os, time; n = {patience}\nwhile n and not os.path.exists('mark'): n -= 1; time.sleep(0.1)\nprint(os.path.exists('mark'))"
    runs = (
        {"name": "first", "argv": ["python3", "code.py"]},
        {"name": "same", "argv": ["python3", "-c", wait.format(patience=500)], "timeout_sec": 60},
        {"name": "other", "argv": ["python3", "-c", wait.format(patience=3)], "fresh": True},
    )
    tests = {"test_it.py": "def test_it(runs):\n    assert [runs[n].stdout for n in ('same', 'other')] == ['True\\n', 'False\\n']\n"}
    assert (await score(task(runs=runs, tests=tests), outputs_of(code=daemon + "print(1)\n"), sandboxes)).value == 1.0


async def test_data_that_breaks_the_tests_scores_0_instead_of_unscored(sandboxes: SandboxBackend) -> None:
    """An episode must not be excluded because its outputs are hard to read."""
    tests = {"test_it.py": "def test_it(outputs):\n    assert outputs.json('data.json') == [1]\n"}
    graded_task = task(outputs=("data.json",), runs=(), tests=tests, gold="open('data.json', 'w').write('[1]')")
    assert (await score(graded_task, {"data.json": b"[1]"}, sandboxes)).value == 1.0
    for data in (b"", b"[" * 200_000, b"\xff\xfe", b'"' + b"9" * 3_000_000, b"1" * 5000):
        result = await score(graded_task, {"data.json": data}, sandboxes)
        assert result.value == 0.0, (data[:20], result)
    slow = {"test_it.py": "import re\n\ndef test_it(outputs):\n    assert re.fullmatch('(a+)+b', outputs.text('data.json'))\n"}
    graded_task = task(outputs=("data.json",), runs=(), tests=slow, gold="open('data.json', 'w').write('ab')")
    graded_task = await with_short_deadline(graded_task, 2.0, {"data.json": b"ab"}, sandboxes)
    assert (await score(graded_task, {"data.json": b"a" * 60}, sandboxes)).value == 0.0


BROKEN: dict[str, tuple[Mode, dict[str, str], str]] = {
    "do not load": ("judge", {"test_it.py": "import nothing_of_this_name\n\ndef test_it(runs):\n    pass\n"}, "do not load"),
    "leave with 0": ("judge", {"test_it.py": "import os\n\ndef test_it(runs):\n    os._exit(0)\n"}, "gold solution too"),
    "hang": ("judge", {"test_it.py": "import time\n\ndef test_it(runs):\n    time.sleep(99)\n"}, "gold solution too"),
    "import nothing": ("pytest", {"test_it.py": "import nothing_of_this_name\n\ndef test_it():\n    pass\n"}, "gold solution too"),
}


async def test_tests_that_also_break_on_gold_are_a_task_fault(sandboxes: SandboxBackend) -> None:
    for mode, tests, reason in BROKEN.values():
        graded_task = task(mode, tests=tests, timeout_s=3.0 if "time.sleep" in str(tests) else 120.0, runs=())
        for _ in range(2):
            result = await score(graded_task, outputs_of(code=DOUBLE), sandboxes)
            assert result.value is None and result.blame is Blame.TASK and reason in result.reason, result


GROWS = """
if os.fork() == 0:
    with open('code.py', 'wb') as file:
        while True:
            file.write(bytes(1 << 16))
            file.seek(1 << 22)
"""
LEAVINGS: dict[str, tuple[str, set[str]]] = {
    "regular files": ("os.makedirs('a/b'); open('a/b/x.txt', 'w').write('1'); open('code.py', 'w').write('2')", {"a/b/x.txt", "code.py"}),
    "links": ("os.makedirs('a'); os.symlink('/etc/passwd', 'code.py'); os.symlink('/etc/passwd', 'a/x.txt')", set()),
    "a folder that is a link": ("os.symlink('/etc', 'a'); os.symlink('/', 'code.py')", set()),
    "a pipe and a folder": ("os.makedirs('a/x.txt'); os.mkfifo('code.py')", set()),
    "a socket": ("import socket; os.makedirs('a'); s = socket.socket(socket.AF_UNIX); s.bind('code.py')", set()),
    "a file without end": ("open('code.py', 'wb').truncate(15 << 20)", set()),
    "a file that nobody may read": ("open('code.py', 'w').write('1'); os.chmod('code.py', 0)", set()),
    "many other files": ("os.makedirs('a'); [open(f'a/{n}.bin', 'w').close() for n in range(300)]; open('a/x.txt', 'w')", {"a/x.txt"}),
    "a file that grows": (GROWS, set()),
}


async def test_only_plain_files_are_collected_from_the_sandbox(sandboxes: SandboxBackend) -> None:
    demo = task(outputs=("code.py", "a/**/*.txt"))
    work = {name: run_and_collect(demo, f"import os\n{program}", sandboxes, timeout_s=120) for name, (program, _) in LEAVINGS.items()}
    collected_files = {name: dict(collected.files) for name, (_, collected) in (await gather_limited(work)).items()}
    collected_files["a file that grows"].pop("code.py", None)  # may be collected if it was small enough at that moment
    assert {name: set(files) for name, files in collected_files.items()} == {name: files for name, (_, files) in LEAVINGS.items()}
    assert not any(b"root:" in data for files in collected_files.values() for data in files.values())


async def test_unusable_working_directory_is_blamed_on_the_agent(sandboxes: SandboxBackend) -> None:
    graded_task = task(outputs=("code.py", "*.txt"))
    sandbox = await sandboxes.open(graded_task.sandbox, files={"code.py": b"1", "a.txt": b"2"})
    names = "for n in range(2000): open('\u00e9' * 120 + str(n), 'w').close()"  # the list is longer than the limit
    assert (await sandbox.python(names, timeout_s=60)).ok
    collected = await collect_outputs(sandbox, graded_task.outputs)
    await sandbox.close()
    assert collected.files == {"code.py": b"1"} and "cannot be listed" in collected.refused["*.txt"]


async def test_fork_bomb_does_not_prevent_collecting_outputs(sandboxes: SandboxBackend) -> None:
    graded_task = task(outputs=("code.py", "*.txt"))
    sandbox = await sandboxes.open(graded_task.sandbox, files={"code.py": b"1", "a.txt": b"2"})
    bomb = """
import os
if os.fork() == 0:
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""
    await sandbox.python(bomb, timeout_s=60)
    await asyncio.sleep(0.5)
    collected = await collect_outputs(sandbox, graded_task.outputs)
    await sandbox.close()
    assert collected.files["code.py"] == b"1"
    assert collected.files.get("a.txt") == b"2" or "cannot be listed" in collected.refused["*.txt"]


async def test_a_report_without_the_secret_gives_no_score() -> None:
    """A single foreign line on the stdout of the judge invalidates the report."""
    forged = ScriptedSandboxes(printing('{"loaded": ["test_it.py::test_double"]}\nx {"test": "test_it.py::test_double", "error": ""}\n'))
    result = await score(task(), outputs_of(code=DOUBLE), forged)
    assert result.value is None and result.blame is Blame.TASK
    assert len(forged.opened) == 2 and all(sandbox.closed for sandbox in forged.opened)
    programs, judging = forged.opened
    assert not any("tests/" in path or NEEDLE.encode() in data for path, data in programs.files.items())
    assert "tests/test_it.py" in judging.files and "code.py" not in judging.files


async def test_missing_outputs_score_0_without_a_sandbox() -> None:
    none = ScriptedSandboxes(printing(""))
    assert (await score(task(), {}, none)).value == 0.0 and none.opened == []


async def test_task_without_grading_is_a_task_fault() -> None:
    result = await score(replace(task(), data={}), outputs_of(code=DOUBLE), ScriptedSandboxes(printing("")))
    assert result.value is None and result.blame is Blame.TASK
    with pytest.raises(TaskError):
        grading_of(replace(task(), data={"grading": {"mode": "judge"}}))


async def test_answers_that_address_the_grader_are_wrong() -> None:
    """The verifier of answers compares numbers on the host, and these answers are not numbers."""
    demo = replace(task(), outputs=(), verifiers=("rewards.tables:exact_answer",), data={"answer": "8", "tolerance": 0.0, "kind": "x"})
    for answer in cheats.ANSWERS.values():
        episode = Episode(id="e", task_id=demo.id, task_key=demo.key, trajectories=(), answer=answer)
        assert (await TaskScorer()(demo, episode)).value == 0.0, answer[:40]


class SlowAtFirst(ScriptedSandboxes):
    """Sandboxes in which the first `late` programs under test run into their time limit. The judge passes what ran in time."""

    def __init__(self, late: int) -> None:
        super().__init__(printing(""))
        self.late, self.runs, self.gradings = late, 0, 0

    async def open(self, *args: Any, **options: Any) -> Any:
        sandbox = await super().open(*args, **options)

        async def execute(argv: Sequence[str], *, stdin: bytes = b"", **_: Any) -> ExecResult:
            if argv[-1] != cleanroom.JUDGE:
                self.runs += 1
                late = self.runs <= self.late
                return ExecResult(exit_code=None if late else 0, stdout="", stderr="", wall_s=0.0, reason="timeout" if late else "")
            self.gradings += 1
            name = "test_it.py::test_double"
            error = "it has no result" if b'"timeout"' in sandbox.files["runs/results.json"] else ""
            reports = [{"loaded": [name]}, {"test": name, "error": error}]
            lines = "\n".join(f"{stdin.decode().strip()} {json.dumps(line)}" for line in reports)
            return ExecResult(exit_code=0, stdout=f"{lines}\n", stderr="", wall_s=0.0)

        sandbox.exec = execute  # type: ignore[method-assign]
        return sandbox


@pytest.mark.parametrize(("late", "value", "gradings"), [(0, 1.0, 1), (1, 1.0, 2), (2, 0.0, 2)])
async def test_late_run_is_graded_again_before_it_scores(late: int, value: float, gradings: int) -> None:
    slow = SlowAtFirst(late)
    graded_task = task(tests={"test_it.py": "def test_double():\n    pass\n"}, runs=({"name": "r", "argv": ["python3", "code.py"]},))
    result = await score(graded_task, outputs_of(code=DOUBLE), slow)
    assert (result.value, slow.gradings, slow.runs) == (value, gradings, gradings)
