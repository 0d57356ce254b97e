"""The base class of server processes, with their command and environment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.base.error_text import cause_in_log
from agentrl.base.files import tail_bytes
from agentrl.base.liveness import Liveness, StoppedProcesses
from agentrl.base.processes import openmp_environment
from agentrl.cluster.process_host import LocalLauncher
from agentrl.config.recipe import JudgeServerConfig, ServingConfig
from agentrl.errors import DiskFull, LaunchError, ServingError
from agentrl.protocols import Launcher, PartCommand, PartHandle
from agentrl.protocols.cluster import HOST, PARENT, PORT, PYTHON, SCRATCH
from agentrl.serving import access
from agentrl.serving.control import ControlPlane

log = logging.getLogger(__name__)

POLL_S = 0.1
HEALTH_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
WARM_S = 120.0
_COMPUTING = "computing tokens"
_FIRST_S = 600.0
"""Deadline in seconds for a server's first tokens. The first request may have to wait for compilation."""
READ_TOKENS = 256
"""Number of tokens in the prompt that measures a server's speed."""
_CHECK_S = 5.0  # seconds between two checks for computed tokens
_COMPUTED = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
_END_S = 1.0  # maximum wait for a process to exit after its connection was lost
_MEASURE_TRIES = 3  # maximum number of starts if other processes disturb a server's measurement of the GPU's memory
_DISTURBED = "Error in memory profiling"  # in vLLM's message
_LOG_BYTES = 1 << 20  # bytes at the end of a log that are searched for a cause


