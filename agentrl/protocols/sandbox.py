"""Sandboxes and the backends that open them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from agentrl.records import ExecResult, SandboxSpec


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place to run programs, used by one episode and then destroyed.

    Paths are relative to the sandbox's working directory; a path that leaves it is refused with `ValueError`. So is every other
    argument that cannot be carried out (NUL, half a surrogate pair, a variable's name with `=`, no program, a deadline that is
    none), before anything happens; an argument of another type raises `TypeError`. An agent's words may be handed on as they are.
    Text stands for bytes as in `os.fsdecode`, so that every name a file can have can be said.
    Faults of the layer raise `SandboxError`/`SandboxTimeout`; a program that fails or runs too long is an `ExecResult`.
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
        """Runs a program; after `timeout_s` its whole process tree is killed (`reason="timeout"`)."""

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Like `exec(["python3", "-I", "-c", code])`, from a warm interpreter: each call starts afresh, without the start-up time.

        With `session`, `code` runs in the interpreter of that name instead, which lives on: later calls find the names of
        earlier ones, and the value of an expression at the end of `code` is printed (its `repr`, unless it is None). Output is
        each call's own. `sys.exit`, a timeout of any program, or a kill for memory ends a session, and `ExecResult` says so;
        the next call starts a fresh one. A sandbox has at most four sessions: `ValueError` for a fifth name, or a wrong one.
        A snapshot does not hold them.
        """

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Bytes of a regular file; never follows a link. `FileNotFoundError`, or `ValueError` when too large."""

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> bytes:
        """The working directory as a bounded archive that `SandboxBackend.open(..., snapshot=...)` takes.

        Whatever its files and their modes are; `ValueError` when it is too large, and for no other reason.
        """

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Destroys the sandbox and everything in it. Idempotent; never raises for a sandbox that is already gone."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens sandboxes of one kind (docker, bubblewrap).

    A factory gets `root`, the folder that `SandboxSpec.image` is relative to, and `run_label`, to mark what a run leaves open.
    """

    name: str

    async def prepare(self, spec: SandboxSpec) -> None:
        """Builds or finds the image (may take minutes the first time); later `open` calls are fast."""

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox: ...

    async def close(self) -> None:
        """Closes every sandbox this backend still has open, and the backend."""
