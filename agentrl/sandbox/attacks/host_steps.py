"""The host's steps after an attack's program, or instead of a program. These steps concern processes, sessions, limits and neighbour
sandboxes.

A function `_step_<name>` is a step. A step returns a line that says what was contained, or raises `Escaped` with the evidence. A typed
error counts as a response; a hang does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentRLError, SandboxError, SandboxTimeout
from agentrl.protocols import Sandbox
from agentrl.records import ExecResult
from agentrl.sandbox.attacks.arena import Arena, AttackFailed, Escaped
from agentrl.sandbox.backend import ChannelBackend
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.conformance.bench import MEBIBYTE, OTHER_PROCESSES, BackendUnderTest

SESSION = "main"
"""Name of the session that attacks run in."""
_TOGETHER = 60
_SPIN_S = 3.0
_ANSWER_S = 30.0
_OPEN_S = 60.0
_STRANGERS = 200
_FRESH_S = 45.0
_OPEN_FILES = """
import os, subprocess
for path in ("/etc/passwd", "/etc/os-release", "/dev/null", "/dev/urandom", "/usr/bin/cat"):
    with open(path, "rb") as file: file.read(10)
os.listdir("/usr/bin")
subprocess.run(["sh", "-c", "cat /etc/passwd >/dev/null; python3 -I -c 'import csv, json'"], check=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The input of a step. `result` is the result of the attack's program, or None if the attack has no program."""

    arena: Arena
    backend: ChannelBackend
    sandbox: ChannelSandbox
    result: ExecResult | None = None

    def fresh(self, *, snapshot: bytes | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Opens a new sandbox for the block."""
        return BackendUnderTest(self.backend, self.arena.spec).sandbox(snapshot=snapshot)

    async def output(self, code: str) -> str:
        """Runs a snippet in the attacked sandbox and returns what it prints; if it fails, the text of its result."""
        result = await self.sandbox.python(code, timeout_s=10)
        return result.stdout.strip() if result.ok else repr(result)

    async def other_processes(self) -> str:
        """Returns the pids of the attacked sandbox's processes except the exec server, as the text of a Python list."""
        return await self.output(OTHER_PROCESSES)


def hold(condition: bool, evidence: object) -> None:
    """Raises `Escaped` unless the condition is true."""
    if not condition:
        raise Escaped(str(evidence)[:300])


# Limits ---------------------------------------------------------------------------------------------------------------


async def _step_user_quotas(context: StepContext) -> str:
    code = (
        "import ctypes, os, signal\n"
        "libc = ctypes.CDLL(None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "print(libc.inotify_init1(0) >= 0, libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0)\n"
    )
    result = await context.arena.neighbour.python(code, timeout_s=10)
    hold(result.stdout == "True True\n", f"the neighbour gets no inotify instance or no queued signal: {result.stdout!r}")
    return "the neighbour has separate quotas"


async def _step_terminals(context: StepContext) -> str:
    """While the attack holds terminals, the neighbour and a fresh sandbox still get terminals."""
    code = "import os\nkept = [os.openpty() for _ in range(4)]\nprint(len(kept))"
    async with context.fresh() as fresh:
        for name, sandbox in (("the neighbour", context.arena.neighbour), ("a fresh sandbox", fresh)):
            result = await sandbox.python(code, timeout_s=10)
            hold(result.stdout == "4\n", f"{name} gets no terminal: {result.stderr[-200:]!r}")
    return "other sandboxes still get terminals"


async def _step_asynchronous_io(context: StepContext) -> str:
    taken, limit = (int(Path(f"/proc/sys/fs/aio-{name}").read_text()) for name in ("nr", "max-nr"))
    hold(taken < limit // 2, f"{taken} of the machine's {limit} asynchronous I/O requests are taken")
    return f"{taken} of {limit} taken"


async def _step_filter_budget(context: StepContext) -> str:
    async with context.fresh():
        return "a fresh sandbox has a separate budget"


async def _step_spin_together(context: StepContext) -> str:
    """Runs the program in many sandboxes at once. Each program must time out, and each sandbox must still respond afterwards."""
    program = (await context.sandbox.read("program.py", max_bytes=MEBIBYTE)).decode()
    context.arena.sandboxes += _TOGETHER
    opening = (context.backend.open(context.arena.spec, timeout_s=_OPEN_S) for _ in range(_TOGETHER))
    sandboxes = [sandbox for sandbox in await asyncio.gather(*opening, return_exceptions=True) if isinstance(sandbox, ChannelSandbox)]
    try:
        if len(sandboxes) < _TOGETHER:
            raise AttackFailed(f"only {len(sandboxes)} of {_TOGETHER} sandboxes opened")
        ends = await asyncio.gather(*(_end_of(sandbox, program) for sandbox in sandboxes))
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        context.arena.sandboxes -= _TOGETHER
    if wrong := [end for end in ends if end != "timeout"]:
        raise Escaped(f"{len(wrong)} of {_TOGETHER} sandboxes that spin did not time out: {min(wrong)}")
    return f"{_TOGETHER} ran at once, and each timed out"


async def _end_of(sandbox: ChannelSandbox, program: str) -> str:
    """Returns how a program ended, or the problem if the sandbox failed or did not respond correctly afterwards."""
    try:
        result = await sandbox.exec(["python3", "-I", "-c", program], timeout_s=_SPIN_S)
        answer = await sandbox.python("print(6 * 7)", timeout_s=_ANSWER_S)
    except AgentRLError as error:
        return f"{type(error).__name__}: {error}"
    return result.reason or f"exit {result.exit_code}" if answer.stdout == "42\n" else f"answers {answer}"


# Processes and sessions -----------------------------------------------------------------------------------------------


async def _step_nobody_is_left(context: StepContext) -> str:
    left = await context.other_processes()
    hold(left == "[]", f"processes {left} outlived the timeout")
    return "no process is left"


async def _step_timeout_leaves_nobody(context: StepContext) -> str:
    result = await context.sandbox.exec(["sleep", "60"], timeout_s=0.5)
    hold(result.reason == "timeout" or result.exit_code == 126, f"sleep ended with {result}")
    return "the attack fills its own process limit" if result.exit_code == 126 else await _step_nobody_is_left(context)


async def _step_others_are_out_of_reach(context: StepContext) -> str:
    for _ in range(20):
        hold(await context.output("print(1)") == "1", "a program did not run")
        await asyncio.sleep(0.05)
    seen, reached = (await context.sandbox.read("reached", max_bytes=1000)).decode().split(" ", 1)
    if int(seen) == 0:
        raise AttackFailed("the attack saw no process of the server")
    hold(reached == "", f"the attack reached a process of the server: {reached}")
    return f"{seen} processes of the server were out of reach"


async def _step_sessions_answer(context: StepContext) -> str:
    """The attacked session may return any result, but must return it in time. After a restart of that session, and in other sessions,
    results must be correct."""
    own = await context.sandbox.python("6 * 7", timeout_s=5, session=SESSION)
    end = own.reason or f"exit {own.exit_code}"
    other = await context.sandbox.python("6 * 7", timeout_s=10, session="other")
    hold((other.exit_code, other.stdout) == (0, "42\n"), f"a different session returned {other}")
    slept = await context.sandbox.exec(["sleep", "60"], timeout_s=0.5)
    hold(slept.reason == "timeout", f"sleep ended with {slept}")
    for code, wanted in (("6 * 7", (0, "42\n")), ("1 / 0", (1, ""))):
        own = await context.sandbox.python(code, timeout_s=10, session=SESSION)
        hold(
            (own.exit_code, own.stdout) == wanted and own.restarted == (code == "6 * 7"),
            f"after it was restarted, the session returned {own}",
        )
    return f"{end}; correct answers after the session ended"


async def _step_session_lies(context: StepContext) -> str:
    for number in range(500):
        result = await context.sandbox.python(f"print({number})", timeout_s=5, session=SESSION)
        hold(result.reason != "timeout", f"call {number} to a session that does not read timed out: {result}")
        if result.restarted:
            hold(result.stdout == f"{number}\n", f"a fresh session returned {result}")
            return f"the host accepted {number} results, then the session ended; {await _step_sessions_answer(context)}"
    raise Escaped("calls accumulate without limit in a session that does not read")


async def _step_session_heirs(context: StepContext) -> str:
    hold(context.result is not None and context.result.session_ended, "the session did not end")
    await asyncio.sleep(0.5)
    for number in range(20):
        result = await context.sandbox.python(f"print({number}); {number} / {number % 2}", timeout_s=10, session=SESSION)
        wanted = (0, f"{number}\n{number / 1}\n") if number % 2 else (1, f"{number}\n")
        hold((result.exit_code, result.stdout) == wanted, f"call {number} returned {result}")
        await asyncio.sleep(0.02)
    taken = await context.sandbox.read("taken", max_bytes=100)
    hold(taken == b"0", f"the heir took the socket of a session {taken!r} times")
    return "the next session returned its own answers"


async def _step_output_is_only_output(context: StepContext) -> str:
    result = context.result
    hold(result is not None and result.exit_code == 7 and not result.truncated, f"the host received {result}")
    return "the host received exit code 7"


async def _step_run(context: StepContext) -> str:
    """A call to a hostile server returns a result within the limits or raises a typed error, in time."""
    try:
        result = await context.sandbox.exec(["cat"], stdin=bytes(4 * MEBIBYTE), timeout_s=1.0)
    except SandboxTimeout as error:
        return f"SandboxTimeout: {str(error)[-80:]}"
    except (SandboxError, ValueError, FileNotFoundError) as error:
        hold(str(error).isprintable(), "an error contains terminal commands")
        return f"{type(error).__name__}: {str(error)[-80:]!r}"
    hold(isinstance(result, ExecResult) and len(result.stdout) + len(result.stderr) < 140_000, "a result exceeds the limits")
    return f"accepted as a result of {len(result.stdout)} characters, which any server may return"


async def _step_cell_strangers(context: StepContext) -> str:
    """Opens 200 connections without the key to the cells; meanwhile, the neighbour must compute and a fresh sandbox must open."""
    cells = [place.rpartition(":") for place in context.backend.ways()["cells"]]
    texts = (b"", bytes(32), os.urandom(64), b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n")
    with contextlib.ExitStack() as stack:
        context.arena.sandboxes += _STRANGERS  # the connections use this process's descriptors
        stack.callback(lambda: setattr(context.arena, "sandboxes", context.arena.sandboxes - _STRANGERS))
        for number in range(_STRANGERS):
            host, _, port = cells[number % len(cells)]
            sock = stack.enter_context(await asyncio.to_thread(socket.create_connection, (host.strip("[]"), int(port)), _ANSWER_S))
            sock.sendall(texts[number % len(texts)])
        result = await context.arena.neighbour.python("print(6 * 7)", timeout_s=10)
        hold(result.stdout == "42\n", f"the neighbour returned {result}")
        try:
            async with asyncio.timeout(_FRESH_S), context.fresh():
                return f"a fresh sandbox opened next to {_STRANGERS} connections without the key"
        except TimeoutError:
            raise Escaped(f"no fresh sandbox opened within {_FRESH_S:.0f} s next to {_STRANGERS} connections without the key") from None


# Neighbours -----------------------------------------------------------------------------------------------------------


async def _step_unseen_by_watchers(context: StepContext) -> str:
    """While the program watches, the neighbour and a fresh sandbox open files. Then the attacked sandbox opens files, to show that the
    program does watch."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ANSWER_S
    while await context.output("import os; print(os.path.exists('watching'))") != "True":
        if loop.time() > deadline:
            raise AttackFailed("the program did not start to watch")
    await asyncio.sleep(0.5)  # by then the exec server has prepared its next process
    before = len(await context.sandbox.read("seen", max_bytes=MEBIBYTE))
    await context.arena.neighbour.python(_OPEN_FILES, timeout_s=_ANSWER_S)
    async with context.fresh() as fresh:
        await fresh.exec(["python3", "-I", "-c", _OPEN_FILES], timeout_s=_ANSWER_S)
    seen = (await context.sandbox.read("seen", max_bytes=MEBIBYTE))[before:].decode("utf-8", "replace").splitlines()
    if shared := [line for line in seen if not line.startswith("/home/agent/")]:  # the host itself reads there
        raise Escaped(f"the program saw {len(shared)} accesses by other sandboxes, such as {shared[0]}")
    deadline = loop.time() + _ANSWER_S
    while b"/etc/os-release" not in await context.sandbox.read("seen", max_bytes=MEBIBYTE):
        if loop.time() > deadline:
            raise AttackFailed("the program saw no access, not even in its own sandbox")
        await context.sandbox.exec(["cat", "/etc/os-release"], timeout_s=_ANSWER_S)
    return "the program saw only accesses in its own sandbox"
