"""Starts the learner of a run, watches its progress, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.error_text import cause_in_log
from agentrl.base.files import tail_bytes
from agentrl.base.liveness import Liveness, StoppedProcesses
from agentrl.base.processes import openmp_environment
from agentrl.cluster.link import KEY_VARIABLE
from agentrl.cluster.part_group import PartGroup
from agentrl.cluster.process_host import LocalLauncher
from agentrl.config.recipe import Recipe
from agentrl.errors import LaunchError, LearnerError
from agentrl.learner.driver_reports import ProgressLines, best_reason
from agentrl.protocols import Launcher, PartCommand, PartHandle
from agentrl.protocols.cluster import HOST, PARENT, PORT, PROGRESS, PYTHON, REASONS, ROOT, RUN

if TYPE_CHECKING:
    from agentrl.learner.learner_api import LearnerSessions

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 18
_FIRST_S = 1800.0
"""Deadline in seconds for the first work of each kind: loading the model, compiling for the first batch, writing the first checkpoint."""
_POLL_S = 0.5


class LearnerProcess:
    """`recipe.learner.ranks` workers (`agentrl.learner.main`) and the process that starts them.

    The learner's progress has a deadline (`liveness`): a learner that makes no progress is killed and counts as failed. Output is appended
    to `run_dir/logs/learner.log`, and on further hosts to `learner-1.log` and so on. The processes die with the driver, even if the driver
    is killed. Call `start` from a thread that lives as long as the learner should, because the parent death signal is sent when that thread
    exits.
    """

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        *,
        root: Path | None = None,
        launcher: Launcher | None = None,
        sessions: LearnerSessions | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`root`: project root, for user-supplied parts. `launcher`: if None, the learner starts on this machine. `sessions`: keys for
        a learner that does not share the driver's disk. `alert`: called with the learner's messages for the user.
        """
        self._sessions = sessions
        self.run_dir = run_dir
        self.recipe = recipe
        self.root = root
        self._launcher = launcher or LocalLauncher(run_dir, root=root)
        self._alert = alert
        self.log_path = run_dir / "logs" / "learner.log"
        self.liveness = Liveness("the learner", first_s=_FIRST_S)
        self.stopped = StoppedProcesses("the learner", states=lambda _: self._process.processes() if self._process else {})
        self._process: PartHandle | None = None
        self._progress = ProgressLines()
        self._log_start = 0  # bytes in the log before this start

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """The exit code, or None if the process is running or was never started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Starts the processes and returns at once. Raises `LearnerError` if the processes are already running or no host can start
        them."""
        if self.alive:
            raise LearnerError("the learner is already running")
        self._progress = ProgressLines()
        self.liveness.begin()
        with contextlib.suppress(FileNotFoundError):
            self._log_start = self.log_path.stat().st_size
        try:
            self._process = await self._start_hosts(self.recipe.cluster.learner_nodes)
        except LaunchError as error:
            raise LearnerError(f"the learner cannot be started: {error}") from error

    async def _start_hosts(self, hosts: int) -> PartHandle:
        """Starts the ranks on their hosts. Each host has the same number of ranks. Raises `LaunchError`."""
        ranks, environment = self.recipe.learner.ranks // hosts, self._environment()
        if self._sessions is not None:
            environment[KEY_VARIABLE] = await self._sessions.start()
        if hosts == 1:
            return await self._launcher.start(self._part("learner", str(ranks), environment))
        members: list[PartHandle] = []
        try:
            for number in range(hosts):
                first = f"{members[0].host}:{members[0].port}" if members else f"{HOST}:{PORT}"
                part = self._part(f"learner-{number}", f"{ranks}/{number}/{hosts}@{first}", environment)
                members.append(await self._launcher.start(part))
        except BaseException:
            await asyncio.gather(*(member.kill() for member in members), return_exceptions=True)
            raise
        return PartGroup(members)

    def _part(self, name: str, placement: str, environment: dict[str, str]) -> PartCommand:
        log = "logs/learner.log" if name in ("learner", "learner-0") else f"logs/{name}.log"
        return PartCommand(name=name, argv=tuple(self._command(placement)), environment=environment, log=log, exclusive=True)

    async def wait(self, *, timeout_s: float | None = None) -> None:
        """Waits until the learner exits, and kills it if it makes no progress.

        Raises `LearnerHalted` if the learner stopped at a limit, `UserError` if it rejected the model or the recipe, `DiskFull` if the disk
        is full, `LearnerError` with the cause for any other failure or if the learner was never started, and `TimeoutError` if the learner
        is still running after `timeout_s`.
        """
        if self._process is None:
            raise LearnerError("the learner was never started")
        async with asyncio.timeout(timeout_s):
            await self._ended(self._process)
        self.check()

    async def _ended(self, process: PartHandle) -> None:
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await process.wait()
            self._progress.forward(process.read_progress(), self.liveness, self._alert, offset_s=process.clock_offset_s)
            if process.returncode is None and (stuck := self.liveness.overdue() or self.stopped.overdue(process.pid)):
                await self.kill()
                raise LearnerError(f"{stuck}; it was killed\n  full output: {self.log_path}")
        self.liveness.pause()

    def check(self) -> None:
        """Raises the same errors as `wait` if the learner has exited with an error. Does nothing while the learner is running."""
        process, code = self._process, self.returncode
        if process is None or code in (None, 0):
            return
        if (reason := best_reason(process.reasons())) is not None:
            raise reason.to_error(self.log_path)
        if process.lost:
            raise LearnerError(f"the learner is lost: {process.lost}")
        cause, fix = cause_in_log(self.log_tail())  # it sent no reason: it was killed or failed early
        advice = f"\n  fix: {fix}" if fix else ""
        raise LearnerError(f"the learner exited with code {code}: {cause or 'it gave no reason'}{advice}\n  full output: {self.log_path}")

    async def stop(self, *, grace_s: float = 60.0) -> None:
        """Signals the workers to finish the current step, waits up to `grace_s` seconds, then kills all processes as `kill` does.
        Idempotent."""
        if self._process is None:
            return
        if self.alive:
            # Signal the workers, not the launcher: torchrun would kill them after 30 s.
            await self._process.signal_children(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Kills the learner and returns when none of its processes is left. Idempotent.

        Raises `LearnerError` if a process has not exited within a minute, because a new learner must not write at the same time.
        """
        if self._process is not None:
            try:
                await self._process.kill()
            except LaunchError as error:
                raise LearnerError(str(error)) from error

    def log_tail(self) -> str:
        """Returns the end of the log output since the last start, at most 256 KiB; on several hosts, that of host 0."""
        return tail_bytes(self.log_path, most=_TAIL_BYTES, start=self._log_start)

    def _command(self, placement: str) -> list[str]:
        return [PYTHON, "-m", "agentrl.learner.launch", PARENT, placement, *self._worker()]

    def _worker(self) -> list[str]:
        root = [] if self.root is None else ["--root", ROOT]
        driver = [] if self._sessions is None else ["--driver", self._sessions.url]
        return ["agentrl.learner.main", "--run-dir", RUN, "--mailbox", REASONS, "--progress", PROGRESS, *driver, *root]

    def _environment(self) -> dict[str, str]:
        learner = self.recipe.learner
        cores = self._launcher.cores("learner") or self._launcher.cores("learner-0") or os.cpu_count() or 1  # per host
        threads = learner.threads or max(1, cores * self.recipe.cluster.learner_nodes // learner.ranks)
        return {
            # If server and learner compute at the same time, spinning threads make a step take 2 to 9 times as long (measured).
            **openmp_environment(threads, alone=self.recipe.max_staleness == 0),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
