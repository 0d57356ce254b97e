"""Steps of the host after an attack's program, or instead of one: it reads, writes, snapshots and restores hostile files.

A step raises `Escaped` with the evidence, or returns a line on what held. A typed error is an answer; a hang is not.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import ExecResult
from agentrl.sandbox.attacks.arena import Arena, AttackFailed, Escaped
from agentrl.sandbox.backend import ChannelBackend
from agentrl.sandbox.channel_sandbox import ChannelSandbox

MEBIBYTE = 1 << 20
RACE_S = 1.5
SESSION = "main"
"""Name of the session that attacks run in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The input of a step; `result` is the program's, None without one or when the sandbox is gone."""

    arena: Arena
    backend: ChannelBackend
    sandbox: ChannelSandbox
    result: ExecResult | None = None

    async def says(self, code: str) -> str:
        result = await self.sandbox.python(code, timeout_s=10)
        return result.stdout.strip() if result.ok else repr(result)


Step = Callable[[StepContext], Awaitable[str]]
STEPS: dict[str, Step] = {}


def _step(work: Step) -> Step:
    STEPS[work.__name__.removeprefix("_")] = work
    return work


def _hold(condition: bool, evidence: object) -> None:
    if not condition:
        raise Escaped(str(evidence)[:300])


async def _bytes_or_refusal(work: Awaitable[bytes]) -> bytes | None:
    """The sandbox's answer, None when it refused. A sandbox that breaks on hostile files raises `SandboxError`."""
    try:
        return await work
    except (ValueError, FileNotFoundError):
        return None


# After programs -------------------------------------------------------------------------------------------------------


@_step
async def _user_quotas(scene: StepContext) -> str:
    code = (
        "import ctypes, os, signal\n"
        "libc = ctypes.CDLL(None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "print(libc.inotify_init1(0) >= 0, libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0)\n"
    )
    result = await scene.arena.neighbour.python(code, timeout_s=10)
    _hold(result.stdout == "True True\n", f"the neighbour gets no inotify instance or no queued signal: {result.stdout!r}")
    return "the neighbour has its own"


@_step
async def _terminals(scene: StepContext) -> str:
    """While they are held, the neighbour and a fresh sandbox get theirs."""
    code = "import os\nkept = [os.openpty() for _ in range(4)]\nprint(len(kept))"
    fresh = await scene.backend.open(scene.arena.spec)
    try:
        for name, sandbox in (("the neighbour", scene.arena.neighbour), ("a fresh sandbox", fresh)):
            result = await sandbox.python(code, timeout_s=10)
            _hold(result.stdout == "4\n", f"{name} gets no terminal: {result.stderr[-200:]!r}")
    finally:
        await fresh.close()
    return "others have theirs"


