"""The hosts of the parts of a run. Servers, learner, rollout workers and Redis are processes on this machine or on nodes of a cluster.

A command is written once for all hosts. A command has slots for values that only the host knows (`RUN`, `PORT` and so on). The host fills
the slots in the arguments, the environment and the input of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PYTHON = "{agentrl:python}"
"""Slot for the Python interpreter of the host."""
PARENT = "{agentrl:parent}"
"""Slot for the process id of the part's parent on the host. The part dies with it (`agentrl.base.processes.die_with_parent`)."""
RUN = "{agentrl:run}"
"""Slot for the run folder on the host."""
ROOT = "{agentrl:root}"
"""Slot for the project folder on the host."""
HOST = "{agentrl:host}"
"""Slot for the address at which other parts reach the host, and to which servers bind. It is the loopback address on one machine."""
PORT = "{agentrl:port}"
"""Slot for a free port of the host. No other run on the host gets this port while the part is alive."""
SCRATCH = "{agentrl:scratch}"
"""Slot for an empty folder with a short path, which the host removes after the part's end."""
PROGRESS = "{agentrl:progress}"
"""Slot for the path of a pipe. What the part writes there is in `PartHandle.read_progress`."""
REASONS = "{agentrl:reasons}"
"""Slot for the path of a file in memory. What the part appends there is in `PartHandle.reasons`, also after its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommand:
    """The command that starts one part. `argv`, the values of `environment`, and `stdin` may contain slots."""

    name: str
    """Unique in the run: `server`, `server-0`, `gate`, `judge-NAME`, `learner`, `worker-3`, `redis`. The plan of the cluster has it too."""
    argv: tuple[str, ...]
    log: str
    """File for the output, relative to the run folder. It is in the driver's run folder, no matter where the part runs."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the host's own environment."""
    secrets: bool = False
    """Whether the part keeps the variables of the host's environment that contain secrets."""
    stdin: str = field(default="", repr=False)
    """The complete standard input, for secrets that must not be in arguments or files."""
    scratch: str = ""
    """Identifies the folder of the slot `SCRATCH`: the next part with the same text on that host gets the same path, emptied."""
    needs: tuple[str, ...] = ()
    """Files and folders, relative to the run folder, that the host must have before the part starts."""
    exclusive: bool = False
    """Whether two processes of this part must never run at the same time, even if the node of the first process does not answer."""


class PartHandle(Protocol):
    """One started part. Properties and methods without `await` return at once, with the last known state of the host."""

    @property
    def host(self) -> str:
        """The address at which other parts reach this part."""

    @property
    def port(self) -> int:
        """The port that was reserved for the part; 0 if the part's command has no slot for a port."""

    @property
    def folder(self) -> str:
        """The path of the run folder on the part's host."""

    @property
    def scratch(self) -> str:
        """The path of the part's folder `SCRATCH` on its host; empty if the part has no such folder."""

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
        """Why the part is gone without an exit code, such as a lost node; empty otherwise."""

    async def wait(self) -> int:
        """Returns the exit code after the end of the part."""

    def send_kill(self) -> None:
        """Kills all processes of the part, without waiting for their end. Has no effect after the part's end."""

    async def kill(self) -> None:
        """Kills all processes of the part and returns when none is left. Idempotent.

        Raises `LaunchError` if a process has not ended within a minute.
        """

    async def terminate(self, *, grace_s: float) -> None:
        """Sends SIGTERM to the first process, waits `grace_s` for its end, then continues like `kill`. Idempotent."""

    async def signal_children(self, number: int) -> None:
        """Sends a signal to the children of the first process, but not to that process itself. Has no effect after the part's end."""

    def processes(self) -> Mapping[int, str]:
        """The process ids of the part with their states, as `agentrl.base.processes.process_tree` returns them. The data are at most a few
        seconds old."""

    def read_progress(self) -> bytes:
        """Returns what the part has written to `PROGRESS` since the last call. The size is bounded by the capacity of the pipe."""

    @property
    def clock_offset_s(self) -> float:
        """Seconds to add to the monotonic clock of its host to get the driver's monotonic clock."""

    def reasons(self) -> bytes:
        """Returns what the part has appended to `REASONS`, at most 1 MiB."""

    async def fetch(self, *paths: str) -> None:
        """Returns when the host has these files and folders of the run folder, complete. Has no effect if the folder is shared.

        Raises `LaunchError` if the host cannot fetch them.
        """


class Launcher(Protocol):
    """Starts the parts of one run."""

    @property
    def is_local(self) -> bool:
        """Whether all parts are on the driver's machine, so that nothing needs to be reachable from a different machine."""

    @property
    def shared_folder(self) -> bool:
        """Whether parts have the run folder at the driver's path. If they do not, each host has a mirror of it."""

    @property
    def driver_host(self) -> str:
        """The address at which parts reach the driver, and to which its services bind."""

    def cores(self, name: str) -> int | None:
        """Returns the number of CPU cores that the part may use; None if it shares the driver's machine."""

    async def start(self, command: PartCommand) -> PartHandle:
        """Starts a part and returns at once. Call it from a thread that outlives the part, because on one machine the part dies with the
        thread.

        Raises `LaunchError` if no host can start it.
        """

    async def use_driver(self, url: str, key: str) -> None:
        """Sets the address from which hosts that share no disk fetch files. Call it once, before parts that need files start."""

    async def close(self) -> None:
        """Kills the parts that still run, and releases the hosts. Idempotent."""
