"""Settings for models and their servers (`policy`, `serving`, `judge_servers`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section, resumable
from agentrl.plugins import parts

ON_CPU = Needs("a server on the CPU (device=cpu or auto)", lambda recipe, own: recipe.device != "cuda")
ON_GPU = Needs("a server on a GPU (device=cuda or auto)", lambda recipe, own: recipe.device != "cpu")


class ModelConfig(Section):
    """The model of a server: the keys that `policy` and `judge_servers.NAME` share."""

    model: str
    """Hugging Face model id, or a folder (relative to the project root) with model, tokenizer and chat template. A judge server also
    accepts a reward model from `agentrl tune reward`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and arithmetic. Use float32 on CPUs without AMX."""
    max_model_len: int = Field(2048, ge=16)
    """Tokens of the longest context: prompt plus completions."""


class ServerConfig(Section):
    """The resources of a vLLM server: the keys that `serving` and `judge_servers.NAME` share."""

    max_num_seqs: int = resumable(128, ge=1)
    """Sequences that a server decodes at once."""
    gpu_memory_utilization: Annotated[float, ON_GPU] = resumable(0.5, gt=0, le=1)
    """Share of GPU memory per server (GPU only)."""
    kv_cache_gb: Annotated[float, ON_CPU] = resumable(0.5, gt=0)
    """GiB of KV cache per server (CPU only)."""
    threads: Annotated[int, ON_CPU] = resumable(0, ge=0)
    """CPU threads per server. 0: all cores, which the servers of the policy share (CPU only)."""
    startup_timeout_s: float = resumable(600.0, gt=0)
    """Seconds that a server may take to start. Policy requests wait that long for a restart."""


class PolicyConfig(ModelConfig):
    """The model that is trained (`policy`)."""

    chat_template: str | None = Field(None, min_length=1)
    """Replaces the model's chat template: a shipped name such as `hermes` (docs/chat-formats.md), or a file relative to the project
    root."""
    tool_format: str | None = Field(None, min_length=1)
    """Tool-call format to parse, such as `hermes`. None uses the chat template's format."""
    rewritten_context: Literal["refuse", "restart"] = "refuse"
    """For chat templates that rewrite earlier context. refuse: an error. restart: a rewritten context starts a new trajectory."""


class ServingConfig(ServerConfig):
    """The inference servers of the policy (`serving`)."""

    replicas: int = Field(1, ge=1)
    """Servers of the policy, each with a process, a port, a KV cache and, on GPUs, a GPU."""
    weight_transfer: parts.Channel = parts.Part("file")
    """file: the server maps safetensors; other machines copy them (from an object store with options.store=URL). delta: like file, but
    only changes; useful in bfloat16 with a small learning rate. nccl: from the learner's GPUs to the server's."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Seconds that a turn may lose to a slow server, and deadline of a weight swap."""
    probe_max_abs_diff: float | None = Field(None, gt=0)
    """Maximum logprob difference (nats) in a swap's probe. None means 0.001 in float32 on a CPU, 0.05 on a GPU, 1 in bfloat16."""

    @model_validator(mode="after")
    def _replicas_fit(self) -> ServingConfig:
        if self.replicas > 1 and self.weight_transfer.ref == "nccl":
            raise ValueError(
                "serving.weight_transfer=nccl sends weights from the learner to one server: set serving.replicas=1, or weight_transfer=file"
                " or delta, which every replica can read"
            )
        return self


class JudgeServerConfig(ModelConfig, ServerConfig):
    """A vLLM server on loopback that the run starts for judges. docs/judges.md shows how a judge refers to it."""

    gpu_memory_utilization: Annotated[float, ON_GPU] = resumable(0.2, gt=0, le=1)
    threads: Annotated[int, ON_CPU] = resumable(1, ge=0)
