"""The host's steps after attacks on files, archives and arguments. The sandbox must respond in time, and with the correct type of error."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentrl.errors import SandboxError
from agentrl.sandbox.attacks.arena import Escaped
from agentrl.sandbox.attacks.host_steps import StepContext, hold
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.conformance.bench import MEBIBYTE
from agentrl.task.outputs import CollectedOutputs, collect_outputs

T = TypeVar("T")
_RACE_S = 1.5
_DEADLINE_S = 10.0  # for one operation on an agent's files, on a busy machine
_TEXTS = (
    *("\ud800", "\udfff/x", "\udcff", "a\0b", "", ".", "..", "/etc/passwd", "a/../../b"),
    *("x" * 256, "x/" * 5000 + "x", "=", "A=B", "\u202e"),
)  # what a model may write as a name, an argument or a variable of a tool


async def _in_time(action: str, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await work
    except TimeoutError:
        raise Escaped(f"{action} took more than {_DEADLINE_S:.0f} s") from None


async def _outputs(context: StepContext) -> CollectedOutputs:
    return await _in_time("collecting the outputs", collect_outputs(context.sandbox, ["**", "result"]))


async def _bytes_or_refusal(work: Awaitable[bytes]) -> bytes | None:
    """Returns the bytes from the sandbox, or None if the sandbox refused the request. Raises `SandboxError` if the sandbox fails on the
    attack's files."""
    try:
        return await work
    except (ValueError, FileNotFoundError):
        return None


# Files ----------------------------------------------------------------------------------------------------------------


async def _step_read_result_refused(context: StepContext) -> str:
    data = await _bytes_or_refusal(context.sandbox.read("result", max_bytes=MEBIBYTE))
    hold(data is None, f"read {len(data or b'')} bytes; at most {MEBIBYTE} are allowed")
    archive = await _bytes_or_refusal(context.sandbox.snapshot())
    return f"read refused, snapshot {'refused' if archive is None else f'of {len(archive)} bytes'}"


async def _step_planted_files(context: StepContext) -> str:
    names = ("passwd", "etc/passwd", "environ", "loop", "pipe", "folder", "socket", "zero", "unreadable", "etc/new", "loop/x")
    for name in names:
        data = await _bytes_or_refusal(context.sandbox.read(name, max_bytes=MEBIBYTE))
        hold(data is None, f"read through {name}: {data!r}")
    for name in ("passwd", "pipe", "socket", "zero", "hard"):
        await context.sandbox.write(name, b"new")
        hold(await context.sandbox.read(name, max_bytes=10) == b"new", f"writing {name} did not replace it")
    for name in ("etc/new", "folder", "loop/x"):
        try:
            await context.sandbox.write(name, b"new")
        except ValueError:
            continue
        raise Escaped(f"wrote {name}")
    return f"{len(names)} reads refused"


async def _step_link_race(context: StepContext) -> str:
    loop = asyncio.get_running_loop()
    end = loop.time() + _RACE_S
    own = refused = 0
    while loop.time() < end:
        for name in ("d/now/f", "d/now/passwd", "e/f"):
            data = await _bytes_or_refusal(context.sandbox.read(name, max_bytes=MEBIBYTE))
            hold(data in (None, b"mine", b""), f"{name} returned {data!r}")
            own, refused = own + (data is not None), refused + (data is None)
        try:
            await context.sandbox.write("d/now/written", b"x")
        except ValueError:
            refused += 1
    return f"{own} reads of its own files, {refused} refused"


async def _step_growing_files(context: StepContext) -> str:
    loop = asyncio.get_running_loop()
    end = loop.time() + _RACE_S
    count = 0
    while loop.time() < end:
        data = await _bytes_or_refusal(context.sandbox.read("result", max_bytes=200_000))
        hold(data is None or len(data) <= 200_000, "more bytes than allowed")
        archive = await _bytes_or_refusal(context.sandbox.snapshot())
        hold(archive is None or len(archive) < 4 * MEBIBYTE, "a snapshot larger than its files")
        count += 1
    return f"{count} reads and snapshots within the limits"


# Snapshots ------------------------------------------------------------------------------------------------------------


async def _step_snapshot_refused(context: StepContext) -> str:
    archive = await _bytes_or_refusal(context.sandbox.snapshot())
    return "snapshot refused" if archive is None else f"snapshot of {len(archive)} bytes"


async def _step_snapshot(context: StepContext) -> str:
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        await context.sandbox.snapshot()
    except (SandboxError, ValueError) as error:
        hold(loop.time() - start < 20.0, f"a hostile archive blocked the driver for {loop.time() - start:.0f} s")
        return f"{type(error).__name__}: {str(error)[-80:]}"
    raise Escaped("the host accepted an endless archive")


async def _step_snapshot_opens(context: StepContext) -> str:
    async with context.fresh(snapshot=await context.sandbox.snapshot()) as copy:
        names = "import os; print(sorted(os.listdir('.')) == sorted(eval(open('/dev/stdin').read())), os.path.exists('/tmp/x'))"
        listing = await context.output("import os; print(os.listdir('.'))")
        result = await copy.exec(["python3", "-I", "-c", names], stdin=listing.encode("utf-8", "replace"), timeout_s=10)
        count = (await copy.python("import os; print(len(os.listdir('.')))", timeout_s=10)).stdout.strip()
        hold(result.exit_code in (0, 1) and int(count) >= 15, f"the copy contains {count} entries: {result}")
    return f"a copy with {count} entries"


