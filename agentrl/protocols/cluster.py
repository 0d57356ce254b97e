"""Protocols for the hosts that run the parts of a run as processes: servers, learner, rollout workers and Redis, on this machine or a
cluster.

The command that starts a part can run on any host. The command contains slots for values that only the host knows (`RUN`, `PORT` and so
on). The host fills the slots in the arguments, the environment and the standard input of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PYTHON = "{agentrl:python}"
"""Slot for the Python interpreter of the host."""
PARENT = "{agentrl:parent}"
"""Slot for the id of the part's parent process on the host. The part dies with its parent (`agentrl.base.processes.die_with_parent`)."""
RUN = "{agentrl:run}"
"""Slot for the run folder on the host."""
ROOT = "{agentrl:root}"
"""Slot for the project folder on the host."""
HOST = "{agentrl:host}"
"""Slot for the address at which other parts reach the host, and to which servers bind. On one machine, this is the loopback address."""
PORT = "{agentrl:port}"
"""Slot for a free port on the host. No other run on the host receives this port while the part is alive."""
SCRATCH = "{agentrl:scratch}"
"""Slot for an empty folder with a short path, which the host removes after the part has exited."""
PROGRESS = "{agentrl:progress}"
"""Slot for the path of a pipe. `PartHandle.read_progress` returns what the part writes to it."""
REASONS = "{agentrl:reasons}"
"""Slot for the path of a file in memory. `PartHandle.reasons` returns what the part appended to it, even after the part died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommand:
    """The command that starts one part. `argv`, the values of `environment`, and `stdin` may contain slots."""

    name: str
    """Unique in the run, and used in the cluster's plan: `server`, `server-0`, `gate`, `judge-NAME`, `learner`, `worker-3`, `redis`."""
    argv: tuple[str, ...]
    log: str
    """File for the part's output, relative to the driver's run folder. It is written there no matter where the part runs."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that are added to the host's environment."""
    secrets: bool = False
    """Whether the part keeps the variables of the host's environment that contain secrets."""
    stdin: str = field(default="", repr=False)
    """The complete standard input, for secrets that must not be in arguments or files."""
    needs: tuple[str, ...] = ()
    """Files and folders, relative to the run folder, that the host must have before the part starts."""
    exclusive: bool = False
    """Whether two processes of this part must never run at the same time, even if the first process's node does not respond."""


class PartHandle(Protocol):
    """A part that was started. Properties and methods that are not async return at once, with the host's last known state."""

    @property
    def host(self) -> str:
        """The address at which other parts reach this part."""

    @property
    def port(self) -> int:
        """The port that was reserved for the part; 0 if the part's command contains no slot for a port."""

    @property
    def folder(self) -> str:
        """The path of the run folder on the part's host."""

    @property
    def node(self) -> str:
        """The host name of the part's machine, for messages; empty if the part is on the driver's machine."""

    @property
    def pid(self) -> int:
        """The process id of the part on its host."""

    @property
    def returncode(self) -> int | None:
        """The exit code of the part: -N after signal N, and -9 if its node is lost; None while the part runs."""

    @property
    def lost(self) -> str:
        """The reason why the part is gone without an exit code, such as a lost node; empty otherwise."""

    async def wait(self) -> int:
        """Waits for the part to exit, and returns the exit code."""

    def send_kill(self) -> None:
        """Kills all processes of the part, without waiting for them to exit. Has no effect after the part has exited."""

    async def kill(self) -> None:
        """Kills all processes of the part, and returns when none is left. Idempotent.

        Raises `LaunchError` if a process has not exited within a minute.
        """

    async def terminate(self, *, grace_s: float) -> None:
        """Sends SIGTERM to the first process, waits up to `grace_s` seconds for it to exit, then proceeds as `kill` does. Idempotent."""

    async def signal_children(self, number: int) -> None:
        """Sends a signal to the children of the first process, but not to that process itself. Has no effect after the part has exited."""

    def processes(self) -> Mapping[int, str]:
        """The process ids of the part with their states, as `agentrl.base.processes.process_tree` returns them. The data are at most a few
        seconds old."""

    def read_progress(self) -> bytes:
        """Returns what the part has written to `PROGRESS` since the last call. The result is no longer than the capacity of the pipe."""

    @property
    def clock_offset_s(self) -> float:
        """Seconds to add to the host's monotonic clock to obtain the driver's monotonic clock."""

    def reasons(self) -> bytes:
        """Returns up to 1 MiB of what the part has appended to `REASONS`."""

    async def fetch(self, *paths: str) -> None:
        """Copies these files and folders from the run folder to the host and returns when the copies are complete. Has no effect if the run
        folder is shared.

        Raises `LaunchError` if the host cannot fetch them.
        """


class Launcher(Protocol):
    """Starts the parts of one run."""

    @property
    def is_local(self) -> bool:
        """Whether all parts run on the driver's machine, so that nothing needs to be reachable from other machines."""

    @property
    def shared_folder(self) -> bool:
        """Whether parts see the run folder at the driver's path. Without a shared folder, each host has a mirror of the run folder."""

    @property
    def driver_host(self) -> str:
        """The address at which parts reach the driver, and to which its services bind."""

    def cores(self, name: str) -> int | None:
        """Returns the number of CPU cores that the part may use; None if it shares the driver's machine."""

    async def start(self, command: PartCommand) -> PartHandle:
        """Starts a part and returns at once. Call this method from a thread that outlives the part, because a part on the same machine dies
        with the thread.

        Raises `LaunchError` if no host can start it.
        """

    async def use_driver(self, url: str, key: str) -> None:
        """Sets the address from which hosts without a shared disk fetch files. Call this method once, before any part that needs files is
        started."""

    async def close(self) -> None:
        """Kills the parts that are still running, and releases the hosts. Idempotent."""
