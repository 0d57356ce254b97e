"""Runs every attack against a backend. The verdict is contained, ESCAPED, error or not promised.

Contained means that the host, the driver and the neighbour sandbox are unchanged, the driver received a typed answer in time, the attacked
sandbox still responds correctly, nothing of the attacked sandbox is left after it is closed, and a fresh sandbox opens. Error means that
the attack did not run as intended.

An attack is a program with settings in its docstring, a trick of a hostile server, or a hostile archive. The docstring starts with a
description, followed by lines of the form `key: value`:

- kind: the class of the attack.
- seconds: the time limit at which the sandbox must kill the program (default: 10).
- within: the deadline for the result in seconds, to which the suite adds 6 s (default: `seconds`).
- ends: how the program may end: exit, timeout, memory, killed (default: exit).
- run: `snippet` runs the program in the warm interpreter instead of a new one, `session` runs it in a session.
- host: the host's step after the program (see `agentrl.sandbox.attacks.host_steps`).
- network: `allowed` or `gateway` for an allow-list with one server on the host, at `allowed_port` or `gateway_port`.
- needs: what the promise requires, which is `control groups`, `two users`, `cell` (the backend), or a machine such as x86_64.

The program prints a line with `ESCAPED:` and what it achieved, or a line with `held:` and what prevented the attack.
"""

from __future__ import annotations

import ast
import asyncio
import os
import platform
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from agentrl.errors import AgentRLError, SandboxError
from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox import server_code
from agentrl.sandbox.attacks import file_steps, host_steps, hostile_server
from agentrl.sandbox.attacks.arena import Arena, AttackCutOff, AttackFailed, Escaped, arena, namespace_of, wait_until_gone
from agentrl.sandbox.attacks.host_steps import SESSION, StepContext
from agentrl.sandbox.backend import ChannelBackend
from agentrl.sandbox.channel_sandbox import ChannelSandbox

PROGRAMS = Path(__file__).parent / "programs"
HOSTILE_SERVER = Path(hostile_server.__file__)
KINDS = ("resources", "lifetime", "protocol", "escape", "files", "network", "grader", "between episodes")
_ENDS = ("exit", "timeout", "memory", "killed")
_RUNS = ("", "snippet", "session")
_NETWORKS = ("", "allowed", "gateway")
_KEYS = {"kind", "seconds", "within", "ends", "run", "host", "network", "needs"}
_SNAPSHOT_TRICKS = ("empty_chunks", "endless_chunks")
ATTACK_SPEC = SandboxSpec(image="sandboxes/tables", memory_mb=192, processes=48, disk_mb=24, open_files=128)
"""Small limits, so that an uncontained bomb reaches them first."""
STEPS = {
    name.removeprefix("_step_"): function
    for module in (host_steps, file_steps)
    for name, function in vars(module).items()
    if name.startswith("_step_")
}
"""Name -> function of each of the host's steps."""
BUSY_S = 10.0
"""Additional time for an attack that ran out of time on a busy machine."""
_OPEN_S = 30.0
_OPEN_HOSTILE_S = 10.0
_LATE_S = 6.0
_HANG_S = 90.0
_AT_ONCE = 6
_CONTAINED, _ESCAPED, _ERROR, _NOT_PROMISED = "contained", "ESCAPED", "error", "not promised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack: a program to run in a sandbox, a trick of its exec server, or neither if only the host acts."""

    name: str
    kind: str
    description: str
    program: str = ""
    trick: str = ""
    seconds: float = 10.0
    within: float = 10.0
    ends: tuple[str, ...] = ("exit",)
    run: str = ""
    host: str = ""
    network: str = ""
    needs: str = ""


def load_attacks() -> list[Attack]:
    """Returns every attack, sorted by kind."""
    archives = "Archives with `..`, absolute names, links to write through, devices and false sizes, restored as a snapshot."
    attacks = [*(program_attack(path) for path in sorted(PROGRAMS.glob("*.py"))), *map(_trick, hostile_server.TRICKS)]
    attacks.append(Attack(name="hostile_archives", kind="files", description=archives, host="hostile_archives", seconds=30.0, within=30.0))
    strangers = "More connections to the cell than it serves at once. They send nothing, half a handshake, the wrong key or too much."
    attacks.append(Attack(name="cell_strangers", kind="protocol", description=strangers, host="cell_strangers", needs="cell", within=30.0))
    return sorted(attacks, key=lambda attack: KINDS.index(attack.kind))


