"""Checks sessions: interpreters that persist between calls."""

from __future__ import annotations

import asyncio
import time

from agentrl.protocols import Sandbox
from agentrl.records import ExecResult
from agentrl.sandbox.conformance.bench import BackendUnderTest, expect, expect_error, expect_output


async def _in_session(sandbox: Sandbox, code: str, *, name: str = "main", timeout_s: float = 20.0, output_bytes: int = 65536) -> ExecResult:
    return await sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=name)


async def _answers(sandbox: Sandbox, code: str, wanted: str, *, name: str = "main") -> None:
    """Raises `ConformanceError` unless `code` succeeds in a session that still exists, and prints `wanted`."""
    result = await _in_session(sandbox, code, name=name)
    expect((result.exit_code, result.stdout, result.restarted, result.session_ended) == (0, wanted, False, False), result)


async def check_session_keeps_its_names(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the names and imports of a session persist, and that other sessions and calls outside sessions do not see them."""
    await _answers(sandbox, "import json\nrows = [1, 2]\ndef total(): return sum(rows)", "")
    await _answers(sandbox, "rows.append(3)", "")
    await _answers(sandbox, "print(total(), json.dumps(rows), __name__)", "6 [1, 2, 3] __main__\n")
    await _answers(sandbox, "open('f', 'w').write('shared')", "6\n")
    await _answers(sandbox, "print('rows' in globals(), open('f').read())", "False shared\n", name="other")
    await expect_output(sandbox, "print('rows' in globals(), open('f').read())", "False shared")
    await _answers(sandbox, "import os; print(os.getcwd(), repr(__import__('sys').stdin.read()))", "/home/agent ''\n")


async def check_session_shows_last_values(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the value of a final expression is printed unless it is None, and that an exception does not end the session."""
    shows = {"6 * 7": "42\n", "x = 1": "", "None": "", "'a\\n'": "'a\\n'\n", "1\n2": "2\n", "_ + 1": "3\n", "": ""}
    for code, shown in shows.items():
        await _answers(sandbox, code, shown)
    for code, line in (("1/0", "ZeroDivisionError: division by zero"), ("x = = 1", "SyntaxError: invalid syntax"), ("y", "NameError")):
        result = await _in_session(sandbox, code)
        expect(result.exit_code == 1 and not result.session_ended and line in result.stderr.splitlines()[-1], result)
        expect("exec_server" not in result.stderr, result)
    await _answers(sandbox, "x", "1\n")


async def check_session_output_is_each_calls_own(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the output of a call is truncated like the output of a program, and that calls do not return what threads and children
    print between calls."""
    noise = (
        "import os, threading, time\n"
        "def tick():\n"
        "    while True: os.write(1, b'thread\\n'); time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        "        os.write(1, b'child\\n')\n"
        "        time.sleep(0.01)\n"
        "time.sleep(0.1)\n"
    )
    result = await _in_session(sandbox, "print('head'); print('x' * 500_000); print('tail')", output_bytes=1000)
    expect(result.truncated and len(result.stdout) < 1100, result)
    expect(result.stdout.startswith("head\n") and result.stdout.endswith("tail\n"), result)
    start = time.monotonic()
    result = await _in_session(sandbox, noise)
    expect("child\n" in result.stdout and "thread\n" in result.stdout and time.monotonic() - start < 5.0, result)
    await asyncio.sleep(0.3)
    result = await _in_session(sandbox, "print('quiet', flush=True)")
    expect(result.exit_code == 0 and result.stdout.count("thread") < 10 and "child" not in result.stdout, result)
    await expect_output(sandbox, "print('alone')", "alone")
    result = await _in_session(sandbox, "pid = os.fork()\nprint(pid > 0)")  # the child also reaches the end of the code
    expect(result.exit_code == 0 and "True\n" in result.stdout, result)
    result = await _in_session(sandbox, "print(pid > 0)")
    expect(result.exit_code == 0 and result.stdout.replace("thread\n", "") == "True\n", result)


async def check_session_ends(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that an exit, a kill and a timeout each end a session. The result must report the end of the session, and the result of the
    next call must report a restart."""
    for end, how, timeout_s in (
        ("import sys; sys.exit(3)", (3, ""), 20.0),
        ("raise SystemExit", (0, ""), 20.0),
        ("import os; os._exit(4)", (4, ""), 20.0),
        ("import os; os.kill(os.getpid(), 9)", (None, "killed"), 20.0),
        ("import time; print('slow', flush=True); time.sleep(60)", (None, "timeout"), 0.5),
    ):
        expect((await _in_session(sandbox, "kept = 1")).ok, "a session does not start")
        result = await _in_session(sandbox, end, timeout_s=timeout_s)
        expect((result.exit_code, result.reason, result.session_ended) == (*how, True), result)
        result = await _in_session(sandbox, "'kept' in globals()")
        expect((result.exit_code, result.stdout, result.restarted, result.session_ended) == (0, "False\n", True, False), result)
    result = await sandbox.exec(["sleep", "60"], timeout_s=0.3)  # the timeout ends every process of the sandbox
    expect(result.reason == "timeout", result)
    result = await _in_session(sandbox, "1")
    expect(result.ok and result.restarted, result)


async def check_session_memory(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a session that uses too much memory ends or raises an exception, and that the sandbox continues to work."""
    result = await _in_session(sandbox, f"b = bytearray(b'x') * {4 * bench.spec.memory_mb << 20}", timeout_s=60)
    killed = result.exit_code is None and result.reason in ("memory", "killed") and result.session_ended
    expect(killed or (result.exit_code == 1 and "MemoryError" in result.stderr and not result.session_ended), result)
    result = await _in_session(sandbox, "6 * 7")
    expect(result.ok and result.stdout == "42\n" and result.restarted == killed, result)


async def check_sessions_are_bounded(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a sandbox accepts at most four sessions, and rejects session names that are not plain."""
    for name in ("a b", "../x", "x" * 65, "\u00e9"):
        await expect_error(ValueError, _in_session(sandbox, "1", name=name))
    for number in range(4):
        await _answers(sandbox, f"x = {number}", "", name=f"s{number}")
    await expect_error(ValueError, _in_session(sandbox, "1", name="one-too-many"))
    for number in range(4):
        await _answers(sandbox, "x", f"{number}\n", name=f"s{number}")


async def check_session_pauses(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that the calls and the background threads of a session stop while the sandbox is paused."""
    count = "import threading, time\nticks = []\ndef tick():\n    while True: ticks.append(time.monotonic()); time.sleep(0.02)\n"
    await _answers(sandbox, count + "threading.Thread(target=tick, daemon=True).start()", "")
    running = asyncio.create_task(_in_session(sandbox, "time.sleep(1.0)", timeout_s=1.8))
    await asyncio.sleep(0.4)
    await sandbox.pause()
    await asyncio.sleep(1.6)
    expect(not running.done(), "the call ended while it was paused")
    await sandbox.resume()
    result = await running
    expect(result.exit_code == 0, result)
    await _answers(sandbox, "max(b - a for a, b in zip(ticks, ticks[1:])) > 1.2", "True\n")


async def check_session_is_not_in_a_snapshot(bench: BackendUnderTest, sandbox: Sandbox) -> None:
    """Checks that a snapshot contains only files: in a sandbox opened from it, a session starts fresh and reports a restart once."""
    await _answers(sandbox, "x = 1; print(open('f', 'w').write('kept'))", "4\n")
    archive = await sandbox.snapshot()
    await _answers(sandbox, "x", "1\n")
    async with bench.sandbox(snapshot=archive) as copy:
        result = await _in_session(copy, "print('x' in globals(), open('f').read())")
        expect((result.ok, result.stdout, result.restarted) == (True, "False kept\n", True), result)
        await _answers(copy, "print('once')", "once\n")
