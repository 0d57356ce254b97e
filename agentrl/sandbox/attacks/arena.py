"""What an attack must not change: files, a process and ports of the host, the driver, and a working neighbour sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from agentrl.base.scratch import ScratchFolder
from agentrl.errors import SandboxError
from agentrl.gateway.server import Gateway
from agentrl.gateway.session import Session
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import cleanup, limits
from agentrl.sandbox.lease import start_time
from agentrl.sandbox.processes import read_process

_NEIGHBOUR_S = 20.0
_STANDSTILL_S = 5.0
_MEMORY_MB = 512
_SPARE_DESCRIPTORS, _DESCRIPTORS_EACH = 64, 4
_CLEAR_S = 15.0
_DAEMON = "/docker/"  # in the paths of mounts that a daemon creates and removes for containers, including those of other drivers
_NETWORKS = "/run/netns/"  # where `ip netns` mounts the network namespaces of other programs
_SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe", "/proc/swaps")

_MAX_HEAD = 1 << 20
_FORBIDDEN = b"/forbidden"  # a path that attacks request in hidden requests, or after the end of a request


class Escaped(Exception):
    """An attack was not contained. The message contains the evidence."""


class AttackFailed(Exception):
    """An attack did not run as intended, so its result proves nothing. The message contains the reason."""


class AttackCutOff(AttackFailed):
    """The time of an attack ran out before the attack took effect, because the machine was busy."""


class AllowedServer:
    """The only server on the host that attacks on the proxy may reach.

    The server is deliberately lax: it answers all requests on a connection, and discards what follows `PUT /sink`. `trouble` describes
    received requests that the proxy must not forward: hidden requests, and requests for a different host.
    """

    def __init__(self) -> None:
        self.trouble: list[str] = []
        self.port = 0

    async def __aenter__(self) -> AllowedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MAX_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\n\r\n")
                hosts = re.findall(rb"(?im)^host:\s*(\S*)", head)
                if _FORBIDDEN in head or hosts != [b"127.0.0.1:%d" % self.port]:
                    self.trouble.append(f"the allowed server received {head[:200]!r}")
                if head.startswith(b"PUT /sink"):
                    while await reader.read(1 << 16):
                        pass
                size = re.search(rb"(?im)^content-length:\s*(\d+)", head)
                if size is not None:
                    await reader.readexactly(int(size[1]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nallowed")
                await writer.drain()
        writer.transport.abort()


@dataclass(slots=True)
class Arena:
    """The host's side of an attack suite that runs against one backend."""

    spec: SandboxSpec
    folder: Path
    neighbour: Sandbox
    ways: dict[str, Any]  # facts about how the driver reaches its sandboxes
    canary: subprocess.Popen[bytes]
    listeners: tuple[socket.socket, socket.socket, socket.socket]  # TCP, a path, an abstract name
    allowed: AllowedServer
    gateway_port: int  # 0 if the gateway's packages are not installed
    secret: str = field(default_factory=lambda: secrets.token_hex(16))  # content of a file on the host
    mark: str = field(default_factory=lambda: "agentrl-mark-" + secrets.token_hex(8))  # name of what attacks leave behind
    trouble: list[str] = field(default_factory=list)  # observations of the watcher since the last reset
    sandboxes: int = 0  # additional sandboxes that a step opened; each uses descriptors of the driver
    _before: dict[str, object] = field(default_factory=dict)

    @property
    def ports(self) -> dict[str, int]:
        """Name -> port of the host's servers that an allow-list may contain."""
        return {"allowed": self.allowed.port, "gateway": self.gateway_port}

    def facts(self) -> bytes:
        """Returns what an attacker knows, as the content of `arena.json`."""
        known = {
            **asdict(self.spec),
            **self.ways,
            "tcp_port": self.listeners[0].getsockname()[1],
            **{f"{name}_port": port for name, port in self.ports.items()},
            "socket_path": str(self.folder / "socket"),
            "abstract": self.mark,
            "host_pid": self.canary.pid,
            "secret_path": str(self.folder / "secret"),
            "mark": self.mark,
        }
        return json.dumps(known).encode()

    def remember(self) -> None:
        """Records the state of the host and the driver, with which `check` compares the later state."""
        self._before = self._state()

    def check(self) -> None:
        """Raises `Escaped` if the host or the driver changed since the last call of `check` or `remember`, a program connected to the host,
        or the watcher or the allowed server recorded trouble."""
        before, self._before = self._before, self._state()
        for name, now in self._before.items():
            if now != before[name]:
                raise Escaped(f"{name} changed {_difference(before[name], now)}")
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                link, _ = listener.accept()
                link.close()
                raise Escaped(f"a program connected to the host's {listener.getsockname()!r}")
        if trouble := [*self.trouble, *self.allowed.trouble]:
            raise Escaped("; ".join(trouble[:3]))

    def _state(self) -> dict[str, object]:
        stat = Path(f"/proc/{self.canary.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "the host's file": (self.folder / "secret").read_text() + (self.folder / "open").read_text(),
            "the host's folder": sorted(path.name for path in self.folder.iterdir()),
            "the host's process": (self.canary.poll(), stat[0] == "T", stat[16], len(os.sched_getaffinity(self.canary.pid))),
            "the kernel's settings": [Path(path).read_text() for path in _SETTINGS if Path(path).exists()],
            "the driver's mounts": _mounts(),
            "the driver's limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
        }

    async def watch(self) -> None:
        """Keeps the neighbour busy, and watches the driver's event loop, memory and descriptors, until cancelled or the neighbour
        fails."""
        loop = asyncio.get_running_loop()
        memory, descriptors = _peak_mb(), len(os.listdir("/proc/self/fd"))
        while True:
            try:
                result = await self.neighbour.python("print(6 * 7, open('kept').read())", timeout_s=_NEIGHBOUR_S)
                if (result.exit_code, result.stdout) != (0, f"42 {self.mark}\n"):
                    self.trouble.append(f"the neighbour computed a wrong result: {result}")
            except (SandboxError, ValueError) as error:
                self.trouble.append(f"the neighbour failed: {error}")
                return
            start = loop.time()
            await asyncio.sleep(0.2)
            if loop.time() - start > _STANDSTILL_S:
                self.trouble.append(f"the driver's event loop was blocked for {loop.time() - start:.1f} s")
            if _peak_mb() > memory + _MEMORY_MB:
                memory = _peak_mb()
                self.trouble.append(f"the driver grew to {memory} MiB")
            if (open_now := len(os.listdir("/proc/self/fd"))) > descriptors + _SPARE_DESCRIPTORS + _DESCRIPTORS_EACH * self.sandboxes:
                descriptors = open_now
                self.trouble.append(f"the driver has {descriptors} open descriptors")


