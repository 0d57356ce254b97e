"""The specification of a sandbox, and the result of a program that ran in it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records import destinations
from agentrl.records.fields import Record, Text

MAX_SNAPSHOT_BYTES = 64 << 20
"""Maximum size of a working directory's snapshot in an `EpisodeState`, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec(Record):
    """The image and the resource limits of a sandbox, such as `SandboxSpec(image="sandboxes/tables")`.

    `image` is a folder with an `image.toml` or a `Dockerfile` (see `agentrl.sandbox.images`), relative to the project root. `network` lists
    the hosts that programs may reach through a proxy (see `agentrl.sandbox.egress`). By default, `network` is empty.
    """

    image: str
    memory_mb: int = 256
    processes: int = 32
    cpus: float = 1.0
    disk_mb: int = 64  # size of the working directory, and of /tmp; both are in memory and count towards memory_mb
    open_files: int = 256
    runtime: str = ""  # container runtime, such as "runsc"; empty means the backend's default
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
    """The result of a program that ran in a sandbox. The program's output is decoded with replacement characters and is untrusted input.

    `exit_code` is None if the program was killed. `reason` is then "timeout", "memory" or "killed". For a call in a session, the exit code
    is 0, or 1 after an exception. Any other value means that the session exited (`session_ended`).
    """

    exit_code: int | None
    stdout: Text
    stderr: Text
    wall_s: float
    truncated: bool = False
    reason: str = ""
    restarted: bool = False  # a new session started with this call, because the previous session exited or a snapshot was restored
    session_ended: bool = False  # the session exited during this call; the next call starts a new session

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0."""
        return self.exit_code == 0
