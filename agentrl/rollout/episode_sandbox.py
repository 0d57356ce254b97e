"""The sandbox and the environment of one episode. Both are opened on first use and closed once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from agentrl.base import user_code
from agentrl.base.activity import ACTIVITY, SANDBOXES
from agentrl.environment import open_environment
from agentrl.errors import SandboxError, SandboxUnavailable, TaskError, UserError
from agentrl.protocols import Environment, Sandbox
from agentrl.records import MAX_SNAPSHOT_BYTES, EnvironmentSpec, Task
from agentrl.task.outputs import sandbox_of

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


CLOSE_S = 60.0
"""Maximum seconds for closing a sandbox. After that, its backend closes it at the end of the run."""


class EpisodeSandbox:
    """The sandbox of one or more agents in an episode. The sandbox is opened on first use, because many episodes of a weak policy never use
    it.

    Args:
        episode: episode that records the sandbox's time and faults.
        snapshot: snapshot of the initial working directory; None means that the directory contains the task's files.
    """

    def __init__(self, episode: ActiveEpisode, snapshot: bytes | None = None) -> None:
        self.lost = False  # whether a tool call in it was interrupted, so that its files are undefined
        self._episode = episode
        self._snapshot = snapshot
        self._sandbox: Sandbox | None = None
        self._opening = asyncio.Lock()  # concurrent agents share the sandbox
        self._over, self._closed = False, False

    @property
    def opened(self) -> bool:
        """Whether the sandbox was opened."""
        return self._sandbox is not None

    @property
    def untouched(self) -> bool:
        """Whether the sandbox was never opened, so that its files are the task's."""
        return self._sandbox is None and self._snapshot is None

    async def sandbox(self) -> Sandbox:
        """Returns the sandbox. Raises `SandboxError` if the sandbox cannot be opened or `close` was called, and `TaskError` if the task's
        sandbox cannot be created."""
        async with self._opening:
            return self._sandbox or await self._open()

    async def snapshot(self) -> bytes | None:
        """Returns the content of the working directory; None means the task's initial files. Raises the errors of `Sandbox.snapshot`."""
        return self._snapshot if self._sandbox is None else await self._sandbox.snapshot()

    async def working_copy(self) -> bytes | None:
        """See `LiveEpisode.working_copy`."""
        self._episode.stage = "sandbox"
        started = time.monotonic()
        copy = await self.snapshot()
        self._episode.sandbox_s += time.monotonic() - started
        if copy is not None and len(copy) > MAX_SNAPSHOT_BYTES:
            raise ValueError(f"the working directory takes {len(copy) >> 20} MiB; at most {MAX_SNAPSHOT_BYTES >> 20} MiB are copied")
        return copy

    async def _open(self) -> Sandbox:
        if self._over:
            raise SandboxError("the episode, or the sub-agent that used this sandbox, has ended")
        episode = self._episode
        episode.stage = "sandbox"
        task, started = episode.task, time.monotonic()
        files = task_files(task) if self._snapshot is None else None
        try:
            with ACTIVITY.doing(SANDBOXES):
                sandbox = await episode.sandboxes.open(
                    sandbox_of(task), files=files, snapshot=self._snapshot, timeout_s=episode.open_timeout_s
                )
        except (SandboxUnavailable, TaskError, UnicodeError):  # `task_files` checked the names and contents of the files
            raise
        except UserError as error:  # an image that cannot be built
            raise TaskError(f"task {task.id!r}: {error.message}", fix=error.fix) from error
        except ValueError as error:
            if self._snapshot is not None:
                raise SandboxError(f"the backend rejected the snapshot: {error}") from error
            message = f"task {task.id!r}: its files do not fit into its sandbox: {error}"
            raise TaskError(message, fix="raise sandbox.disk_mb") from error
        self._sandbox = sandbox
        episode.sandbox_s += time.monotonic() - started
        if self._over:  # closed while it was opening, because an agent ignored its cancellation
            await self._end(sandbox)
        return sandbox

    async def close(self) -> None:
        """Closes the sandbox. No sandbox is opened afterwards. An error during closing is logged and does not affect the episode."""
        self._over = True
        if self._sandbox is not None and not self._closed:
            await self._end(self._sandbox)

    async def _end(self, sandbox: Sandbox) -> None:
        started = time.monotonic()
        with user_code.logging_faults("closing a sandbox"):
            async with asyncio.timeout(CLOSE_S):
                await sandbox.close()
        self._closed = True
        self._episode.sandbox_s += time.monotonic() - started


class EpisodeEnvironment:
    """The environment of an episode, opened on first use."""

    def __init__(self, spec: EnvironmentSpec | None, *, alone: bool = False) -> None:
        self._spec, self._alone = spec, alone
        self._environment: Environment | None = None

    async def environment(self) -> Environment:
        """Returns the environment. The first call opens the environment, and raises the errors of `open_environment`."""
        if self._environment is None:
            assert self._spec is not None, "the task has no environment"
            self._environment = await open_environment(self._spec, alone=self._alone)
        return self._environment

    async def close(self) -> None:
        """Closes the environment. An error during closing is logged and does not affect the episode."""
        if self._environment is not None:
            with user_code.logging_faults("closing an environment"):
                async with asyncio.timeout(CLOSE_S):
                    await self._environment.close()


def task_files(task: Task) -> dict[str, bytes]:
    """Returns the task's files. Raises `TaskError` if a name or content cannot be written."""
    try:
        files = task.contents()
        for path in files:
            path.encode()
        return files
    except ValueError as error:
        raise TaskError(f"task {task.id!r} has a file that cannot be written: {error}", fix="use UTF-8 for its name and content") from error