def program_attack(path: Path) -> Attack:
    """Returns the attack in a program's file. Raises `ValueError`, whose message names the file, if the docstring of the program is
    invalid."""
    text = path.read_text(encoding="utf-8")
    description, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
    keys = dict(line.split(": ", 1) for line in rest.splitlines() if line.strip())
    if not description or keys.keys() - _KEYS or keys.get("kind") not in KINDS:
        raise ValueError(f"{path}: the docstring needs a description, then lines of {sorted(_KEYS)}; got {keys}")
    ends = tuple(word.strip() for word in keys.get("ends", "exit").split(","))
    network, run = keys.get("network", ""), keys.get("run", "")
    for key, words, known in (("ends", ends, _ENDS), ("network", (network,), _NETWORKS), ("run", (run,), _RUNS)):
        if not set(words) <= set(known):
            raise ValueError(f"{path}: {key}: {keys[key]}; known values: {', '.join(filter(None, known))}")
    seconds = float(keys.get("seconds", "10"))
    settings = {key: value for key, value in keys.items() if key in ("kind", "run", "host", "network", "needs")}
    within = float(keys.get("within", seconds))
    description = " ".join(description.split())
    return Attack(name=path.stem, description=description, program=text, seconds=seconds, within=within, ends=ends, **settings)


def _trick(name: str) -> Attack:
    description = f"A compromised exec server: {hostile_server.TRICKS[name]}"
    step = "snapshot" if name in _SNAPSHOT_TRICKS else "run"
    return Attack(name=f"server_{name}", kind="protocol", description=description, trick=name, host=step, seconds=1.0)


