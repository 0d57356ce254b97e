"""The learner as a child process of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.base.error_text import cause_in_log
from agentrl.base.files import tail_bytes
from agentrl.base.liveness import Liveness, StoppedProcesses
from agentrl.base.processes import openmp_environment, process_tree
from agentrl.base.run_lock import hold_shared_lock
from agentrl.base.secrets import child_environment
from agentrl.config.recipe import Recipe
from agentrl.errors import LearnerError
from agentrl.learner.driver_reports import Mailbox, ProgressPipe

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 18
_FIRST_S = 1800.0
"""Deadline for the learner's first work of a kind: loading the model, compiling for the first batch, writing the first checkpoint."""
_POLL_S = 0.5
_GONE_S = 60.0


class LearnerProcess:
    """A launcher with `recipe.learner.ranks` workers (`agentrl.learner.main`), in its own process group.

    Its progress has a deadline (`liveness`): a learner without progress is killed and counts as failed. Output is appended to
    `run_dir/logs/learner.log`. The processes die with the driver, even if it is killed. Call `start` from a thread that lives as long as
    the learner should, because the parent death signal follows the thread.
    """

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        *,
        gpus: str | None = None,
        root: Path | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`gpus`: CUDA_VISIBLE_DEVICES of the workers; None inherits the driver's. `root`: project root, for user-supplied parts.
        `alert`: called with messages of the learner for the user.
        """
        self.run_dir = run_dir
        self.recipe = recipe
        self.gpus = gpus
        self.root = root
        self._alert = alert
        self.log_path = run_dir / "logs" / "learner.log"
        self.liveness = Liveness("the learner", first_s=_FIRST_S)
        self.stopped = StoppedProcesses("the learner", states=process_tree)
        self._process: asyncio.subprocess.Process | None = None
        self._mailbox = Mailbox()
        self._reports = ProgressPipe()
        self._log_start = 0  # bytes in the log before this start

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """The exit code; None if it runs or was never started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Starts the processes and returns at once. Raises `LearnerError` if they already run."""
        if self.alive:
            raise LearnerError("the learner is already running")
        self._mailbox.discard()
        self._reports.discard()
        self.liveness.begin()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        part = hold_shared_lock(self.run_dir)
        try:
            with self.log_path.open("ab") as output:
                self._log_start = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,
                    pass_fds=(part,),
                )
        finally:
            os.close(part)

    async def wait(self, *, timeout_s: float | None = None) -> None:
        """Waits until the learner ends, and kills it if it makes no progress.

        Raises `LearnerHalted` if it stopped at a limit, `UserError` if it rejects the model or the recipe, `DiskFull` if the disk is full,
        `LearnerError` with the cause for another failure, and `TimeoutError` if it still runs after `timeout_s`.
        """
        if self._process is None:
            raise LearnerError("the learner was never started")
        async with asyncio.timeout(timeout_s):
            await self._ended(self._process)
        self.check()

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await process.wait()
            self._reports.forward(self.liveness, self._alert)
            if process.returncode is None and (stuck := self.liveness.overdue() or self.stopped.overdue(process.pid)):
                await self.kill()
                raise LearnerError(f"{stuck}; it was killed\n  all of its output: {self.log_path}")
        self.liveness.pause()

    def check(self) -> None:
        """Raises as `wait` does if the learner has failed."""
        code = self.returncode
        if code in (None, 0):
            return
        if (reason := self._mailbox.best()) is not None:
            raise reason.to_error(self.log_path)
        cause, fix = cause_in_log(self.log_tail())  # it sent no reason: it was killed or failed early
        advice = f"\n  fix: {fix}" if fix else ""
        raise LearnerError(
            f"the learner ended with exit code {code}: {cause or 'it gave no reason'}{advice}\n  all of its output: {self.log_path}"
        )

    async def stop(self, *, grace_s: float = 60.0) -> None:
        """Asks the workers to finish the current step, waits `grace_s`, then kills all processes. Idempotent."""
        if self._process is None:
            return
        if self.alive:
            # Signal the workers, not the launcher: torchrun would kill them after 30 s.
            for worker in _children(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                await self.kill()

    async def kill(self) -> None:
        """Kills the learner and returns when none of its processes is left. Idempotent.

        Raises `LearnerError` if a process has not ended within a minute: a new learner must not write at the same time.
        """
        if self._process is None or not self.alive:
            return
        workers = _children(self._process.pid)
        self._process.kill()
        await self._process.wait()  # the workers die with the launcher
        try:
            async with asyncio.timeout(_GONE_S):
                while left := [pid for pid in workers if _stat(pid)[0] not in ("", "Z")]:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise LearnerError(
                f"process {left[0]} of the learner does not end after SIGKILL: a disk or GPU does not respond\n"
                "  fix: check the disk and the GPU, and wait for the process to end before you resume"
            ) from None

    def log_tail(self) -> str:
        """Returns the end of the log since the last start."""
        return tail_bytes(self.log_path, most=_TAIL_BYTES, start=self._log_start)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "agentrl.learner.launch", str(os.getpid()), str(self.recipe.learner.ranks), *self._worker()]

    def _worker(self) -> list[str]:
        root = [] if self.root is None else ["--root", str(self.root)]
        addresses = ["--mailbox", self._mailbox.address, "--progress", self._reports.address]
        return ["agentrl.learner.main", "--run-dir", str(self.run_dir), *addresses, *root]

    def _environment(self) -> dict[str, str]:
        learner = self.recipe.learner
        threads = learner.threads or max(1, (os.cpu_count() or 1) // learner.ranks)
        return {
            **child_environment(os.environ),
            **({"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus is not None else {}),
            # If server and learner compute at the same time, spinning threads make a step 2 to 9 times longer (measured).
            **openmp_environment(threads, alone=self.recipe.max_staleness == 0),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process; ("", 0) if it does not exist."""
    try:  # the program's name, in parentheses, may contain anything
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state, int(parent)


def _children(parent: int) -> list[int]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [pid for pid in pids if _stat(pid)[1] == parent]
