"""The policy's vLLM server as a child process."""

from __future__ import annotations

import json
import time
from pathlib import Path, PurePosixPath

from agentrl.cluster.device import serving_device
from agentrl.config.recipe import Recipe
from agentrl.errors import LaunchError, ServingError
from agentrl.protocols import Launcher
from agentrl.protocols.cluster import RUN, SCRATCH
from agentrl.serving.control import ControlPlane
from agentrl.serving.images import SERVER_ARGUMENTS, PromptImages
from agentrl.serving.plugin import BACKEND as FILE_BACKEND
from agentrl.serving.process import WARM_S, ServerProcess, launch_command, server_environment, thread_count
from agentrl.serving.weight_state import WeightState
from agentrl.version.model_folder import check_model_files

PROBE_PRIORITY = -(1 << 62)
"""Priority of a probe, which comes before every completion (`agentrl.serving.client.request_priority`)."""
WRITE_TOKENS = 16
"""Number of tokens that are sampled at the start to measure the time per token."""
_SAMPLING = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "detokenize": False}


class VLLMServer(ServerProcess):
    """One vLLM server with the weights of one policy version, from `start` to `stop`."""

    def __init__(
        self, *, recipe: Recipe, model: Path, version: int, run_dir: Path, name: str = "", launcher: Launcher | None = None
    ) -> None:
        """`model`: folder of policy version `version`. `name`: distinguishes a run's servers; empty if there is only one.
        `launcher`: see `ServerProcess`.
        """
        self.run_dir = run_dir.resolve()
        super().__init__(
            server_title(name),
            folder=self.run_dir,
            name=name if name == "gate" else f"server-{name}" if name else "server",
            log=server_log_name(name),
            launcher=launcher,
        )
        self.recipe = recipe
        self.model = model.resolve()
        self.images = PromptImages.of(self.run_dir, self.model)
        self.weights = WeightState(version)
        self._condemned = ""
        self.token_s = 0.0  # seconds per sampled token in one request, measured at the start

    @property
    def url(self) -> str:
        """`http://host:port`. Raises `ServingError` if the server is not running."""
        return self.control.url

    async def start(self) -> None:
        """Starts the process and returns when it has sampled a token.

        Raises `UserError` if the model folder is invalid, `DiskFull` if the disk is full, and `ServingError`, with the cause from the log,
        if the process dies for another reason or `serving.startup_timeout_s` passes.
        """
        if self._process is not None:
            raise ServingError("the inference server is already started")
        serving = self.recipe.serving
        if serving_device(self.recipe) == "cpu":
            self._threads = thread_count(serving.threads or self._cores, servers=serving.replicas)
        check_model_files(self.model)
        await self._begin(timeout_s=serving.startup_timeout_s)

    async def alive(self) -> bool:
        """Whether `ServerProcess.alive` is true and the weights were not marked as unsound."""
        self.end_reason = self._condemned
        return not self._condemned and await super().alive()

    async def stage(self, folder: Path) -> None:
        """Returns when a folder of the run is on the server's host. Does nothing if the disk is shared, the folder is outside the run, or
        the server is not running. Raises `ServingError` if the folder cannot be transferred."""
        process = self._process
        if process is not None and folder.is_relative_to(self.run_dir):
            try:
                await process.fetch(folder.relative_to(self.run_dir).as_posix())
            except LaunchError as error:
                raise ServingError(f"{self._what}: {error}") from error

    def host_path(self, folder: Path) -> str:
        """Returns the path of a folder of the run on the host of the running server, or `folder` if the server is not running or the folder
        is outside the run."""
        return str(folder) if self._process is None else self._on_host(folder, self._process.folder)

    def _on_host(self, folder: Path, run: str) -> str:
        inside = folder.is_relative_to(self.run_dir)
        return str(PurePosixPath(run) / folder.relative_to(self.run_dir)) if inside else str(folder)

    def _needs(self) -> tuple[str, ...]:
        return (self.model.relative_to(self.run_dir).as_posix(),) if self.model.is_relative_to(self.run_dir) else ()

    def mark_unsound(self, reason: str) -> None:
        """Marks the server's weights as unsound: `alive` returns False from then on."""
        self._condemned = reason

    def _command(self) -> list[str]:
        serving, policy = self.recipe.serving, self.recipe.policy
        backend = "nccl" if serving.weight_transfer.ref == "nccl" else FILE_BACKEND
        arguments = {
            "--model": self._on_host(self.model, RUN),
            "--served-model-name": "policy",
            "--dtype": policy.dtype,
            "--max-model-len": str(policy.max_model_len),
            "--scheduling-policy": "priority",  # see `agentrl.serving.client.request_priority`
            "--seed": str(self.recipe.seed),
            "--weight-transfer-config": json.dumps({"backend": backend}),
            # Logprobs after temperature and truncation.
            "--logprobs-mode": "processed_logprobs",
        }
        if self.images is not None:
            arguments |= SERVER_ARGUMENTS
        # No limit on logprobs per token, because the engine dies if a request exceeds its limit.
        return launch_command(serving, arguments, ["--max-logprobs=-1", "--enable-scale-out"], cpu_threads=self._threads)

    def _environment(self) -> dict[str, str]:
        alone = self.recipe.max_staleness == 0 and self.recipe.serving.replicas == 1 and not self.recipe.gate_has_server
        common = server_environment(SCRATCH, cpu_threads=self._threads, alone=alone)
        return common | {"VLLM_SERVER_DEV_MODE": "1"}  # the control routes

    async def _prepare(self, control: ControlPlane) -> None:
        await control.set_version(self.weights.number)
        if self.recipe.serving.weight_transfer.ref != "nccl":
            await control.init_weight_transfer({"versions_folder": self.host_path(self.run_dir / "versions")})

    @property
    def max_tokens(self) -> int:
        """The maximum length of a prompt, in tokens."""
        return self.recipe.policy.max_model_len

    async def _measure(self, control: ControlPlane) -> None:
        await super()._measure(control)
        start, tokens = time.monotonic(), min(WRITE_TOKENS, max(1, self.max_tokens - 2))
        sampling = {**_SAMPLING, "max_tokens": tokens, "ignore_eos": True}
        await control.generate({"token_ids": [0, 0], "sampling_params": sampling, "priority": PROBE_PRIORITY}, timeout_s=WARM_S)
        self.token_s = (time.monotonic() - start) / tokens

    async def _token(self, control: ControlPlane, *, tokens: int, timeout_s: float) -> None:
        await control.generate({"token_ids": [0] * tokens, "sampling_params": _SAMPLING, "priority": PROBE_PRIORITY}, timeout_s=timeout_s)


def server_title(name: str) -> str:
    """Returns a server's name for messages; for `name`, see `VLLMServer`."""
    return f"inference server {name}" if name else "the inference server"


def server_log_name(name: str) -> str:
    """Returns the name of the file in logs/ that contains a server's output; for `name`, see `VLLMServer`."""
    return f"server-{name}.log" if name else "server.log"
