"""What an attack must not change: a file, a process and ports of the host, the driver, and a neighbour sandbox at work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from agentrl.errors import SandboxError
from agentrl.gateway.server import Gateway
from agentrl.gateway.session import Session
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import cgroups, reaper
from agentrl.sandbox.attacks.allowed_server import AllowedServer

NEIGHBOUR_S = 20.0
STANDSTILL_S = 5.0
MEMORY_MB = 512
SPARE_DESCRIPTORS, EACH_DESCRIPTORS = 64, 4
CLEAR_S = 15.0
DAEMON = "/docker/"
"""In the paths of mounts that a daemon makes and removes for containers, including other drivers'."""
HOST_FILES = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe", "/proc/swaps")


class Escaped(Exception):
    """An attack got what it must not get; the message is the evidence."""


class AttackFailed(Exception):
    """An attack did not run as intended, so it proves nothing; the message says why."""


class AttackCutOff(AttackFailed):
    """The attack's time ended before it came to its point: the machine was busy."""


@dataclass(slots=True)
class Arena:
    """The host's side of a suite on one backend. `secret` is the content of a host file; `mark` names what attacks leave behind."""

    spec: SandboxSpec
    folder: Path
    neighbour: Sandbox
    canary: subprocess.Popen[bytes]
    tcp: socket.socket
    local: socket.socket
    abstract: socket.socket
    allowed: AllowedServer
    gateway_port: int  # 0 without the gateway's packages
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    mark: str = field(default_factory=lambda: "agentrl-mark-" + secrets.token_hex(8))
    trouble: list[str] = field(default_factory=list)  # what the watchers saw since the last reset
    sandboxes: int = 0  # additional ones that a step has opened; each takes descriptors of the driver
    slowest_s: float = 0.0  # of the neighbour's answers
    _before: dict[str, object] = field(default_factory=dict)

    @property
    def ports(self) -> dict[str, int]:
        """Ports of the host's servers that an allow-list may contain."""
        return {"allowed": self.allowed.port, "gateway": self.gateway_port}

    def facts(self) -> bytes:
        """What an attacker knows, as `arena.json`."""
        known = {
            **asdict(self.spec),
            "tcp_port": self.tcp.getsockname()[1],
            **{f"{name}_port": port for name, port in self.ports.items()},
            "socket_path": str(self.folder / "socket"),
            "abstract": self.mark,
            "host_pid": self.canary.pid,
            "secret_path": str(self.folder / "secret"),
            "mark": self.mark,
        }
        return json.dumps(known).encode()

    def remember(self) -> None:
        """Records the state that `check` compares with."""
        self._before = self._state()

    def check(self) -> None:
        """Raises `Escaped` when something of the host or the driver has changed since `remember`, and remembers it: it is told once."""
        before, self._before = self._before, self._state()
        for name, now in self._before.items():
            if now != before[name]:
                raise Escaped(f"{name} changed {_difference(before[name], now)}")
        for listener in (self.tcp, self.local, self.abstract):
            with contextlib.suppress(BlockingIOError):
                link, _ = listener.accept()
                link.close()
                raise Escaped(f"someone connected to the host's {listener.getsockname()!r}")
        if trouble := [*self.trouble, *self.allowed.trouble]:
            raise Escaped("; ".join(trouble[:3]))

    def _state(self) -> dict[str, object]:
        stat = Path(f"/proc/{self.canary.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "the host's file": (self.folder / "secret").read_text() + (self.folder / "open").read_text(),
            "the host's folder": sorted(path.name for path in self.folder.iterdir()),
            "the host's process": (self.canary.poll(), stat[0] == "T", stat[16], len(os.sched_getaffinity(self.canary.pid))),
            "the kernel's settings": [Path(path).read_text() for path in HOST_FILES if Path(path).exists()],
            "the driver's mounts": _mounts(),
            "the driver's limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
        }

    async def watch(self) -> None:
        """Keeps the neighbour computing, and watches that the driver's event loop runs, until cancelled."""
        loop = asyncio.get_running_loop()
        memory = _peak_mb()
        descriptors = _descriptors()
        while True:
            start = loop.time()
            try:
                result = await self.neighbour.python("print(6 * 7, open('kept').read())", timeout_s=NEIGHBOUR_S)
                if (result.exit_code, result.stdout) != (0, f"42 {self.mark}\n"):
                    self.trouble.append(f"the neighbour computed a wrong result: {result}")
            except (SandboxError, ValueError) as error:
                self.trouble.append(f"the neighbour fails: {error}")
                return
            self.slowest_s = max(self.slowest_s, loop.time() - start)
            start = loop.time()
            await asyncio.sleep(0.2)
            if loop.time() - start > STANDSTILL_S:
                self.trouble.append(f"the driver stood still for {loop.time() - start:.1f} s")
            if _peak_mb() > memory + MEMORY_MB:
                memory = _peak_mb()
                self.trouble.append(f"the driver grew to {memory} MiB")
            if _descriptors() > descriptors + SPARE_DESCRIPTORS + EACH_DESCRIPTORS * self.sandboxes:
                descriptors = _descriptors()
                self.trouble.append(f"the driver holds {descriptors} descriptors")