@_step
async def _asynchronous_io(scene: StepContext) -> str:
    taken, most = (int(Path(f"/proc/sys/fs/aio-{name}").read_text()) for name in ("nr", "max-nr"))
    _hold(taken < most // 2, f"{taken} of the machine's {most} requests of asynchronous input and output are taken")
    return f"{taken} of {most} taken"


@_step
async def _filter_budget(scene: StepContext) -> str:
    fresh = await scene.backend.open(scene.arena.spec)
    await fresh.close()
    return "a fresh sandbox has its own"


@_step
async def _read_result_refused(scene: StepContext) -> str:
    data = await _bytes_or_refusal(scene.sandbox.read("result", max_bytes=MEBIBYTE))
    _hold(data is None, f"read {len(data or b'')} bytes where {MEBIBYTE} were allowed")
    archive = await _bytes_or_refusal(scene.sandbox.snapshot())
    return f"read refused, snapshot {'refused' if archive is None else f'of {len(archive)} bytes'}"


@_step
async def _snapshot_refused(scene: StepContext) -> str:
    archive = await _bytes_or_refusal(scene.sandbox.snapshot())
    return "snapshot refused" if archive is None else f"snapshot of {len(archive)} bytes"


@_step
async def _nobody_is_left(scene: StepContext) -> str:
    code = "import os\nprint([pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())])"
    left = await scene.says(code)
    _hold(left == "[]", f"processes {left} outlived the timeout")
    return "nobody is left"


@_step
async def _timeout_leaves_nobody(scene: StepContext) -> str:
    result = await scene.sandbox.exec(["sleep", "60"], timeout_s=0.5)
    _hold(result.reason == "timeout" or result.exit_code == 126, f"sleep ended: {result}")
    if result.exit_code == 126:
        return "it fills its own process limit"
    return await _nobody_is_left(scene)


@_step
async def _others_are_out_of_reach(scene: StepContext) -> str:
    for _ in range(20):
        _hold(await scene.says("print(1)") == "1", "a program did not run")
        await asyncio.sleep(0.05)
    seen, done = (await scene.sandbox.read("reached", max_bytes=1000)).decode().split(" ", 1)
    if int(seen) == 0:
        raise AttackFailed("it saw no process of the server's")
    _hold(done == "", f"it reached a process of the server's: {done}")
    return f"{seen} processes of the server's were out of reach"


@_step
async def _sessions_answer(scene: StepContext) -> str:
    """The attacked session may answer anything, in time; after its end, and in another session, answers are true."""
    own = await scene.sandbox.python("6 * 7", timeout_s=5, session=SESSION)
    said = own.reason or f"exit {own.exit_code}"
    other = await scene.sandbox.python("6 * 7", timeout_s=10, session="other")
    _hold((other.exit_code, other.stdout) == (0, "42\n"), f"another session says {other}")
    slept = await scene.sandbox.exec(["sleep", "60"], timeout_s=0.5)
    _hold(slept.reason == "timeout", f"sleep ended: {slept}")
    for code, wanted in (("6 * 7", (0, "42\n")), ("1 / 0", (1, ""))):
        own = await scene.sandbox.python(code, timeout_s=10, session=SESSION)
        _hold((own.exit_code, own.stdout) == wanted and own.restarted == (code == "6 * 7"), f"after its end the session says {own}")
    return f"{said}; true answers after its end"


@_step
async def _session_lies(scene: StepContext) -> str:
    for number in range(500):
        result = await scene.sandbox.python(f"print({number})", timeout_s=5, session=SESSION)
        _hold(result.reason != "timeout", f"call {number} of a session that does not listen: {result}")
        if result.restarted:
            _hold(result.stdout == f"{number}\n", f"a fresh session says {result}")
            return f"taken at its word {number} times, then ended; {await _sessions_answer(scene)}"
    raise Escaped("calls pile up without end in a session that does not listen")


@_step
async def _session_heirs(scene: StepContext) -> str:
    _hold(scene.result is not None and scene.result.session_ended, "the session lives on")
    await asyncio.sleep(0.5)
    for number in range(20):
        result = await scene.sandbox.python(f"print({number}); {number} / {number % 2}", timeout_s=10, session=SESSION)
        wanted = (0, f"{number}\n{number / 1}\n") if number % 2 else (1, f"{number}\n")
        _hold((result.exit_code, result.stdout) == wanted, f"call {number} gave {result}")
        await asyncio.sleep(0.02)
    taken = await scene.sandbox.read("taken", max_bytes=100)
    _hold(taken == b"0", f"the heir took the socket of a session {taken!r} times")
    return "the next session spoke for itself"


@_step
async def _output_is_only_output(scene: StepContext) -> str:
    _hold(scene.result is not None and scene.result.exit_code == 7 and not scene.result.truncated, f"the host took {scene.result}")
    return "exit code 7 arrived"


@_step
async def _planted_files(scene: StepContext) -> str:
    names = ("passwd", "etc/passwd", "environ", "loop", "pipe", "folder", "socket", "zero", "unreadable", "etc/new", "loop/x")
    for name in names:
        data = await _bytes_or_refusal(scene.sandbox.read(name, max_bytes=MEBIBYTE))
        _hold(data is None, f"read through {name}: {data!r}")
    for name in ("passwd", "pipe", "socket", "zero", "hard"):
        await scene.sandbox.write(name, b"new")
        _hold(await scene.sandbox.read(name, max_bytes=10) == b"new", f"writing {name} did not replace it")
    for name in ("etc/new", "folder", "loop/x"):
        try:
            await scene.sandbox.write(name, b"new")
        except ValueError:
            continue
        raise Escaped(f"wrote {name}")
    return f"{len(names)} reads refused"


@_step
async def _link_race(scene: StepContext) -> str:
    loop = asyncio.get_running_loop()
    end = loop.time() + RACE_S
    seen = {"refused": 0, "own": 0}
    while loop.time() < end:
        for name in ("d/now/f", "d/now/passwd", "e/f"):
            data = await _bytes_or_refusal(scene.sandbox.read(name, max_bytes=MEBIBYTE))
            _hold(data in (None, b"mine", b""), f"{name} gave {data!r}")
            seen["refused" if data is None else "own"] += 1
        try:
            await scene.sandbox.write("d/now/written", b"x")
        except ValueError:
            seen["refused"] += 1
    return f"{seen['own']} reads of its own files, {seen['refused']} refused"


@_step
async def _growing_files(scene: StepContext) -> str:
    loop = asyncio.get_running_loop()
    end = loop.time() + RACE_S
    reads = snapshots = 0
    while loop.time() < end:
        data = await _bytes_or_refusal(scene.sandbox.read("result", max_bytes=200_000))
        _hold(data is None or len(data) <= 200_000, "more bytes than were allowed")
        reads += 1
        archive = await _bytes_or_refusal(scene.sandbox.snapshot())
        _hold(archive is None or len(archive) < 4 * MEBIBYTE, "a snapshot larger than its files")
        snapshots += 1
    return f"{reads} reads and {snapshots} snapshots bounded"


@_step
async def _snapshot_opens(scene: StepContext) -> str:
    archive = await scene.sandbox.snapshot()
    copy = await scene.backend.open(scene.arena.spec, snapshot=archive)
    try:
        names = "import os; print(sorted(os.listdir('.')) == sorted(eval(open('/dev/stdin').read())), os.path.exists('/tmp/x'))"
        listing = await scene.says("import os; print(os.listdir('.'))")
        result = await copy.exec(["python3", "-I", "-c", names], stdin=listing.encode("utf-8", "replace"), timeout_s=10)
        count = (await copy.python("import os; print(len(os.listdir('.')))", timeout_s=10)).stdout.strip()
        _hold(result.exit_code in (0, 1) and int(count) >= 15, f"the copy holds {count} entries: {result}")
    finally:
        await copy.close()
    return f"a copy with {count} entries"


# Instead of programs --------------------------------------------------------------------------------------------------


@_step
async def _run(scene: StepContext) -> str:
    """A program run by a hostile server gives a typed error, or a result within bounds, in time."""
    try:
        result = await scene.sandbox.exec(["cat"], stdin=bytes(4 * MEBIBYTE), timeout_s=1.0)
    except SandboxTimeout as error:
        return f"SandboxTimeout: {str(error)[-80:]}"
    except (SandboxError, ValueError, FileNotFoundError) as error:
        _hold(str(error).isprintable(), "terminal commands in an error")
        return f"{type(error).__name__}: {str(error)[-80:]!r}"
    _hold(isinstance(result, ExecResult) and len(result.stdout) + len(result.stderr) < 140_000, "a result out of bounds")
    return f"taken for a result of {len(result.stdout)} characters, as any server may answer"


@_step
async def _snapshot(scene: StepContext) -> str:
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        await scene.sandbox.snapshot()
    except (SandboxError, ValueError) as error:
        _hold(loop.time() - start < 20.0, f"a hostile archive held the driver for {loop.time() - start:.0f} s")
        return f"{type(error).__name__}: {str(error)[-80:]}"
    raise Escaped("an archive without end was taken")


@_step
async def _hostile_archives(scene: StepContext) -> str:
    refused = 0
    for name, archive in _archives().items():
        try:
            await scene.sandbox.restore(archive)
        except ValueError:
            refused += 1
        except SandboxError as error:
            raise Escaped(f"the archive {name!r} broke the sandbox: {error}") from None
    escaped = await scene.says(
        "import glob, os, stat\n"
        "outside = [p for top in ('/tmp', '/home', '/dev/shm', '/etc', '/') for p in glob.glob(top + '/evil*')]\n"
        "inside = {p: os.lstat(p).st_mode for p in glob.glob('**', recursive=True)}\n"
        "odd = [p for p, mode in inside.items() if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)]\n"
        "suid = [p for p, mode in inside.items() if mode & 0o6000]\n"
        "shared = [p for p in glob.glob('hard*') if os.path.isfile(p) and os.stat(p).st_nlink > 1]\n"
        "print(outside + odd + suid + shared)\n"
    )
    _hold(escaped == "[]", f"unpacked outside the working directory, or as something other than a file: {escaped}")
    return f"{refused} of {len(_archives())} refused, the rest stayed inside"


def _archives() -> dict[str, bytes]:
    def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size, info.mode = kind, link, size, mode
        info.devmajor, info.devminor = 1, 3
        return info

    chains = {
        "up": [member("../evil")],
        "far up": [member("a/../../../tmp/evil")],
        "absolute": [member("/tmp/evil")],
        "through a link": [member("out", tarfile.SYMTYPE, "/tmp"), member("out/evil")],
        "through two links": [member("o1", tarfile.SYMTYPE, "o2"), member("o2", tarfile.SYMTYPE, "/dev/shm"), member("o1/evil")],
        "link, then a file of its name": [member("twice", tarfile.SYMTYPE, "/tmp/evil"), member("twice", size=4)],
        "hard link": [member("hard", tarfile.LNKTYPE, "/etc/passwd"), member("hard2", tarfile.LNKTYPE, "../../etc/passwd")],
        "device": [member("null", tarfile.CHRTYPE), member("disk", tarfile.BLKTYPE), member("pipe", tarfile.FIFOTYPE)],
        "setuid": [member("suid", size=4, mode=0o6777)],
        "empty name": [member("")],
        "dots": [member("."), member("..", tarfile.DIRTYPE), member("./."), member("x/./y")],
        "NUL": [member("a\0b")],
        "too deep": [member("/".join("d" * 200))],
        "too many": [member(f"n{number}", tarfile.DIRTYPE) for number in range(20_005)],
        "a folder that is a file": [member("thing", size=4), member("thing/evil")],
    }
    archives = {name: _tar(members) for name, members in chains.items()}
    archives["claims more than it holds"] = _tar([member("claim", size=4)], claim=1 << 40)
    archives["fills the disk"] = _tar([member("fill", size=4)], claim=512 * MEBIBYTE)
    archives["noise"] = bytes(range(256)) * 64
    archives["compressed"] = b"\x1f\x8b\x08\x00" + bytes(1000)
    return archives


def _tar(members: list[tarfile.TarInfo], claim: int = 0) -> bytes:
    """An archive of `members`, each with content `evil` of its size; `claim` replaces the size of the last."""
    out = io.BytesIO()
    for info in members:
        info.size, real = claim or info.size, info.size
        out.write(info.tobuf(tarfile.PAX_FORMAT))
        out.write((b"evil" * 128)[:512] if real else b"")
    return out.getvalue() + bytes(1024)