def hostile_server_source(trick: str) -> str:
    """Returns the source of an exec server that plays `trick`."""
    return HOSTILE_SERVER.read_text(encoding="utf-8").replace('TRICK = ""', f"TRICK = {trick!r}", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """The result of one attack, such as `AttackResult(name="fork_bomb", kind="resources", verdict="contained", ...)`."""

    name: str
    kind: str
    description: str
    verdict: str  # contained, ESCAPED, error, or "not promised" if the promise needs rights that this user lacks
    evidence: str  # one line
    wall_s: float


Report = Callable[[AttackResult], None]


async def run_attacks(
    backend: ChannelBackend, spec: SandboxSpec, *, only: str = "", report: Report = lambda result: None
) -> list[AttackResult]:
    """Runs the attacks whose name contains `only`: programs one after the other, hostile servers a few at a time.

    Raises `SandboxError` or `UserError` if the backend cannot open any sandbox.
    """
    chosen = [item for item in load_attacks() if only in item.name]
    neighbour = await backend.open(spec)
    try:
        async with arena(spec, neighbour, backend.ways()) as host:
            suite = _Suite(backend, host, report)
            try:
                return await suite.run(chosen)
            finally:
                await suite.close()
    finally:
        await neighbour.close()


class _Suite:
    def __init__(self, backend: ChannelBackend, host: Arena, report: Report) -> None:
        self._backend = backend
        self._arena = host
        self._report = report
        self._next: ChannelSandbox | None = None  # opened after the last attack, used by the next one

    async def run(self, chosen: list[Attack]) -> list[AttackResult]:
        """Runs programs one after the other and, at the same time, the hostile servers that only make the driver wait. Then runs the other
        hostile servers."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run_server(item: Attack) -> AttackResult:
            async with slots:
                return await self._run(item, self._hostile_server)

        async with asyncio.TaskGroup() as group:
            slow = [group.create_task(run_server(item)) for item in chosen if item.trick in hostile_server.SLOW_TRICKS]
            results = [await self._run(item, self._program) for item in chosen if not item.trick]
            rest = [group.create_task(run_server(item)) for item in chosen if item.trick and item.trick not in hostile_server.SLOW_TRICKS]
        by_name = {result.name: result for result in (*results, *(task.result() for task in (*slow, *rest)))}
        return [by_name[item.name] for item in chosen]

    async def close(self) -> None:
        if self._next is not None:
            await self._next.close()

    async def _run(self, item: Attack, play: Callable[[Attack], Awaitable[str]]) -> AttackResult:
        start = time.monotonic()
        try:
            if missing := _missing(item, self._backend):
                verdict, evidence = _NOT_PROMISED, missing
            else:
                verdict, evidence = _CONTAINED, await _in_time(item, play)
        except Escaped as escape:
            verdict, evidence = _ESCAPED, str(escape)
        except (AttackFailed, AgentRLError, ValueError, OSError) as error:
            verdict, evidence = _ERROR, f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and not isinstance(error, AgentRLError):  # a `SandboxTimeout` is both
                verdict, evidence = _ESCAPED, f"the driver hung for {item.seconds + _HANG_S:.0f} s"
        self._arena.trouble.clear()
        self._arena.allowed.trouble.clear()
        result = AttackResult(
            name=item.name,
            kind=item.kind,
            description=item.description,
            verdict=verdict,
            evidence=" ".join(evidence.split())[:200],
            wall_s=time.monotonic() - start,
        )
        self._report(result)
        return result

    async def _program(self, item: Attack) -> str:
        sandbox = await self._take(item)
        try:
            await sandbox.write_all({"arena.json": self._arena.facts(), "program.py": item.program.encode()})
            namespace = await namespace_of(sandbox)
            evidence = await self._play(item, sandbox)
            await _check_answers(sandbox)
        finally:
            await _close(sandbox)
        await wait_until_gone(sandbox, namespace)
        self._arena.check()
        await self._open_next()
        return evidence

    async def _hostile_server(self, item: Attack) -> str:
        with server_code.as_file(hostile_server_source(item.trick).encode()) as server:
            try:
                sandbox = await self._backend.open(self._arena.spec, timeout_s=_OPEN_HOSTILE_S, server=server)
            except SandboxError as error:
                evidence = f"not opened: {type(error).__name__}: {str(error)[-80:]}"
            else:
                try:
                    evidence = await self._play(item, sandbox)
                finally:
                    await _close(sandbox)
                await wait_until_gone(sandbox, None)
        self._arena.check()
        return evidence

    async def _take(self, item: Attack) -> ChannelSandbox:
        """Returns the sandbox that was opened after the last attack or, if the attack needs an allow-list, a new sandbox."""
        ready, self._next = self._next, None
        if not item.network:
            return ready or await self._backend.open(self._arena.spec, timeout_s=_OPEN_S)
        if ready is not None:
            await ready.close()
        spec = replace(self._arena.spec, network=(f"127.0.0.1:{self._arena.ports[item.network]}",))
        return await self._backend.open(spec, timeout_s=_OPEN_S)

    async def _play(self, item: Attack, sandbox: ChannelSandbox) -> str:
        result, evidence = None, ""
        if item.program:
            start = time.monotonic()
            try:
                if item.run:
                    result = await sandbox.python(item.program, timeout_s=item.seconds, session=SESSION if item.run == "session" else "")
                else:
                    result = await sandbox.exec(["python3", "-I", "program.py"], timeout_s=item.seconds)
            except SandboxError as error:
                raise Escaped(f"the sandbox failed, so the episode has no result: {error}") from None
            if time.monotonic() - start > item.within + _LATE_S:
                raise Escaped(f"the answer came after {time.monotonic() - start:.1f} s; at most {item.within:.1f} s are allowed")
            evidence = _evidence(item, result, self._arena.secret)
        if item.host:
            try:
                seen = await STEPS[item.host](StepContext(arena=self._arena, backend=self._backend, sandbox=sandbox, result=result))
            except SandboxError as error:
                raise Escaped(f"the host's own call failed: {error}") from None
            evidence = f"{evidence}; {seen}" if evidence else seen
        return evidence

    async def _open_next(self) -> None:
        """Opens a sandbox for the next attack. Raises `Escaped` if the new sandbox contains a trace of the last one."""
        code = (
            "import os\n"
            f"mark = {self._arena.mark!r}\n"
            "traces = [folder for folder, folders, names in os.walk('/') if mark in names or (folder == '/' and folders.remove('proc'))]\n"
            "traces += [pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())]\n"
            "for name in ('shm', 'msg', 'sem'):\n"
            "    try:\n"
            "        with open('/proc/sysvipc/' + name) as file: traces += file.readlines()[1:]\n"
            "    except OSError: pass\n"
            "print(traces)\n"
        )
        try:
            self._next = await self._backend.open(self._arena.spec, timeout_s=_OPEN_S)
            result = await self._next.python(code, timeout_s=20)
        except SandboxError as error:
            raise Escaped(f"no fresh sandbox opened: {error}") from None
        if result.stdout != "[]\n":
            raise Escaped(f"the next sandbox has a trace of the last one: {result.stdout or result}")


async def _in_time(item: Attack, play: Callable[[Attack], Awaitable[str]]) -> str:
    """Returns the evidence from an attack. If the time runs out before the attack takes effect, reruns the attack with `BUSY_S` more
    seconds."""
    try:
        async with asyncio.timeout(item.seconds + _HANG_S):
            return await play(item)
    except AttackCutOff:
        longer = replace(item, seconds=item.seconds + BUSY_S, within=item.within + BUSY_S)
        async with asyncio.timeout(longer.seconds + _HANG_S):
            return await play(longer)


def _evidence(item: Attack, result: ExecResult, secret: str) -> str:
    text = result.stdout + "\n" + result.stderr
    if secret in text:
        raise Escaped("the program printed a file of the host")
    lines = text.splitlines()
    if claims := [line for line in lines if line.startswith(_ESCAPED)]:
        raise Escaped(claims[0].removeprefix("ESCAPED: "))
    passed = [line for line in lines if line.startswith("held: ")]
    end = result.reason or "exit"
    if end == "timeout" and not passed:
        raise AttackCutOff(f"the attack's {item.seconds:g} s ended before it took effect")
    if end not in item.ends or not passed:
        raise AttackFailed(f"ended by {end} {result.exit_code}, with the output {text.strip()[-300:]!r}")
    return passed[-1].removeprefix("held: ") + (f" ({end})" if end != "exit" else "")


async def _check_answers(sandbox: ChannelSandbox) -> None:
    """Raises `Escaped` if the attacked sandbox returns a wrong result or no longer responds. Programs in the sandbox may fail."""
    first, second = random.randrange(10**6), random.randrange(10**6)
    total = str(first + second)
    try:
        answers = {
            "a snippet": await sandbox.python(f"import json; print(json.loads('{first}') + {second})", timeout_s=20),
            "an interpreter": await sandbox.exec(["python3", "-I", "-c", f"import csv, json; print({first} + {second})"], timeout_s=20),
            "a shell": await sandbox.exec(["sh", "-c", f"echo $(({first} + {second}))"], timeout_s=20),
            "cat": await sandbox.exec(["cat"], stdin=f"{total}\n".encode(), timeout_s=20),
        }
        if (await sandbox.exec(["false"], timeout_s=20)).exit_code == 0:
            raise Escaped("`false` succeeds")
        for name, result in answers.items():
            if result.exit_code == 0 and result.stdout != f"{total}\n":
                raise Escaped(f"{name} now returns {result.stdout[:100]!r}")
        try:
            await sandbox.write("after", total.encode())
            content = await sandbox.read("after", max_bytes=1000)
        except (ValueError, FileNotFoundError):
            return
        if content != total.encode():
            raise Escaped(f"a file written as {total!r} reads as {content!r}")
    except SandboxError as error:
        raise Escaped(f"the sandbox no longer answers: {error}") from None


async def _close(sandbox: ChannelSandbox) -> None:
    try:
        async with asyncio.timeout(_OPEN_S):
            await sandbox.close()
    except TimeoutError:
        raise Escaped(f"the sandbox did not close within {_OPEN_S:.0f} s") from None


def _missing(item: Attack, backend: ChannelBackend) -> str:
    """Returns the reason why the promise that an attack tests does not apply to this backend and machine; empty if it applies."""
    if item.needs in ("control groups", "two users") and backend.name == "bubblewrap" and os.geteuid() != 0:
        return f"needs {item.needs}, which bubblewrap has only as root"
    if item.needs == "cell" and backend.name != item.needs:
        return "applies only to cells"
    if item.network == "gateway" and find_spec("uvicorn") is None:
        return "needs the gateway, whose packages are not installed"
    if item.needs.startswith(("x86", "aarch")) and platform.machine() != item.needs:
        return f"applies only to {item.needs}"
    return ""