@asynccontextmanager
async def arena(spec: SandboxSpec, neighbour: Sandbox) -> AsyncIterator[Arena]:
    """Sets up the host's side, and tears it down in any case."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-attack-")))
        folder.chmod(0o755)  # an attack that reaches it may read
        canary = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(canary.wait)
        stack.callback(canary.kill)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        allowed = await stack.enter_async_context(AllowedServer())
        gateway_port = await stack.enter_async_context(_gateway())
        host = Arena(
            spec=spec,
            folder=folder,
            neighbour=neighbour,
            canary=canary,
            tcp=tcp,
            local=local,
            abstract=abstract,
            allowed=allowed,
            gateway_port=gateway_port,
        )
        local.bind(str(folder / "socket"))
        abstract.bind("\0" + host.mark)
        (folder / "socket").chmod(0o777)
        for listener in (tcp, local, abstract):
            listener.listen()
            listener.setblocking(False)
        (folder / "secret").write_text(host.secret)
        (folder / "open").write_text("untouched")
        (folder / "open").chmod(0o666)
        await neighbour.write("kept", host.mark.encode())
        host.remember()
        watcher = asyncio.create_task(host.watch(), name="attack watcher")
        try:
            yield host
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


class _Keyless(Session):
    """A session without an episode: no attack has its key."""

    async def close(self) -> None:
        return


@asynccontextmanager
async def _gateway() -> AsyncIterator[int]:
    """The port of a gateway without a session that an attack has a key for; 0 if its packages are not installed."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        yield 0
        return
    gateway, nobody = Gateway(), cast(Any, None)
    async with gateway.session(_Keyless(episode=nobody, tokens=nobody, models=())):
        yield int(gateway.url.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The process namespace of a sandbox, seen from the host."""

    link: str  # such as pid:[4026532301]; empty: unknown
    seen: float  # seconds after boot at which it was surely this sandbox's

    def processes(self) -> list[int]:
        """Its processes by host pid, as far as this user may see them; none once another namespace has its number."""
        inside = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _reads(f"/proc/{entry}/ns/pid") == self.link]
        reused = any(_inside(pid) == 1 and _started(pid) > self.seen for pid in inside)
        return [] if reused else inside


async def namespace_of(sandbox: Sandbox) -> Namespace:
    """The sandbox's process namespace; ask before anything hostile runs there."""
    result = await sandbox.python("import os; print(os.readlink('/proc/self/ns/pid'))", timeout_s=NEIGHBOUR_S)
    return Namespace(link=result.stdout.strip(), seen=time.clock_gettime(time.CLOCK_BOOTTIME))


async def wait_until_gone(sandbox: Sandbox, namespace: Namespace | None) -> None:
    """Waits until no process, container, folder or control group of a closed sandbox exists. Raises `Escaped` when some stay."""
    deadline = time.monotonic() + CLEAR_S
    while left := await asyncio.to_thread(_left, sandbox.id, namespace):
        if time.monotonic() > deadline:
            raise Escaped(f"still there {CLEAR_S:.0f} s after the sandbox was closed: {left[:5]}")
        await asyncio.sleep(0.05)


def _left(name: str, namespace: Namespace | None) -> list[str]:
    left = [f"process {pid}" for pid in namespace.processes()] if namespace is not None else []
    left += [f"{item.backend} sandbox" for item in reaper.list_open() if item.name == name]
    return [*left, *(f"control group {folder}" for folder, _, _ in os.walk(cgroups.MOUNT) if os.path.basename(folder) == name)]


def _mounts() -> frozenset[str]:
    """Where this process sees a file system mounted, and of what kind."""
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if DAEMON not in line)
    return frozenset(f"{words[4]} ({words[words.index('-') + 1]} {words[0]})" for words in lines)


def _difference(before: object, now: object) -> str:
    if isinstance(before, frozenset) and isinstance(now, frozenset):
        return f"by {sorted(now - before)} more and {sorted(before - now)} fewer"
    return f"from {before!r} to {now!r}"


def _reads(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it has ended, or is another user's
        return ""


def _inside(pid: int) -> int:
    """The number of a process in its own namespace; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _started(pid: int) -> float:
    """Seconds after boot at which a process started; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
