"""Sandboxes and the backends that open them.

`ForwardingSandbox` forwards every operation to another sandbox through one method, which subclasses can override.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from agentrl.records import ExecResult, SandboxSpec

OPEN_TIMEOUT_S = 60.0
"""Maximum seconds for opening a sandbox. Opening takes milliseconds on an idle host, and seconds on a host that opens hundreds."""


@runtime_checkable
class Sandbox(Protocol):
    """An isolated environment for running programs. A sandbox is used by one episode and then destroyed.

    Paths are relative to the working directory. A path that leaves this directory raises `ValueError` before anything is run. Any other
    invalid argument also raises `ValueError`: a NUL, an unpaired surrogate, a `=` in the name of an environment variable, an empty `argv`,
    an invalid deadline. An argument of the wrong type raises `TypeError`. Callers may therefore pass an agent's text unchecked. Text is
    converted to bytes as by `os.fsencode`, so that every file name can be expressed. Faults in the sandbox layer raise `SandboxError` or
    `SandboxTimeout`. If a program fails or exceeds its time limit, an `ExecResult` is returned.
    """

    id: str

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a program. After `timeout_s`, kills the program's process tree (`reason="timeout"`)."""

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Runs code like `exec(["python3", "-I", "-c", code])`, but in a process forked from a warm interpreter to save start-up time.

        If `session` is set, the code runs in the interpreter of that name, which continues to exist: later calls see the names that earlier
        calls defined, and the value of a final expression is printed (its `repr`, unless it is None). `sys.exit`, a timeout, or a kill
        because of memory use ends the session, as `ExecResult.session_ended` reports; the next call starts a new session. A sandbox has at
        most four sessions. Raises `ValueError` if the name is invalid, or if it is new and four sessions exist. A snapshot does not include
        sessions."""

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Reads a regular file. Raises `FileNotFoundError`, or `ValueError` if the file is larger than `max_bytes` or the path contains a
        link."""

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and creates its parent folders."""

    async def snapshot(self) -> bytes:
        """Returns the working directory as an archive for `SandboxBackend.open(..., snapshot=...)`. The archive includes files that the
        agent cannot read.

        Raises `ValueError` only if the archive is too large.
        """

    async def pause(self) -> None:
        """Stops the running programs until `resume`."""

    async def resume(self) -> None:
        """Resumes paused programs."""

    async def close(self) -> None:
        """Destroys the sandbox. Idempotent; does not raise if the sandbox no longer exists."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens sandboxes of one kind (docker, bubblewrap).

    The factory of a backend receives `root`, the folder to which `SandboxSpec.image` is relative, and `run_label`, which marks the
    sandboxes of a run.
    """

    name: str

    async def prepare(self, spec: SandboxSpec) -> None:
        """Builds the image if it does not exist; a build may take minutes. Later calls to `open` are fast."""

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: bytes | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Sandbox:
        """Opens a sandbox with these files, or with the working directory from a snapshot. Raises `SandboxError` if this fails or takes
        longer than `timeout_s`, `ValueError` if the files do not fit or the snapshot is invalid, and `UserError` if the image or the
        backend cannot be used."""

    async def close(self) -> None:
        """Closes the backend and all of its open sandboxes."""


T = TypeVar("T")


class ForwardingSandbox:
    """Forwards to `sandbox`. Every operation except `close` goes through `_through`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.id = sandbox.id
        self._sandbox = sandbox

    async def _through(self, operation: Awaitable[T]) -> T:
        return await operation

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        return await self._through(self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes, env=env))

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """See `Sandbox.python`."""
        return await self._through(self._sandbox.python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session))

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Sandbox.read`."""
        return await self._through(self._sandbox.read(path, max_bytes=max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        await self._through(self._sandbox.write(path, data))

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        return await self._through(self._sandbox.snapshot())

    async def pause(self) -> None:
        """See `Sandbox.pause`."""
        await self._through(self._sandbox.pause())

    async def resume(self) -> None:
        """See `Sandbox.resume`."""
        await self._through(self._sandbox.resume())

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await self._sandbox.close()
