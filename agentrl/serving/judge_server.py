"""A vLLM server for a judge: a chat model, or a reward model, on loopback. It has no control routes, and its weights never change."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from agentrl.errors import ServingError
from agentrl.recipe import JudgeServerConfig
from agentrl.runlock import hold_part
from agentrl.serving.control import ControlPlane
from agentrl.serving.process import (
    HEALTH_TIMEOUT_S,
    POLL_S,
    cause_in,
    end_group,
    ended_while_starting,
    environment,
    free_port,
    scratch_folder,
)

HOST = "127.0.0.1"
_WARM_S = 120.0


class JudgeServer:
    """One server, from `start` to `stop`.

    The process leads its own session, and the kernel kills it and its engine when the driver dies. Call `start` from a thread that
    lives as long as the server.
    """

    def __init__(
        self,
        name: str,
        config: JudgeServerConfig,
        *,
        model: Path,
        reward_model: bool,
        folder: Path,
        device: str,
        gpus: str | None = None,
    ) -> None:
        """
        Args:
            name: under which the model is served.
            model: its Hugging Face folder, which was checked.
            reward_model: whether it gives numbers instead of words.
            folder: of the run, or any other that exists: its log is logs/judge-NAME.log there.
            device: "cpu" or "cuda" (`agentrl.serving.serving_device`).
            gpus: CUDA_VISIBLE_DEVICES of the server; None: as in the driver.
        """
        self.name = name
        self.config = config
        self.model = model.resolve()
        self.reward_model = reward_model
        self.folder = folder.resolve()
        self.log_path = self.folder / "logs" / f"judge-{name}.log"
        self.url = ""  # http://127.0.0.1:PORT, once it was started
        self._device, self._gpus = device, gpus
        self._process: asyncio.subprocess.Process | None = None
        self._control: ControlPlane | None = None
        self._scratch: Path | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and returns once it has answered a question.

        Raises `UserError` for a port that is taken and `ServingError`, with the cause from the log, when the
        process dies or `startup_timeout_s` passes.
        """
        assert self._process is None, "a server is started once"
        port = free_port(HOST, self.config.port, key=f"judge_servers.{self.name}.port")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = scratch_folder(f"{self.folder}\n{self.name}")
        self.url = f"http://{HOST}:{port}"
        self._control = ControlPlane(self.url)
        part = hold_part(self.folder)
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                threads = self.config.threads if self._device == "cpu" else None
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(port),
                    env={**os.environ, **environment(self._scratch, cpu_threads=threads, gpus=self._gpus)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(part,),
                )
            async with asyncio.timeout(self.config.startup_timeout_s):
                await self._make_ready(self._process, self._control)
        except TimeoutError:
            await self.stop()
            cause = cause_in(self.log_path, self._log_start)[0]
            raise ServingError(
                f"the judge's server {self.name} was not ready after {self.config.startup_timeout_s:g} s; its log ends with: {cause}"
                f"\n  all of its output: {self.log_path}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            os.close(part)

    async def alive(self) -> bool:
        """Whether process and engine live. Waits at most 15 s."""
        if self._process is None or self._process.returncode is not None or self._control is None:
            return False
        return await self._control.healthy(timeout_s=HEALTH_TIMEOUT_S)

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

    def _command(self, port: int) -> list[str]:
        config = self.config
        launch = [sys.executable, "-P", "-m", "agentrl.serving.launch", "--driver-pid", str(os.getpid())]
        arguments = {
            "--model": str(self.model),
            "--served-model-name": self.name,
            "--host": HOST,
            "--port": str(port),
            "--dtype": config.dtype,
            "--max-model-len": str(config.max_model_len),
            "--max-num-seqs": str(config.max_num_seqs),
            # A generation_config.json beside the weights must not change what a judge's endpoint asks for.
            "--generation-config": "vllm",
        }
        flags = ["--disable-uvicorn-access-log"]
        if self.reward_model:
            arguments |= {"--runner": "pooling", "--convert": "classify"}
        if self._device == "cpu":
            launch += ["--cpu-threads", str(config.threads)]
            arguments |= {"--kv-cache-memory-bytes": str(int(config.kv_cache_gb * 2**30)), "--block-size": "32"}
            flags.append("--enforce-eager")  # compilation takes minutes
        else:
            arguments["--gpu-memory-utilization"] = str(config.gpu_memory_utilization)
        return [*launch, "--", *(part for pair in arguments.items() for part in pair), *flags]

    async def _make_ready(self, process: asyncio.subprocess.Process, control: ControlPlane) -> None:
        while not await control.healthy(timeout_s=HEALTH_TIMEOUT_S):
            if process.returncode is not None:
                raise ended_while_starting(f"the judge's server {self.name}", process.returncode, self.log_path, self._log_start)
            await asyncio.sleep(POLL_S)
        # The first request pays for lazy set-up, so make it before the first question does.
        if self.reward_model:
            await control.request("POST", "/classify", timeout_s=_WARM_S, json={"model": self.name, "input": [0, 0]})
        else:
            body = {"model": self.name, "prompt": [0, 0], "max_tokens": 2}
            await control.request("POST", "/v1/completions", timeout_s=_WARM_S, json=body)
