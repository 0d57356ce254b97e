"""What runs on a node of a Ray cluster: an actor that hosts the processes of one part. Only Ray's processes import Ray.

The actor has no state that the run needs. Ray may start it again on another node; it then knows no process, which the driver reads as the
loss of the part. Every call carries the id of a start, so a call that is delivered twice has the effect of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import agentrl
from agentrl.cluster.process_host import HostedProcess, ProcessHost
from agentrl.errors import LaunchError
from agentrl.protocols.cluster import PartCommand

LEASE_S = 20.0
"""Seconds without a call of the driver after which a host kills its processes: the driver is gone, or cannot reach this node."""
_WATCH_S = 1.0
_CONNECTIONS = 64  # to the port by which the driver notices the end of the host
_TREE_S = 2.0  # between two readings of the process tree


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The settings of a host; the same for all parts of a run."""

    folder: str  # the run folder on the node
    root: str  # the project on the node
    working_folder: str  # of the driver; the processes start there if it exists on the node
    driver: str  # process and machine of the driver, for messages
    session: str  # token of the driver's session
    version: str  # of agentrl, in the driver
    lease_s: float = LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What a host is and when it was last called."""

    session: str
    driver: str
    calls: int  # of the driver, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """The state of one process, as far as it changed since the last poll."""

    node: str  # host name
    node_id: str  # of Ray
    host: str  # address
    pid: int
    port: int
    watch_port: int  # of the host itself, which sends nothing there
    folder: str
    scratch: str
    returncode: int | None
    processes: dict[int, str]
    progress: bytes
    reasons: bytes
    clock: float  # the host's monotonic clock


class NodeHost:
    """Hosts the processes of one part. An asynchronous Ray actor: its methods run in one event loop."""

    def __init__(self, settings: HostSettings) -> None:
        ray = import_module("ray")
        self._settings = settings
        self._address = str(ray.util.get_node_ip_address())
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._starting = asyncio.Lock()
        self._processes: dict[str, HostedProcess] = {}
        self._trees: dict[str, tuple[float, dict[int, str]]] = {}
        self._host: ProcessHost | None = None
        self._watched: asyncio.Server | None = None
        self._connections = 0
        self._calls, self._called = 0, time.monotonic()
        threading.Thread(target=self._watch_lease, daemon=True, name="agentrl lease").start()

    async def describe(self) -> HostState:
        """Returns the state without renewing the lease: a driver of another session may ask."""
        return HostState(
            session=self._settings.session,
            driver=self._settings.driver,
            calls=self._calls,
        )

    async def start(self, start: str, command: PartCommand) -> PartState | str:
        """Starts a process, unless this start is known, after the end of an earlier one. Returns its state, or why it does not start."""
        self._renew()
        async with self._starting:
            if self._watched is None:
                self._watched = await asyncio.start_server(self._hold, host=self._address, port=0)
            if start not in self._processes:
                try:
                    for earlier in list(self._processes):
                        await self._processes[earlier].kill()
                        del self._processes[earlier]
                    self._processes[start] = self._opened_host().start(command)
                except (OSError, LaunchError) as error:
                    return f"{type(error).__name__}: {error}"
        return self._state(start)

    async def poll(self, start: str) -> PartState | None:
        """Renews the lease. Returns the state of a process; None if this actor did not start it."""
        self._renew()
        return self._state(start) if start in self._processes else None

    async def signal_children(self, start: str, number: int) -> None:
        """See `PartHandle.signal_children`."""
        self._renew()
        if (process := self._processes.get(start)) is not None:
            await process.signal_children(number)

    async def end(self, start: str, grace_s: float) -> PartState | str | None:
        """Ends all processes of a part, after SIGTERM and `grace_s` seconds if that is not 0. Returns the final state, or what failed."""
        self._renew()
        if (process := self._processes.get(start)) is None:
            return None
        try:
            await (process.terminate(grace_s=grace_s) if grace_s else process.kill())
        except LaunchError as error:
            return str(error)
        return self._state(start)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps a connection open. It breaks when this process ends, which the driver notices at once."""
        self._connections += 1
        try:
            while self._connections <= _CONNECTIONS and await reader.read(1024):
                pass
        finally:
            self._connections -= 1
            writer.close()

    def _opened_host(self) -> ProcessHost:
        if self._host is None:
            settings = self._settings
            if settings.version != agentrl.__version__:
                raise LaunchError(
                    f"{socket.gethostname()} has agentrl {agentrl.__version__}, the driver {settings.version}\n"
                    "  fix: install the same version on every node"
                )
            with contextlib.suppress(OSError):
                os.chdir(settings.working_folder)
            folder = Path(settings.folder)
            if not folder.is_dir():
                raise LaunchError(f"{folder} does not exist on {socket.gethostname()}\n  fix: mount the run folder's disk on every node")
            self._host = ProcessHost(folder, root=Path(settings.root), host=self._address)
        return self._host

    def _state(self, start: str) -> PartState:
        process = self._processes[start]
        returncode = process.returncode
        return PartState(
            node=socket.gethostname(),
            node_id=self._node_id,
            host=self._address,
            pid=process.pid,
            port=process.port,
            watch_port=0 if self._watched is None else int(self._watched.sockets[0].getsockname()[1]),
            folder=process.folder,
            scratch=process.scratch,
            returncode=returncode,
            processes=self._tree(start, process),
            progress=process.read_progress(),
            reasons=b"" if returncode is None else process.reasons(),
            clock=time.monotonic(),
        )

    def _tree(self, start: str, process: HostedProcess) -> dict[int, str]:
        read, tree = self._trees.get(start, (0.0, {}))
        if (now := time.monotonic()) - read >= _TREE_S:
            tree = process.processes()
            self._trees[start] = now, tree
        return tree

    def _renew(self) -> None:
        self._calls, self._called = self._calls + 1, time.monotonic()

    def _watch_lease(self) -> None:
        """Kills the processes of a driver that no longer calls. It may have restarted them on another node."""
        while True:
            time.sleep(_WATCH_S)
            if time.monotonic() - self._called > self._settings.lease_s:
                for process in list(self._processes.values()):
                    process.send_kill()
