"""A vLLM server for a judge: a chat model or a reward model. The server's weights never change."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.recipe import JudgeServerConfig
from agentrl.errors import ServingError
from agentrl.protocols import Launcher
from agentrl.protocols.cluster import RUN
from agentrl.serving.control import ControlPlane
from agentrl.serving.probe import PROBE_FILE, judge_logprob_difference, probe_limit, read_probe
from agentrl.serving.process import WARM_S, ServerProcess, launch_command, thread_count


class JudgeServer(ServerProcess):
    """The server of one judge, from `start` to `stop`."""

    def __init__(
        self,
        name: str,
        config: JudgeServerConfig,
        *,
        model: Path,
        reward_model: bool,
        folder: Path,
        device: str,
        launcher: Launcher | None = None,
    ) -> None:
        """`name`: served model name; the log is `folder`/logs/judge-NAME.log. `reward_model`: whether the model returns numbers instead of
        text. `launcher`: see `ServerProcess`.
        """
        folder, part = folder.resolve(), f"judge-{name}"
        what, log = f"the judge's server {name}", f"{part}.log"
        super().__init__(what, folder=folder, name=part, log=log, launcher=launcher)
        self.name = name
        self.config = config
        self.model = model.resolve()
        self.reward_model = reward_model
        self._copy = f"judges/{name}" if launcher is not None and not launcher.shared_folder else ""  # the model's copy on its host
        self.url = ""  # http://HOST:PORT, once started
        self._threads = thread_count(config.threads or self._cores) if device == "cpu" else None

    async def start(self) -> None:
        """Starts the process and returns once it has responded to a request. Raises `ServingError` if the server does not start, and
        `DiskFull` if the disk is full."""
        assert self._process is None, "a server is started once"
        await self._begin(timeout_s=self.config.startup_timeout_s)
        self.url = self.control.url

    def _command(self) -> list[str]:
        config = self.config
        arguments = {
            "--model": f"{RUN}/{self._copy}" if self._copy else str(self.model),
            "--served-model-name": self.name,
            "--dtype": config.dtype,
            "--max-model-len": str(config.max_model_len),
        }
        if self.reward_model:
            arguments |= {"--runner": "pooling", "--convert": "classify"}
        return launch_command(config, arguments, [], cpu_threads=self._threads)

    def _needs(self) -> tuple[str, ...]:
        return (self._copy,) if self._copy else ()

    async def _prepare(self, control: ControlPlane) -> None:
        """Compares the logprobs of a chat model that a run published with the probe in the model's folder. Raises `ServingError` if the
        logprobs disagree."""
        if self.reward_model or (probe := read_probe(self.model)) is None:
            return
        diff = await judge_logprob_difference(control, self.name, probe, max_model_len=self.config.max_model_len, timeout_s=WARM_S)
        limit = probe_limit(self.config.dtype, gpu=self._threads is None)
        if not diff <= limit:
            raise ServingError(
                f"the logprobs of judge server {self.name} differ by {diff:.3g} nats from {self.model / PROBE_FILE}; the limit with"
                f" dtype={self.config.dtype} is {limit:g}\n  fix: restore the model folder that the run published:"
                " its weights have changed"
            )

    @property
    def max_tokens(self) -> int:
        """The maximum length of a prompt, in tokens."""
        return self.config.max_model_len

    async def _token(self, control: ControlPlane, *, tokens: int, timeout_s: float) -> None:
        if self.reward_model:
            await control.request("POST", "/classify", timeout_s=timeout_s, json={"model": self.name, "input": [0] * tokens})
        else:
            body = {"model": self.name, "prompt": [0] * tokens, "max_tokens": 2}
            await control.request("POST", "/v1/completions", timeout_s=timeout_s, json=body)
