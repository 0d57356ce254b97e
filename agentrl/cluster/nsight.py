"""Nsight Systems for the parts of a run on this machine. Parts start under `nsys launch`, and are recorded only between `start` and `stop`.

Each part has a session in nsys and writes one report. Source: NVIDIA Nsight Systems User Guide, "Interactive CLI Command Sequences".
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.local_gpus import visible_gpus
from agentrl.errors import InfrastructureError, UserError
from agentrl.protocols.cluster import PARENT, PYTHON, PartCommand

RECORDED = ("learner", "server")
"""Prefixes of the names of recorded parts."""
_START_S, _STOP_S = 60.0, 600.0  # a report can have several gigabytes
_HERE = "{parent of the part}"
# nsys starts the part, so the part must die with nsys, and nsys must die with the driver.
_OUTER = (
    "import os, sys; from agentrl.base.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    " os.execv(sys.argv[2], sys.argv[2:])"
)
_INNER = f"import os, sys; os.execv(sys.argv[1], [text.replace({_HERE!r}, str(os.getppid())) for text in sys.argv[1:]])"


class NsightSessions:
    """The nsys sessions of one run.

    Raises `UserError` if nsys is not installed, or if this machine has no NVIDIA GPU.

    Args:
        folder: folder for the reports, one per part.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("nsys")
        if program is None:
            raise UserError("nsys is not installed", fix="install NVIDIA Nsight Systems and add nsys to PATH, or omit --nsight")
        if not visible_gpus():
            raise UserError("no NVIDIA GPU is visible, so Nsight has nothing to record", fix="omit --nsight, or use a machine with a GPU")
        self.folder, self._program = folder, program
        self._sessions: dict[str, str] = {}  # session -> part

    def wrap(self, command: PartCommand) -> PartCommand:
        """Returns the command that starts a part under nsys, or the unchanged command if the part is not recorded."""
        if not command.name.startswith(RECORDED):
            return command
        session = f"agentrl-{os.getpid()}-{command.name}-{len(self._sessions)}"
        self._sessions[session] = command.name
        launch = [
            self._program,
            "launch",
            f"--session-new={session}",
            "--trace=cuda,nvtx,osrt,cublas",
            "--trace-fork-before-exec=true",
        ]
        part = (text.replace(PARENT, _HERE) for text in command.argv)
        return replace(command, argv=(PYTHON, "-c", _OUTER, PARENT, *launch, PYTHON, "-c", _INNER, *part))

    async def start(self) -> None:
        """Starts recording all parts. Raises `InfrastructureError` if nsys fails."""
        self.folder.mkdir(parents=True, exist_ok=True)

        async def start(session: str, part: str) -> None:
            output = f"--output={str(self.folder / part).replace('%', '%%')}"  # nsys replaces %p, %h and %q{VARIABLE}
            await self._run("start", f"--session={session}", output, "--force-overwrite=true", "--sample=process-tree", within_s=_START_S)

        await self._all(start)

    async def stop(self) -> None:
        """Stops recording, and returns when the reports have been written. Raises `InfrastructureError` if nsys fails."""

        async def stop(session: str, part: str) -> None:
            await self._run("stop", f"--session={session}", within_s=_STOP_S)

        await self._all(stop)

    async def _all(self, work: Callable[[str, str], Awaitable[None]]) -> None:
        """Calls `work` for the newest nsys session of each part. An older session belongs to a part that was restarted."""
        newest = {part: session for session, part in self._sessions.items()}
        for result in await asyncio.gather(*(work(session, part) for part, session in newest.items()), return_exceptions=True):
            if result is not None:
                raise result

    async def _run(self, *arguments: str, within_s: float) -> None:
        process = await asyncio.create_subprocess_exec(
            self._program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), within_s)
        except TimeoutError:
            raise InfrastructureError(f"nsys {arguments[0]} did not exit within {within_s:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise InfrastructureError(f"nsys {' '.join(arguments)} failed: {output.decode('utf-8', 'replace').strip()[-2000:]}")