class ServerProcess(ABC):
    """One vLLM server, from its start to `stop`.

    The process and its engine die with the driver. Start the server from a thread that lives as long as the server.
    """

    def __init__(self, what: str, *, folder: Path, name: str, log: str, launcher: Launcher | None = None) -> None:
        """`what`: the server's name in error messages. `name`: see `PartCommand`. `log`: file name in `folder`/logs/. `launcher`: if None,
        the server starts on this machine.
        """
        self.log_path = folder / "logs" / log
        self.key = access.new_key()
        self._what, self._name = what, name
        self._launcher = launcher or LocalLauncher(folder)
        self._cores = self._launcher.cores(name) or 0  # cores reserved for the server; 0 means that it shares the driver's machine
        self._threads: int | None = None  # threads of the engine on CPU; None means a GPU
        self._process: PartHandle | None = None
        self._control: ControlPlane | None = None
        self.prompt_token_s = 0.0  # seconds per prompt token, measured at the start
        self._log_start = 0  # bytes in the log before this start
        self.liveness = Liveness(what, first_s=_FIRST_S)
        self.stopped = StoppedProcesses(what, states=lambda _: self._process.processes() if self._process else {})
        self.end_reason = ""  # why the server counts as dead; empty while it is alive
        self._next_check = 0.0  # on the loop's clock
        self._computed: tuple[float, ...] = ()
        self._answers, self._answers_seen = 0, 0
        self._token_task: asyncio.Task[None] | None = None
        self._killed = False

    @property
    def control(self) -> ControlPlane:
        """The server's routes. Raises `ServingError` if the server is not running."""
        if self._control is None:
            raise ServingError(f"{self._what} is not running")
        return self._control

    @property
    def pid(self) -> int | None:
        """The process id on its host; None before the start and after `stop`."""
        return None if self._process is None else self._process.pid

    async def alive(self) -> bool:
        """Whether the process is alive and not suspended, and its engine computes tokens. If not, sets `end_reason`. Waits at most 20 s.

        If a server does not respond, its engine is assumed to compute nothing.
        """
        if self._process is None or self._process.returncode is not None or self._control is None:
            self.end_reason = (self._process and self._process.lost) or "it died"
            return False
        if stuck := self.stopped.overdue(self._process.pid):  # checked first, because its routes may not respond
            self.end_reason = stuck
            return False
        control, health = self._control, await self._control.health(timeout_s=HEALTH_TIMEOUT_S)
        if health == "down":
            self.end_reason = "its engine died"
            return False
        await self._check_progress(control, answers=health == "answers")
        self.end_reason = self.liveness.overdue()
        return not self.end_reason

    async def was_killed(self) -> bool:
        """Whether the kernel (out of memory) or a user killed the process before `stop`. Waits up to a second for the process to exit.
        After `stop`, returns the result of the last call before it."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            self._killed = self._process.returncode == -signal.SIGKILL
        return self._killed

    def answered(self) -> None:
        """Records a response to a client, which counts as progress even if other routes are slow under load."""
        self._answers += 1

    async def _check_progress(self, control: ControlPlane, *, answers: bool) -> None:
        """Checks whether anything was computed since the last check, and if not, requests a token. `answers`: whether the server's routes
        respond."""
        if control.paused:  # the pausing operation has a deadline
            self.liveness.pause()
            return
        if self.liveness.deadline_s == math.inf:  # it was paused
            self.liveness.progress(_COMPUTING)
        now = asyncio.get_running_loop().time()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_S
        if self._answers != self._answers_seen:
            self._answers_seen = self._answers
            self.liveness.progress(_COMPUTING)
            return
        if not answers:
            return
        try:
            metrics = await control.metrics()
        except ServingError:
            return
        computed = tuple(metrics.get(name, 0.0) for name in _COMPUTED)
        if computed != self._computed:
            self._computed = computed
            self.liveness.progress(_COMPUTING)
        elif self._token_task is None or self._token_task.done():
            self._token_task = asyncio.create_task(self._request_token(control), name=f"token of {self._what}")

    async def _request_token(self, control: ControlPlane) -> None:
        with contextlib.suppress(ServingError):  # the next check retries
            await self._token(control, tokens=2, timeout_s=_FIRST_S)
            self.liveness.progress(_COMPUTING)

    def kill(self) -> None:
        """Kills the process and its engine, without waiting for them to exit."""
        if self._process is not None:
            self._process.send_kill()

    async def stop(self) -> None:
        """Stops the process and all its children, first with SIGTERM, then with SIGKILL. Idempotent. A failure to stop a process is only
        logged."""
        if self._token_task is not None:
            self._token_task.cancel()
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            await control.close()
        if process is not None:
            try:
                await process.terminate(grace_s=STOP_TIMEOUT_S)
            except LaunchError as error:  # its successor has a different port
                log.warning("%s", error)

    @abstractmethod
    def _command(self) -> list[str]:
        """Returns the command to run, with placeholders; see `launch_command`."""

    def _needs(self) -> tuple[str, ...]:
        """Returns the folders of the run that must be on the server's host before the start."""
        return ()

    def _environment(self) -> dict[str, str]:
        """Returns the environment variables that the process has in addition to those of its host."""
        return server_environment(SCRATCH, cpu_threads=self._threads)

    @abstractmethod
    async def _token(self, control: ControlPlane, *, tokens: int, timeout_s: float) -> None:
        """Requests one or two tokens for a prompt of `tokens` tokens. Raises `ServingError`."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The maximum length of a prompt that the server accepts, in tokens."""

    async def _measure(self, control: ControlPlane) -> None:
        """Measures the idle server's speed. The deadline depends on the speed, because a long prompt is computed without visible
        progress."""
        tokens = max(1, min(READ_TOKENS, self.max_tokens - 2))
        start = time.monotonic()
        await self._token(control, tokens=tokens, timeout_s=_FIRST_S)
        self.prompt_token_s = (time.monotonic() - start) / tokens
        self.liveness.needs_s = self.prompt_token_s * self.max_tokens

    async def _prepare(self, control: ControlPlane) -> None:  # noqa: B027 - optional
        """Prepares a healthy server for its first request."""

    async def _begin(self, *, timeout_s: float) -> None:
        """Starts the process and returns when it is ready.

        On a shared GPU, a server exits if another process frees memory while the server measures the free memory. In that case, the server
        is restarted.

        Raises `DiskFull` if the disk is full, and `ServingError`, with the cause from the log, if the process dies for another reason or
        `timeout_s` passes.
        """
        for tries_left in reversed(range(_MEASURE_TRIES)):
            try:
                return await self._begin_once(timeout_s=timeout_s)
            except ServingError as error:
                if not tries_left or _DISTURBED not in str(error):
                    raise
                log.warning("%s is restarted: another process freed GPU memory while the server measured the free memory", self._what)

    async def _begin_once(self, *, timeout_s: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._log_start = self.log_path.stat().st_size
        try:
            async with asyncio.timeout(timeout_s):
                self._process = await self._launcher.start(self._part())
                self._control = ControlPlane(f"http://{self._process.host}:{self._process.port}", key=self.key)
                await self._make_ready(self._process, self._control)
        except TimeoutError:
            await self.stop()
            cause = cause_in(self.log_path, self._log_start)[0]
            raise ServingError(
                f"{self._what} was not ready after {timeout_s:g} s; its log ends with: {cause}\n  full output: {self.log_path}"
            ) from None
        except ServingError:
            await self.was_killed()  # records the signal before the process is stopped
            await self.stop()
            raise
        except LaunchError as error:
            raise ServingError(f"{self._what} cannot be started: {error}") from error
        except BaseException:
            await self.stop()
            raise

    def _part(self) -> PartCommand:
        return PartCommand(
            name=self._name,
            argv=tuple(self._command()),
            environment={**self._environment(), access.KEY_VARIABLE: self.key},
            log=f"logs/{self.log_path.name}",
            needs=self._needs(),
        )

    async def _make_ready(self, process: PartHandle, control: ControlPlane) -> None:
        while await control.health(timeout_s=HEALTH_TIMEOUT_S) != "answers":
            if process.returncode is not None:
                raise ended_while_starting(self._what, process.returncode, self.log_path, self._log_start)
            await asyncio.sleep(POLL_S)
        await self._prepare(control)
        # The first request is slow, because of lazy set-up.
        await self._token(control, tokens=2, timeout_s=WARM_S)
        await self._measure(control)
        self.liveness.begin(_COMPUTING)
        if process.returncode is not None:  # another process responded at its port
            raise ended_while_starting(self._what, process.returncode, self.log_path, self._log_start)


def launch_command(
    config: ServingConfig | JudgeServerConfig, arguments: Mapping[str, str], flags: Sequence[str], *, cpu_threads: int | None
) -> list[str]:
    """Returns the command for a vLLM server that dies with its parent.

    The command contains `arguments`, `flags` and the options that all servers have. `cpu_threads`: threads of the engine on CPU; None means
    a GPU.
    """
    launch = [PYTHON, "-P", "-m", "agentrl.serving.launch", "--driver-pid", PARENT]
    common = {
        "--load-format": "safetensors",
        "--max-num-seqs": str(config.max_num_seqs),
        # The model's generation_config.json must not change the sampling parameters of requests.
        "--generation-config": "vllm",
        "--middleware": access.MIDDLEWARE,
        "--host": HOST,
        "--port": PORT,
    }
    options = [*flags, "--disable-uvicorn-access-log"]
    if cpu_threads is None:
        common["--gpu-memory-utilization"] = str(config.gpu_memory_utilization)
    else:
        launch += ["--cpu-threads", str(cpu_threads)]
        common["--kv-cache-memory-bytes"] = str(int(config.kv_cache_gb * 2**30))
        # The minimum of vLLM's CPU kernels. Only complete blocks are shared between requests: with vLLM's default of 128 tokens, about
        # a turn, requests would recompute most of their context.
        common["--block-size"] = "32"
        options.append("--enforce-eager")  # compilation takes minutes and gains nothing at this model size
    return [*launch, "--", *(part for pair in {**arguments, **common}.items() for part in pair), *options]


def server_environment(scratch: str, *, cpu_threads: int | None, alone: bool = False) -> dict[str, str]:
    """Returns the environment variables that a vLLM server has in addition to those of its host.

    `scratch`: path of an empty folder. `cpu_threads`: threads of the engine on CPU; None means a GPU. `alone`: whether no other process
    computes at the same time.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "30",
        "VLLM_RPC_BASE_PATH": scratch,
        "TMPDIR": scratch,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # no file of the model is unpickled
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if cpu_threads is None:
        return common
    return common | {
        # The worker runs in the engine's process, which avoids a second spawn and polling of a shared-memory queue.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Even with --enforce-eager, one helper would be compiled with g++ during the first request.
        "TORCHDYNAMO_DISABLE": "1",
        **openmp_environment(cpu_threads, alone=alone),
    }


def thread_count(threads: int, *, servers: int = 1) -> int:
    """Returns the number of CPU threads: `threads` or, if it is 0, this server's share of this process's cores, at least 1."""
    return threads or max(1, len(os.sched_getaffinity(0)) // servers)


def cause_in(log_path: Path, start: int) -> tuple[str, str]:
    """Searches a server's log from byte `start` on for the cause of a failure. Returns the cause and the fix; each is empty if unknown."""
    with contextlib.suppress(OSError):
        return cause_in_log(tail_bytes(log_path, most=_LOG_BYTES, start=start))
    return "", ""


def ended_while_starting(what: str, code: int, log_path: Path, start: int) -> ServingError | DiskFull:
    """Returns the error for a server that exited with `code` before it was ready: `DiskFull` if the disk is full, else `ServingError`."""
    cause, fix = cause_in(log_path, start)
    if cause == "the disk is full":
        return DiskFull(f"{what} ended while starting: {cause}")
    if not cause and code < 0:
        cause = f"it was killed by signal {-code}"
    advice = f"\n  fix: {fix}" if fix else ""
    details = f"{cause or 'it gave no reason'}{advice}\n  full output: {log_path}"
    return ServingError(f"{what} exited with code {code} while starting: {details}")
