"""Models and the servers that they answer from: `policy`, `serving`, `judge_servers`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Needs, Section, resumable
from agentrl.plugins import parts

ON_CPU = Needs("a server on the CPU (device=cpu or auto)", lambda recipe, own: recipe.device != "cuda")
ON_GPU = Needs("a server on a GPU (device=cuda or auto)", lambda recipe, own: recipe.device != "cpu")


class PolicyConfig(Section):
    model: str
    """Hugging Face model id, or a folder (relative to the project root) with model, tokenizer and chat template."""
    chat_template: str | None = Field(None, min_length=1)
    """A chat template in place of the model's own: a word such as `hermes` (docs/chat-formats.md), or a file (relative to the project)."""
    tool_format: str | None = Field(None, min_length=1)
    """The form of tool calls that is read, such as `hermes` (docs/chat-formats.md). None: the one that the chat template writes."""
    rewritten_context: Literal["refuse", "restart"] = "refuse"
    """A chat template that cannot be extended exactly is refused; restart: a context that it would write anew begins another trajectory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic of server and learner. Use float32 on CPUs without AMX."""
    max_model_len: int = Field(1024, ge=16)
    """Longest context in tokens, prompt and completions together."""


class ServingConfig(Section):
    engine: Literal["vllm"] = "vllm"
    """Inference server."""
    replicas: int = Field(1, ge=1)
    """Servers of the policy, each with a process, a port and a key/value cache of its own, and on GPUs with a GPU of its own. An episode
    stays with the one that has its context cached, unless that one dies."""
    host: str = "127.0.0.1"
    """Address the server binds to. Requests carry the server's key in plain HTTP: keep it on loopback or a private network."""
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences that a server decodes at once."""
    gpu_memory_utilization: Annotated[float, ON_GPU] = Field(0.5, gt=0, le=1)
    """Share of GPU memory for the server (GPU only)."""
    kv_cache_gb: Annotated[float, ON_CPU] = Field(0.5, gt=0)
    """Key/value cache of a server in GiB (CPU only)."""
    threads: Annotated[int, ON_CPU] = Field(0, ge=0)
    """CPU threads of a server's engine; 0: all cores, divided by `replicas` (CPU only)."""
    weight_transfer: parts.Channel = "file"
    """file: safetensors mapped by the server, single machine. delta: so too, but most versions are only what changed since their parent,
    with checksums (pays in bfloat16 with a small learning rate). nccl: from the learner's GPUs to another one, the server's."""
    weight_transfer_options: parts.Options = Field({})
    """Keyword arguments of a weight channel that is named by reference."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """Deadline for the server to answer after a start; requests wait as long for one that is being restarted."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Time that one turn may lose to a slow server, and deadline of one weight swap."""
    probe_max_abs_diff: float = Field(1e-3, gt=0)
    """A swap whose logprob probe differs by more (nats) is refused. Use about 0.15 with bfloat16."""

    @model_validator(mode="after")
    def _replicas_fit(self) -> ServingConfig:
        if self.replicas > 1 and self.port:
            raise ValueError("serving.port is one port, and every replica has its own: leave it at 0, or set serving.replicas=1")
        if self.replicas > 1 and self.weight_transfer == "nccl":
            raise ValueError(
                "serving.weight_transfer=nccl sends weights from the learner to one server: set serving.replicas=1, or weight_transfer=file"
                " or delta, which every replica reads for itself"
            )
        return self

    @model_validator(mode="after")
    def _options_act(self) -> ServingConfig:
        parts.check_options(parts.CHANNEL, self.weight_transfer, self.weight_transfer_options)
        return self


class JudgeServerConfig(Section):
    """A vLLM server on loopback that the run starts for judges, beside the policy's. docs/judges.md says how a judge names it."""

    model: str = Field(min_length=1)
    """Hugging Face model id, or a folder (relative to the project root): a chat model, or a reward model of `agentrl tune reward`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic. Use float32 on CPUs without AMX."""
    max_model_len: int = Field(2048, ge=16)
    """Longest context in tokens, question and verdict together."""
    port: int = resumable(0, ge=0, le=65535)
    """0: any free port."""
    max_num_seqs: int = resumable(16, ge=1)
    """Questions answered at once."""
    threads: Annotated[int, ON_CPU] = resumable(1, ge=1)
    """CPU threads of the engine (CPU only)."""
    kv_cache_gb: Annotated[float, ON_CPU] = resumable(0.25, gt=0)
    """Key/value cache in GiB (CPU only)."""
    gpu_memory_utilization: Annotated[float, ON_GPU] = resumable(0.2, gt=0, le=1)
    """Share of GPU memory for the server (GPU only)."""
    startup_timeout_s: float = resumable(600.0, gt=0)
    """Deadline for the server to answer after a start."""
    max_restarts: int = resumable(5, ge=0)
    """Times in a row that it is started again after it died; questions wait meanwhile. Then they are refused."""
