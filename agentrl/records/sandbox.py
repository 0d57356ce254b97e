"""The specification of a sandbox, and the result of a program that ran in one."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records import destinations
from agentrl.records.fields import Record, Text

MAX_SNAPSHOT_BYTES = 64 << 20
"""Largest working directory that is part of an `EpisodeState`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec(Record):
    """What a sandbox is made of and what it may use: `SandboxSpec(image="sandboxes/tables")`.

    `image` is a folder that holds an `image.toml` recipe or a `Dockerfile` (see `agentrl.sandbox.images`), relative to the
    project root. `network` is what programs may reach, through a proxy (see `agentrl.sandbox.egress`): nothing by default.
    """

    image: str
    memory_mb: int = 256
    processes: int = 32
    cpus: float = 1.0
    disk_mb: int = 64  # of the working directory, and of /tmp; both are memory, and never get all of it
    open_files: int = 256
    runtime: str = ""  # container runtime name, such as "runsc"; empty: the backend's own
    network: tuple[str, ...] = ()  # allow-list: "pypi.org:443", "*.example.org:443", "10.1.2.3:8080" (see `agentrl.records.destinations`)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        for name in ("memory_mb", "processes", "cpus", "disk_mb", "open_files"):
            if getattr(self, name) <= 0:
                raise ValueError(f"SandboxSpec.{name} must be positive, got {getattr(self, name)}")
        try:
            destinations.parse_destinations(self.network)
        except ValueError as error:
            raise ValueError(f"SandboxSpec.network: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult(Record):
    """How a program in a sandbox ended. Output is bytes turned to text with replacement; it is hostile input.

    `exit_code` is None when the program was killed for `reason` ("timeout", "memory", "killed"). Of a call in a session it is 0,
    or 1 after an exception; any other means that the session has ended, as `session_ended` says.
    """

    exit_code: int | None
    stdout: Text
    stderr: Text
    wall_s: float
    truncated: bool = False
    reason: str = ""
    restarted: bool = False  # the session is new: it had ended before this call, or the sandbox is from a snapshot, which holds files only
    session_ended: bool = False  # the session did not outlive this call: the next one starts afresh

    @property
    def ok(self) -> bool:
        return self.exit_code == 0
