"""The actor that hosts the processes of one part on a node of a Ray cluster. Only Ray's processes import Ray.

The run does not depend on the actor's state. Ray may restart the actor on another node. The new actor has no process, which the driver
interprets as the loss of the part. Every call contains the id of a start, so a call that is delivered twice has the same effect as a single
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import agentrl
from agentrl.base.files import write_atomically
from agentrl.cluster.link import Link
from agentrl.cluster.mirror_host import MirrorHost
from agentrl.cluster.process_host import HostedProcess, ProcessHost
from agentrl.errors import InfrastructureError, LaunchError, UserError
from agentrl.protocols.cluster import PartCommand

LEASE_S = 20.0
"""Seconds without a call from the driver after which a host kills its processes, because the driver is gone or cannot reach this node."""
ID_FILE = ".cluster-id"
"""File in the run folder that contains the id of the run. A mirror does not have this file."""
_ID = re.compile(r"[0-9a-f]{32}")
_WATCH_S = 1.0
_LOG_BYTES, _LAST_LOG_BYTES = 1 << 18, 4 << 20  # maximum bytes in one response
_CONNECTIONS = 64  # maximum number, to the port by which the driver detects that the host has exited
_TREE_S = 2.0  # seconds between readings of the process tree


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The settings of a host, which are the same for all parts of a run."""

    folder: str  # the run folder on the node
    root: str  # the project on the node
    working_folder: str  # the driver's working folder; processes start in it if it exists on the node
    driver: str  # process and machine of the driver, for messages
    session: str  # token of the driver's session
    run: str  # id of the run
    lease_s: float = LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The identity of a host, and the number of calls that it has received."""

    session: str
    driver: str
    node: str  # host name
    version: str  # version of agentrl
    sees_folder: bool  # whether this node has the run folder, on a shared disk or because it is the driver's machine
    calls: int  # number of the driver's calls so far


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """The state of one process, with its output since the last poll."""

    node: str  # host name
    node_id: str  # Ray's id of the node
    host: str  # address
    pid: int
    port: int
    watch_port: int  # port of the host, which sends nothing there
    folder: str
    returncode: int | None
    processes: dict[int, str]
    log: bytes  # new bytes of its log, if the driver does not see the log
    progress: bytes
    reasons: bytes
    clock: float  # the host's monotonic clock


class NodeHost:
    """Hosts the processes of one part. This class is an asynchronous Ray actor, so its methods run in one event loop."""

    def __init__(self, settings: HostSettings) -> None:
        ray = import_module("ray")
        self._settings = settings
        self._address = str(ray.util.get_node_ip_address())
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._starting = asyncio.Lock()
        self._processes: dict[str, HostedProcess] = {}
        self._trees: dict[str, tuple[float, dict[int, str]]] = {}
        self._host: ProcessHost | MirrorHost | None = None
        self._logs: dict[str, tuple[Path, int]] = {}  # for a process in a mirror: its log, and the bytes that the driver has
        self._watched: asyncio.Server | None = None
        self._connections = 0
        self._calls, self._called = 0, time.monotonic()
        threading.Thread(target=self._watch_lease, daemon=True, name="agentrl lease").start()

    async def describe(self) -> HostState:
        """Returns the state of this host. Does not renew the driver's lease, because the call may come from the driver of another
        session."""
        return HostState(
            session=self._settings.session,
            driver=self._settings.driver,
            node=socket.gethostname(),
            version=agentrl.__version__,
            sees_folder=await asyncio.to_thread(self._sees_folder),
            calls=self._calls,
        )

    async def start(self, start: str, command: PartCommand, driver: tuple[str, str] | None) -> PartState | str:
        """Starts a process, unless this start was already executed. Kills an earlier process first. Returns the state, or the reason why
        the process did not start.

        `driver`: address and key for a mirror of the run folder; None if the node has the folder.
        """
        self._renew()
        async with self._starting:
            if self._watched is None:
                self._watched = await asyncio.start_server(self._hold, host=self._address, port=0)
            if start not in self._processes:
                try:
                    for earlier in list(self._processes):
                        await self._processes[earlier].kill()
                        del self._processes[earlier]
                    self._processes[start] = await self._start(start, command, driver)
                except (OSError, InfrastructureError) as error:
                    return f"{type(error).__name__}: {error}"
        return self._state(start)

    async def poll(self, start: str) -> PartState | None:
        """Renews the lease. Returns the state of the process with this start id; None if this actor did not start it."""
        self._renew()
        return self._state(start) if start in self._processes else None

    async def fetch(self, driver: tuple[str, str], paths: tuple[str, ...]) -> str:
        """Fetches files of the run into the mirror. Returns an error message; empty if the node has the files."""
        self._renew()
        try:
            async with self._starting:
                host = await self._opened_host(driver)
            if isinstance(host, MirrorHost):
                await host.fetch(*paths)
        except (OSError, InfrastructureError) as error:
            return str(error)
        return ""

    async def signal_children(self, start: str, number: int) -> None:
        """See `PartHandle.signal_children`."""
        self._renew()
        if (process := self._processes.get(start)) is not None:
            await process.signal_children(number)

    async def end(self, start: str, grace_s: float) -> PartState | str | None:
        """Stops all processes of a part. If `grace_s` is not 0, sends SIGTERM first and waits up to `grace_s` seconds. Returns the final
        state, the text of an error, or None for an unknown start."""
        self._renew()
        if (process := self._processes.get(start)) is None:
            return None
        try:
            await (process.terminate(grace_s=grace_s) if grace_s else process.kill())
        except LaunchError as error:
            return str(error)
        return self._state(start)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps a connection open. The connection breaks when this process exits, so the driver detects the exit at once."""
        self._connections += 1
        try:
            while self._connections <= _CONNECTIONS and await reader.read(1024):
                pass
        finally:
            self._connections -= 1
            writer.close()

    async def _start(self, start: str, command: PartCommand, driver: tuple[str, str] | None) -> HostedProcess:
        host = await self._opened_host(driver)
        if isinstance(host, ProcessHost):
            return host.start(command)
        log = host.folder / command.log
        self._logs[start] = log, log.stat().st_size if log.exists() else 0
        return await host.start(command)

    def _sees_folder(self) -> bool:
        with contextlib.suppress(OSError):
            return (Path(self._settings.folder) / ID_FILE).read_text(encoding="utf-8").strip() == self._settings.run
        return False

    async def _opened_host(self, driver: tuple[str, str] | None) -> ProcessHost | MirrorHost:
        if self._host is None:
            settings = self._settings
            with contextlib.suppress(OSError):
                os.chdir(settings.working_folder)
            folder, root = Path(settings.folder), Path(settings.root)
            if driver is None:
                if not folder.is_dir():
                    raise LaunchError(
                        f"{folder} does not exist on {socket.gethostname()}\n  fix: mount the run folder's disk on every node"
                    )
                self._host = ProcessHost(folder, root=root, host=self._address)
            else:
                if not root.is_dir():
                    raise LaunchError(
                        f"{root} does not exist on {socket.gethostname()}\n  fix: copy the project to every node, at this path"
                    )
                mirror = folder / ".mirror" if await asyncio.to_thread(self._sees_folder) else folder
                self._host = await MirrorHost.open(mirror, Link(*driver), root=root, host=self._address)
        return self._host

    def _new_log(self, start: str, *, ended: bool) -> bytes:
        """Returns the bytes that a process that uses a mirror has written to its log since the last call."""
        if start not in self._logs:
            return b""
        path, sent = self._logs[start]
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(sent)
            data = file.read(_LAST_LOG_BYTES if ended else _LOG_BYTES)
            self._logs[start] = path, sent + len(data)
            return data
        return b""

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
            returncode=returncode,
            processes=self._tree(start, process),
            log=self._new_log(start, ended=returncode is not None),
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
        """Kills the processes if the driver no longer calls, because the driver may have restarted the processes on another node."""
        while True:
            time.sleep(_WATCH_S)
            if time.monotonic() - self._called > self._settings.lease_s:
                for process in list(self._processes.values()):
                    process.send_kill()


def run_id(folder: Path) -> str:
    """Returns the id of a run, and creates the id if the folder has none. A copy of the run's folder has the same id, but a different
    folder with the same name does not.

    Raises `UserError` if the file with the id is invalid, because the id is part of names that a run creates and deletes, such as its
    folder in a store.
    """
    path = folder / ID_FILE
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex)
    text = path.read_bytes()[:100].decode("ascii", "replace").strip()
    if not _ID.fullmatch(text):
        raise UserError(f"{path} does not contain a valid run id", fix="delete it: the run then gets a new id")
    return text