@asynccontextmanager
async def arena(spec: SandboxSpec, neighbour: Sandbox, ways: dict[str, Any] | None = None) -> AsyncIterator[Arena]:
    """Creates the host's side of an attack suite, and yields it for the block."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(ScratchFolder())
        folder.chmod(0o755)  # readable for an attack that reaches it
        canary = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(canary.wait)
        stack.callback(canary.kill)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        allowed = await stack.enter_async_context(AllowedServer())
        gateway_port = await stack.enter_async_context(_gateway())
        host = Arena(spec, folder, neighbour, ways or {}, canary, (tcp, local, abstract), allowed, gateway_port)
        local.bind(str(folder / "socket"))
        abstract.bind("\0" + host.mark)
        (folder / "socket").chmod(0o777)
        for listener in host.listeners:
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
    """A gateway session that has no real episode. No attack has the key of the session."""

    async def close(self) -> None:
        return


@asynccontextmanager
async def _gateway() -> AsyncIterator[int]:
    """Yields the port of a running gateway, or 0 if the packages of the gateway are not installed. No attack has the key of its session."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        yield 0
        return
    gateway, nothing = Gateway(), cast(Any, None)
    async with gateway.session(_Keyless(episode=nothing, tokens=nothing, models=())):
        yield int(gateway.url.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The pid namespace of a sandbox, as seen from the host."""

    link: str  # for example pid:[4026532301]; empty if unknown
    seen: float  # seconds after boot at which it certainly belonged to this sandbox

    def processes(self) -> list[int]:
        """Returns the host pids of the processes in the namespace that this user may see. Empty if a newer namespace has reused the number
        of this namespace."""
        inside = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _link(f"/proc/{entry}/ns/pid") == self.link]
        first = [process.pid for pid in inside if (process := read_process(pid)) is not None and process.inner_pid == 1]
        reused = any((start_time(pid) or 0) / os.sysconf("SC_CLK_TCK") > self.seen for pid in first)
        return [] if reused else inside


async def namespace_of(sandbox: Sandbox) -> Namespace:
    """Returns the sandbox's pid namespace, whose `link` is empty if the sandbox cannot report it. Call this function before any attack runs
    in the sandbox."""
    result = await sandbox.python("import os; print(os.readlink('/proc/self/ns/pid'))", timeout_s=_NEIGHBOUR_S)
    return Namespace(link=result.stdout.strip(), seen=time.clock_gettime(time.CLOCK_BOOTTIME))


async def wait_until_gone(sandbox: Sandbox, namespace: Namespace | None) -> None:
    """Waits until no process, container, folder or control group of a closed sandbox is left. Raises `Escaped` if any of them remains after
    15 s."""
    deadline = time.monotonic() + _CLEAR_S
    while left := await asyncio.to_thread(_left, sandbox.id, namespace):
        if time.monotonic() > deadline:
            raise Escaped(f"still present {_CLEAR_S:.0f} s after the sandbox was closed: {left[:5]}")
        await asyncio.sleep(0.05)


def _left(name: str, namespace: Namespace | None) -> list[str]:
    left = [f"process {pid}" for pid in namespace.processes()] if namespace is not None else []
    left += [f"{item.backend} sandbox" for item in cleanup.list_open() if item.name == name]
    return [*left, *(f"control group {folder}" for folder, _, _ in os.walk(limits.CGROUPS) if os.path.basename(folder) == name)]


def _mounts() -> frozenset[str]:
    """Returns the mount points that this process sees, with their file systems. Excludes mounts that container daemons create, and mounts
    of network namespaces."""
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if _DAEMON not in line)
    return frozenset(
        f"{fields[4]} ({fields[fields.index('-') + 1]} {fields[0]})" for fields in lines if not f"{fields[4]}/".startswith(_NETWORKS)
    )


def _difference(before: object, now: object) -> str:
    if isinstance(before, frozenset) and isinstance(now, frozenset):
        return f"(added {sorted(now - before)}, removed {sorted(before - now)})"
    return f"from {before!r} to {now!r}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the process has exited or belongs to a different user
        return ""


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
