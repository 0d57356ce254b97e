"""Starts and stops the processes of a run on one machine. On a cluster, each node has one `ProcessHost`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from agentrl.base.processes import process_group, process_tree, read_stat
from agentrl.base.run_lock import hold_shared_lock
from agentrl.base.scratch import ScratchFolder
from agentrl.base.secrets import child_environment
from agentrl.errors import LaunchError
from agentrl.protocols.cluster import HOST, PARENT, PORT, PROGRESS, PYTHON, REASONS, ROOT, RUN, SCRATCH, PartCommand

LOOPBACK = "127.0.0.1"
_SLOT = re.compile(r"\{agentrl:[a-z]+\}")
_GONE_S = 60.0
_LOOK_S = 0.01  # seconds between checks for killed processes
_POLL_S = 0.05  # seconds between checks of a process, if the kernel has no pidfd_open
_REASON_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20  # more than the pipe can hold


class ProcessHost:
    """Starts processes that die with the calling thread, and tracks them until they exit.

    Each process leads its own session, so ctrl-C in a terminal does not reach it. Each process holds the shared lock of the run folder, so
    the next driver waits for it to exit.
    """

    def __init__(self, folder: Path, *, root: Path | None = None, host: str = LOOPBACK, locked: bool = True) -> None:
        """`folder`: the run folder. `root`: the project. `host`: address for servers. `locked`: whether the processes hold the lock."""
        self._folder, self._root, self._host, self._locked = folder, root, host, locked
        self._running: list[HostedProcess] = []

    def start(self, command: PartCommand) -> HostedProcess:
        """Starts a part and returns at once. Raises `LaunchError` if no port is free or the program cannot be executed."""
        self._running = [process for process in self._running if not process.cleaned]
        try:
            process = HostedProcess(command, self._folder, root=self._root, host=self._host, locked=self._locked)
        except OSError as error:
            raise LaunchError(f"{command.name} cannot be started: {error}") from error
        self._running.append(process)
        return process

    async def close(self) -> None:
        """Kills the processes that are still running, and returns when none is left. Raises `LaunchError` if a process has not exited
        within a minute."""
        await asyncio.gather(*(process.kill() for process in self._running))
        self._running.clear()


class HostedProcess:
    """One part on this machine: a `PartHandle`."""

    node, lost, clock_offset_s = "", "", 0.0

    def __init__(self, command: PartCommand, folder: Path, *, root: Path | None, host: str, locked: bool) -> None:
        self.name, self.host, self.folder = command.name, host, str(folder)
        self.cleaned = False  # whether no process, scratch folder or port is left
        self._reports = _Reports()
        texts = (*command.argv, *command.environment.values(), command.stdin)
        self._scratch = ScratchFolder() if any(SCRATCH in text for text in texts) else None
        self.scratch = "" if self._scratch is None else str(self._scratch.path)
        self._port = ReservedPort(host) if any(PORT in text for text in texts) else None
        self.port = 0 if self._port is None else self._port.number
        self._slots = {
            PYTHON: sys.executable,
            PARENT: str(os.getpid()),
            RUN: str(folder),
            ROOT: "" if root is None else str(root),
            HOST: host,
            PORT: str(self.port),
            SCRATCH: self.scratch,
            PROGRESS: self._reports.progress_path,
            REASONS: self._reports.reasons_path,
        }
        try:
            self._popen = self._start(command, folder, locked=locked)
        except BaseException:
            self._clean()
            raise

    def _start(self, command: PartCommand, folder: Path, *, locked: bool) -> subprocess.Popen[bytes]:
        log = folder / command.log
        log.parent.mkdir(parents=True, exist_ok=True)
        lock = hold_shared_lock(folder) if locked else None
        own = os.environ if command.secrets else child_environment(os.environ)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [self._fill(text) for text in command.argv],
                    env={**own, **{name: self._fill(value) for name, value in command.environment.items()}},
                    stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=() if lock is None else (lock,),
                )
        finally:
            if lock is not None:
                os.close(lock)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # the process has exited, and its log contains the reason
                process.stdin.write(self._fill(command.stdin).encode())
        return process

    def _fill(self, text: str) -> str:
        return _SLOT.sub(lambda slot: self._slots.get(slot[0], slot[0]), text)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, which is -N after signal N; None while the process runs."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Waits for the first process to exit and returns its exit code."""
        while (code := self._popen.poll()) is None:
            await _ended(self._popen.pid)
        return code

    def send_kill(self) -> None:
        """Kills all processes of the part, without waiting for them to exit."""
        if not self.cleaned:
            members: Mapping[int, int] = {}
            with contextlib.suppress(OSError):
                members = self._members()
            _kill(members, group=self.pid)

    async def kill(self) -> None:
        """Kills all processes of the part and returns when none is left. Idempotent.

        Raises `LaunchError` if a process has not exited within a minute.
        """
        await self._kill(await self._wait_for_members({}))

    async def terminate(self, *, grace_s: float) -> None:
        """Sends SIGTERM to the first process, waits up to `grace_s` seconds for it to exit, then kills the part as `kill` does.
        Idempotent."""
        members = await self._wait_for_members({})
        if self.returncode is None:
            self._popen.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.wait()
        await self._kill(await self._wait_for_members(members))

    async def _kill(self, members: Mapping[int, int]) -> None:
        if self.cleaned:
            return
        left = members
        try:
            async with asyncio.timeout(_GONE_S):
                _kill(left, group=self.pid)
                await self.wait()
                while left := await self._wait_for_members(left):
                    _kill(left, group=self.pid)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise LaunchError(
                f"process {next(iter(left), self.pid)} of {self.name} did not exit after SIGKILL: a disk or GPU does not respond\n"
                "  fix: check the disk and the GPU, and wait for the process to exit before you resume"
            ) from None
        self._clean()

    async def signal_children(self, number: int) -> None:
        """Sends a signal to the children of the first process."""
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has exited, or no file descriptor is free
                if read_stat(pid).parent == self.pid:
                    os.kill(pid, number)

    def processes(self) -> dict[int, str]:
        """Returns process id -> state for the processes of the part. Empty if the first process has exited, because the kernel may reuse
        its id, or if no file descriptor is free."""
        with contextlib.suppress(OSError):
            return process_tree(self.pid) if self.returncode is None else {}
        return {}

    def read_progress(self) -> bytes:
        """Returns the bytes that the part has written to `PROGRESS` since the last call."""
        return self._reports.read_progress()

    def reasons(self) -> bytes:
        """Returns the bytes that the part has appended to `REASONS`, at most 1 MiB."""
        return self._reports.read_reasons()

    async def fetch(self, *paths: str) -> None:
        """Does nothing, because the run folder is on this machine."""

    def _members(self) -> dict[int, int]:
        """Returns process id -> start time for the processes of the part. Some of them may be in a separate process group, and others may
        have lost their parent process. Raises `OSError` if no file descriptor is free."""
        if self.cleaned:
            return {}
        tree = process_tree(self.pid) if self.returncode is None else ()
        return {pid: read_stat(pid).started for pid in (*tree, *process_group(self.pid))}

    async def _wait_for_members(self, known: Mapping[int, int]) -> Mapping[int, int]:
        """Returns the running processes of the part, including the `known` ones. Waits while no file descriptor is free. After a minute,
        returns `known`, so that at least the process group is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                while True:
                    with contextlib.suppress(OSError):
                        return _living({**known, **self._members()})
                    await asyncio.sleep(_LOOK_S)
        return known

    def _clean(self) -> None:
        self.cleaned = True
        if self._scratch is not None:
            self._scratch.remove()
        if self._port is not None:
            self._port.release()


class LocalLauncher:
    """A `Launcher` that starts all parts of a run on this machine."""

    is_local, shared_folder, driver_host = True, True, LOOPBACK

    def __init__(
        self,
        folder: Path,
        *,
        root: Path | None = None,
        devices: Mapping[str, str] = MappingProxyType({}),
        wrap: Callable[[PartCommand], PartCommand] | None = None,
    ) -> None:
        """`folder`: the run folder. `root`: the project. `devices`: CUDA_VISIBLE_DEVICES by part; other parts inherit the driver's value.

        `wrap`: function that changes the command of each part.
        """
        self._host, self._devices, self._wrap = ProcessHost(folder, root=root), devices, wrap

    def cores(self, name: str) -> int | None:
        """Returns None, because all parts share this machine."""
        return None

    async def start(self, command: PartCommand) -> HostedProcess:
        """Starts a part. Raises the errors of `ProcessHost.start`."""
        if (device := self._devices.get(command.name)) is not None:
            command = replace(command, environment={**command.environment, "CUDA_VISIBLE_DEVICES": device})
        return self._host.start(command if self._wrap is None else self._wrap(command))

    async def use_driver(self, url: str, key: str) -> None:
        """Does nothing, because the run folder is on this machine."""

    async def close(self) -> None:
        """Kills the parts that are still running. Raises the errors of `ProcessHost.close`."""
        await self._host.close()


class _Reports:
    """A pipe and an in-memory file. While this object exists, processes on this machine can open both by their paths."""

    def __init__(self) -> None:
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory = os.memfd_create("agentrl-reasons")
        for end in (self._read, write, self._memory):
            weakref.finalize(self, os.close, end)
        self.progress_path = f"/proc/{os.getpid()}/fd/{write}"
        self.reasons_path = f"/proc/{os.getpid()}/fd/{self._memory}"

    def read_progress(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._read, _PIPE_BYTES)
        return b""

    def read_reasons(self) -> bytes:
        return os.pread(self._memory, _REASON_BYTES, 0)


def _living(members: Mapping[int, int]) -> dict[int, int]:
    """Returns those of the given processes that have not exited. Raises `OSError` if no file descriptor is free."""
    stats = {pid: read_stat(pid) for pid in members}
    return {pid: started for pid, started in members.items() if not stats[pid].has_ended and stats[pid].started == started}


def _kill(members: Mapping[int, int], *, group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    living: Mapping[int, int] = {}
    with contextlib.suppress(OSError):  # no file descriptor is free
        living = _living(members)
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _ended(pid: int) -> None:
    """Returns when a child of this process exits. May return earlier."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # the process has just exited, or the kernel has no such call
        await asyncio.sleep(_POLL_S)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


