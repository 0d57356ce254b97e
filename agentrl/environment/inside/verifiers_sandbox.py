"""Runs verifiers' programs in the episode's agentrl sandbox. Used by `verifiers_tasksets.py`.

Without this module, verifiers would run these programs on this machine. Tool servers, which are part of the package's code, still run on
this machine.
"""

from __future__ import annotations

import base64
import posixpath
from typing import Any

from host_channel import TASK, Caller, Fault
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError, TaskError
from verifiers.v1.runtimes.base import ProgramResult
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

PROGRAM_S = 3600.0  # maximum running time of a program; agentrl also applies the episode's time limit
OUTPUT_BYTES, FILE_BYTES = 1 << 20, 8 << 20
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = 'head -c "$2" -- "$1" | base64 -w 0; test -r "$1"'

CALLERS: dict[str, Caller] = {}
"""Maps the name of a runtime, which is the id of its trace, to the `Caller` of its episode."""


class EpisodeRuntime(SubprocessRuntime):
    """A verifiers runtime: the sandbox of an episode, or this machine for programs that do not belong to an episode."""

    def __init__(self, config: Any, name: str | None = None) -> None:
        super().__init__(config, name)
        self._caller = CALLERS.get(self.name)

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Runs a program. In a sandbox, a killed program has the exit code 137, and a fault raises `SandboxError` or `TaskError`."""
        if self._caller is None:
            return await super().run(argv, env)
        done = await self._exec(argv, env=self.process_env(env))
        code = done["exit_code"]
        return ProgramResult(exit_code=137 if code is None else code, stdout=done["stdout"], stderr=done["stderr"] or done["reason"])

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file and creates its folders. Raises `SandboxError` if the file cannot be written."""
        if self._caller is None:
            await super().write(path, data)
        elif (done := await self._exec(["sh", "-c", _WRITE, "sh", _plain(path)], data))["exit_code"] != 0:
            raise SandboxError(f"write {path!r}: {done['stderr'][:500]}")

    async def _read(self, path: str, max_bytes: int | None = None) -> Any:
        if self._caller is None:
            return await super()._read(path, max_bytes)
        most = FILE_BYTES + 1 if max_bytes is None else min(max_bytes, FILE_BYTES + 1)
        done = await self._exec(["sh", "-c", _READ, "sh", _plain(path), str(most)], output_bytes=2 * most)
        if done["exit_code"] != 0:
            raise SandboxError(f"read {path!r}: {done['stderr'][:500]}")
        if len(data := base64.b64decode(done["stdout"])) > FILE_BYTES:
            raise SandboxError(f"read {path!r}: over agentrl's limit of {FILE_BYTES} bytes")
        return data

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Starts a program that keeps running, such as a tool server. Raises `TaskError` if the runtime is a sandbox."""
        if self._caller is not None:
            raise TaskError("agentrl's sandboxes cannot run programs in the background")
        await super().run_background(argv, env, log)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
        """Starts a program with pipes. Raises `TaskError` if the runtime is a sandbox."""
        if self._caller is not None:
            raise TaskError("agentrl's sandboxes cannot run programs with pipes")
        return await super().open_process(argv, env)

    async def _exec(
        self, argv: list[str], stdin: bytes = b"", *, env: dict[str, str] | None = None, output_bytes: int = OUTPUT_BYTES
    ) -> dict[str, Any]:
        assert self._caller is not None, "it has an episode"
        data = base64.b64encode(stdin).decode()
        try:
            result: dict[str, Any] = await self._caller.request(
                "exec", argv=argv, stdin=data, timeout_s=PROGRAM_S, output_bytes=output_bytes, env=env
            )
        except Fault as fault:
            kind = TaskError if fault.blame == TASK else SandboxError
            raise kind(f"the package runs {argv[0]!r} in a sandbox (option image): {fault}") from fault
        return result


def serve_programs() -> None:
    """Replaces `SubprocessRuntime`, with which `verifiers` runs programs on this machine, with `EpisodeRuntime`."""
    runtimes.SubprocessRuntime = EpisodeRuntime


def _plain(path: str) -> str:
    """Returns a path in a form that no program interprets as an option."""
    return path if posixpath.isabs(path) else f"./{path}"