async def _step_captured(context: StepContext) -> str:
    """A snapshot succeeds, and a sandbox opened from it has the same files, whatever their modes and names."""
    try:
        archive = await _in_time("a snapshot", context.sandbox.snapshot())
        copy = await _in_time("opening from a snapshot", context.backend.open(context.arena.spec, snapshot=archive))
    except ValueError as error:
        raise Escaped(f"the agent prevented a snapshot: {error}") from None
    try:
        again = await copy.snapshot()
    finally:
        await copy.close()
    if again != archive:
        raise Escaped(f"the archive of a copy differs from the original: {len(again)} bytes instead of {len(archive)}")
    outputs = await _outputs(context)
    return f"a snapshot of {len(archive)} bytes opens unchanged; {len(outputs.files)} outputs, {len(outputs.refused)} refused"


async def _step_captured_or_too_large(context: StepContext) -> str:
    try:
        snapshot = f"a snapshot of {len(await _in_time('a snapshot', context.sandbox.snapshot()))} bytes"
    except ValueError as error:
        if "the working directory" not in str(error):
            raise Escaped(f"refused for a reason other than size: {error}") from None
        snapshot = str(error)
    outputs = await _outputs(context)
    return f"{snapshot}; {len(outputs.files)} outputs, {len(outputs.refused)} refused"


async def _step_nobody_at_the_outputs(context: StepContext) -> str:
    outputs = await _outputs(context)
    left = await context.other_processes()
    hold(left == "[]", f"processes {left} continued while outputs were collected")
    return f"{len(outputs.files)} outputs, and no other process"


# Archives -------------------------------------------------------------------------------------------------------------


async def _step_hostile_archives(context: StepContext) -> str:
    archives = _archives()
    refused = 0
    for name, archive in archives.items():
        try:
            await context.sandbox.restore(archive)
        except ValueError:
            refused += 1
        except SandboxError as error:
            raise Escaped(f"the archive {name!r} broke the sandbox: {error}") from None
    escaped = await context.output(
        "import glob, os, stat\n"
        "outside = [p for top in ('/tmp', '/home', '/dev/shm', '/etc', '/') for p in glob.glob(top + '/evil*')]\n"
        "inside = {p: os.lstat(p).st_mode for p in glob.glob('**', recursive=True)}\n"
        "odd = [p for p, mode in inside.items() if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)]\n"
        "suid = [p for p, mode in inside.items() if mode & 0o6000]\n"
        "shared = [p for p in glob.glob('hard*') if os.path.isfile(p) and os.stat(p).st_nlink > 1]\n"
        "print(outside + odd + suid + shared)\n"
    )
    hold(escaped == "[]", f"unpacked outside the working directory, or as something other than a file: {escaped}")
    return f"{refused} of {len(archives)} refused, the rest stayed inside"


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
        "link, then a file with the same name": [member("twice", tarfile.SYMTYPE, "/tmp/evil"), member("twice", size=4)],
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
    archives["claims more than it contains"] = _tar([member("claim", size=4)], claim=1 << 40)
    archives["fills the disk"] = _tar([member("fill", size=4)], claim=512 * MEBIBYTE)
    archives["noise"] = bytes(range(256)) * 64
    archives["compressed"] = b"\x1f\x8b\x08\x00" + bytes(1000)
    return archives


def _tar(members: list[tarfile.TarInfo], claim: int = 0) -> bytes:
    """Returns an archive of `members`. A block of content follows each member whose size is not 0. A `claim` other than 0 replaces the
    sizes in the headers."""
    out = io.BytesIO()
    for info in members:
        info.size, real = claim or info.size, info.size
        out.write(info.tobuf(tarfile.PAX_FORMAT))
        out.write((b"evil" * 128)[:512] if real else b"")
    return out.getvalue() + bytes(1024)


# Arguments ------------------------------------------------------------------------------------------------------------


async def _step_odd_arguments(context: StepContext) -> str:
    """For any text that a model writes in any argument, the sandbox returns a result or raises an error that does not blame the machine."""
    refused = answered = 0
    for text in _TEXTS:
        for name, call in _CALLS.items():
            try:
                await _in_time(name, call(context.sandbox, text))
                answered += 1
            except (ValueError, FileNotFoundError) as error:
                str(error).encode()
                refused += 1
            except SandboxError as error:
                raise Escaped(f"{name} with {text[:20]!r} ended the sandbox, and the error blames the machine: {error}") from None
    result = await context.sandbox.exec(["sh", "-c", "exit 70"], timeout_s=10)
    hold(result.exit_code == 70, f"a program's exit code 70 became {result}")
    return f"{refused} refused, {answered} answered"


async def _run_with(sandbox: ChannelSandbox, env: dict[str, str]) -> None:
    """Runs `true` with these variables. Raises `Escaped` if a failure to start `true` looks like an exit of `true`."""
    result = await sandbox.exec(["true"], env=env, timeout_s=10)
    hold(result.exit_code == 0, f"`true` with {env!r:.60} appears to exit with {result.exit_code}")


_CALLS: dict[str, Callable[[ChannelSandbox, str], Awaitable[object]]] = {
    "read": lambda sandbox, text: sandbox.read(text, max_bytes=MEBIBYTE),
    "write": lambda sandbox, text: sandbox.write(text, b"x"),
    "argv": lambda sandbox, text: sandbox.exec(["true", text], timeout_s=10),
    "program": lambda sandbox, text: sandbox.exec([text], timeout_s=10),
    "a variable's name": lambda sandbox, text: _run_with(sandbox, {text: "x"}),
    "a variable": lambda sandbox, text: _run_with(sandbox, {"X": text}),
    "code": lambda sandbox, text: sandbox.python(f"print({text!r}, '{text}')", timeout_s=10),
    "session": lambda sandbox, text: sandbox.python("1", timeout_s=10, session=text),
}