_PORT_TRIES = 64  # another run may choose the same free port at the same time


class ReservedPort:
    """A port that, until `release`, no other agentrl server on this machine uses.

    A server takes seconds until it listens. Until then the port appears free, and a second run could mistake the first run's server for its
    own. Therefore, each run binds a name for the port in the abstract socket namespace. Each network namespace has its own abstract
    namespace, and the kernel frees the name when the process exits.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address to which the server binds. Raises `LaunchError` if no port is free, or if other runs have reserved every port
        that was tried."""
        for _ in range(_PORT_TRIES):
            self.number = free_port(host)
            self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._name.bind(f"\0agentrl server at port {self.number}")
                return
            except OSError as error:
                self._name.close()
                if error.errno != errno.EADDRINUSE:
                    raise
        raise LaunchError(f"no free port on {host} after {_PORT_TRIES} tries\n  fix: stop programs that use ports; `ss -tan` lists them")

    def release(self) -> None:
        """Releases the port of a server that has exited. Idempotent."""
        self._name.close()


def free_port(host: str) -> int:
    """Returns a free port on the address `host`, preferably outside the range from which the kernel assigns ports. Raises `LaunchError`
    if no port is free."""
    for port in (*_unassigned_ports(), 0):  # 0: any free port that the kernel chooses
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise LaunchError(f"address {host} has no free port\n  fix: stop programs that use ports; `ss -tan` lists them")


def _unassigned_ports() -> list[int]:
    """Returns random ports outside the range from which the kernel assigns ports."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return []
    others = [*range(10_000, low), *range(high + 1, 1 << 16)]
    return random.sample(others, min(len(others), _PORT_TRIES))
