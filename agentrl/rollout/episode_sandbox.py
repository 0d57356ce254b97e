"""A sandbox of one episode: opened at the first need, from the task's files or from a snapshot, and closed once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from agentrl.base import user_code
from agentrl.errors import SandboxError, SandboxUnavailable, TaskError, UserError
from agentrl.protocols import Sandbox
from agentrl.records import MAX_SNAPSHOT_BYTES, Task

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


CLOSE_S = 60.0
"""How long a sandbox may take to close; after that its backend ends it when the run does."""


class EpisodeSandbox:
    """Where one or several agents of an episode work. Many episodes of a weak policy never open it.

    Args:
        life: of the episode, whose time it counts in.
        snapshot: what the working directory holds at first; None: the task's files.
    """

    def __init__(self, life: ActiveEpisode, snapshot: bytes | None = None) -> None:
        self.lost = False  # a tool was cut short in it: its files mean nothing any more
        self._life = life
        self._snapshot = snapshot
        self._sandbox: Sandbox | None = None
        self._opening = asyncio.Lock()  # agents that work side by side share it
        self._over, self._closed = False, False

    @property
    def opened(self) -> bool:
        return self._sandbox is not None

    @property
    def untouched(self) -> bool:
        """Whether its files are the task's, since nothing ever ran in it."""
        return self._sandbox is None and self._snapshot is None

    async def sandbox(self) -> Sandbox:
        """Raises `SandboxError`, also once it is closed, and `TaskError` when the task's cannot be made."""
        async with self._opening:
            return self._sandbox or await self._open()

    async def snapshot(self) -> bytes | None:
        """What the working directory holds; None: what the task's begins with. Raises as `Sandbox.snapshot` does."""
        return self._snapshot if self._sandbox is None else await self._sandbox.snapshot()

    async def working_copy(self) -> bytes | None:
        """See `LiveEpisode.working_copy`."""
        self._life.stage = "sandbox"
        started = time.monotonic()
        copy = await self.snapshot()
        self._life.sandbox_s += time.monotonic() - started
        if copy is not None and len(copy) > MAX_SNAPSHOT_BYTES:
            raise ValueError(f"the working directory takes {len(copy) >> 20} MiB; at most {MAX_SNAPSHOT_BYTES >> 20} MiB are copied")
        return copy

    async def _open(self) -> Sandbox:
        if self._over:
            raise SandboxError("the episode is over, or that part of it that this sandbox was for")
        life = self._life
        life.stage = "sandbox"
        task, started = life.task, time.monotonic()
        files = task_files(task) if self._snapshot is None else None
        try:
            sandbox = await life.sandboxes.open(task.sandbox, files=files, snapshot=self._snapshot, timeout_s=life.open_timeout_s)
        except (SandboxUnavailable, UnicodeError):  # the files' names and texts have been looked at
            raise
        except UserError as error:  # an image that cannot be made
            raise TaskError(f"task {task.id!r}: {error.message}", fix=error.fix) from error
        except ValueError as error:
            if self._snapshot is not None:
                raise SandboxError(f"the snapshot was refused: {error}") from error
            message = f"task {task.id!r}: its files do not go into its sandbox: {error}"
            raise TaskError(message, fix="raise sandbox.disk_mb") from error
        self._sandbox = sandbox
        life.sandbox_s += time.monotonic() - started
        if self._over:  # closed meanwhile, around an agent that does not mind that it was cancelled
            await self._end(sandbox)
        return sandbox

    async def close(self) -> None:
        """Ends the sandbox, and opens none from now on. What goes wrong here takes nothing from the episode, which has what it needs."""
        self._over = True
        if self._sandbox is not None and not self._closed:
            await self._end(self._sandbox)

    async def _end(self, sandbox: Sandbox) -> None:
        started, since = time.monotonic(), user_code.cancellation_count()
        try:
            async with asyncio.timeout(CLOSE_S):
                await sandbox.close()
        except BaseException as error:
            user_code.reraise_if_fatal(error, since)
            user_code.log_unexpected("closing a sandbox", error)
        self._closed = True
        self._life.sandbox_s += time.monotonic() - started


def task_files(task: Task) -> dict[str, bytes]:
    """The task's files. Raises `TaskError` for names and texts that cannot be written."""
    try:
        files = task.contents()
        for path in files:
            path.encode()
        return files
    except ValueError as error:
        raise TaskError(
            f"task {task.id!r}: one of its files cannot be written: {error}", fix="give it a name and content in UTF-8"
        ) from error
