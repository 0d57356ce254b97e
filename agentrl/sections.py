"""Sections of a recipe that say nothing of the others: `capture`, `tasks.practice`, `judge_servers`, `learner.limits`, `tools`.

`agentrl.recipe` hands them on.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.section import Section

MOST_WEIGHT = 1000


class CaptureConfig(Section):
    """Failures of training and evaluation, kept as traces in the run folder. docs/failures.md says what is done with them."""

    below: float = 1.0
    """An episode with a score below this has failed."""
    keep: int = Field(500, ge=0)
    """Traces kept in each phase (training, and every evaluation); all failures are counted. 0: nothing is captured."""
    keep_mb: int = Field(256, ge=1)
    """MiB that the traces of a phase may take, compressed."""
    rules: tuple[str, ...] = ()
    """Triage rules of your own, as references; they are asked before those that ship."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> CaptureConfig:
        usual = type(self).model_fields
        if self.keep == 0 and any(getattr(self, key) != usual[key].default for key in ("below", "keep_mb", "rules")):
            raise ValueError("below, keep_mb and rules do nothing with keep=0, which captures nothing: leave them at their defaults")
        return self


class PracticeConfig(Section):
    """Tasks made from the cases of suites by `agentrl practice`, mixed into training. docs/practice.md says how they are made."""

    suites: dict[str, Annotated[int, Field(ge=1, le=MOST_WEIGHT)]] = Field(min_length=1)
    """Suites, as folders relative to the project root, and how often each takes its turn. None of their cases is ever trained on."""
    share: float = Field(0.3, ge=0.001, le=1)
    """Share of the groups that practise; the others have tasks of the family."""


class JudgeServerConfig(Section):
    """A vLLM server on loopback that the run starts for judges, beside the policy's. docs/judges.md says how a judge names it."""

    model: str = Field(min_length=1)
    """Hugging Face model id, or a folder (relative to the project root): a chat model, or a reward model of `agentrl tune reward`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic. Use float32 on CPUs without AMX."""
    max_model_len: int = Field(2048, ge=16)
    """Longest context in tokens, question and verdict together."""
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    max_num_seqs: int = Field(16, ge=1)
    """Questions answered at once."""
    threads: int = Field(1, ge=1)
    """CPU threads of the engine (CPU only)."""
    kv_cache_gb: float = Field(0.25, gt=0)
    """Key/value cache in GiB (CPU only)."""
    gpu_memory_utilization: float = Field(0.2, gt=0, le=1)
    """Share of GPU memory for the server (GPU only)."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """Deadline for the server to answer after a start."""
    max_restarts: int = Field(5, ge=0)
    """Times that it is started again after it died, in the whole run; questions wait meanwhile. Then they are refused."""


class Limit(Section):
    """A bound on one figure of an update, and what happens beyond it."""

    at: float
    """The bound."""
    action: Literal["skip", "rollback", "halt"] = "skip"
    """skip: the optimizer step is not made, its groups are left out. rollback: weights and optimizer return to the newest checkpoint that
    no limit objected to, and the server with them. halt: the run stops (exit code 1); `--resume` makes the step again."""


class LimitsConfig(Section):
    """Bounds on what an update may look like, judged before its gradient is applied. docs/objectives.md gives the formulas."""

    max_kl: Limit | None = None
    """On `kl_behaviour`: the divergence of the policy from the one that sampled, nats per token."""
    max_kl_reference: Limit | None = None
    """On `kl_reference`: the divergence from version 0, nats per token (needs objective.kl=k1, k2 or k3)."""
    min_entropy: Limit | None = None
    """On `entropy`: nats per token."""
    max_clip_fraction: Limit | None = None
    """On `clip_fraction`: the share of tokens whose ratio is clipped."""
    max_ratio: Limit | None = None
    """On `ratio_max`: the largest ratio of the policy to the one that sampled."""
    max_mismatch_kl: Limit | None = None
    """On `mismatch_kl`: server against learner with the same weights, nats per token (needs max_staleness=0)."""
    max_grad_norm: Limit | None = None
    """On `grad_norm`: the gradient's global norm before clipping."""
    min_effective_sample_size: Limit | None = None
    """On `ess`: the effective sample size, as a share of the tokens."""
    max_rollbacks: int = Field(2, ge=1)
    """Rollbacks in the whole run; the next one halts it instead."""

    @property
    def named(self) -> dict[str, Limit]:
        """The limits that are set, by the name of their key."""
        found = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: limit for name, limit in found if isinstance(limit, Limit)}

    @property
    def roll_back(self) -> bool:
        return any(limit.action == "rollback" for limit in self.named.values())

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> LimitsConfig:
        ranges = {"max_ratio": (1.0, math.inf), "max_clip_fraction": (0.0, 1.0), "min_effective_sample_size": (0.0, 1.0)}
        for name, limit in self.named.items():
            low, high = ranges.get(name, (0.0, math.inf))
            if not low < limit.at < high:
                raise ValueError(f"{name}.at must lie between {low:g} and {high:g}; beyond them it does nothing, or stops every update")
        if not self.roll_back and self.max_rollbacks != 2:
            raise ValueError("max_rollbacks does nothing: no limit has action=rollback")
        return self


class MCPConfig(Section):
    """An MCP server: a program in the episode's sandbox (`command`), a program on this machine (`host_command`), or a `url`."""

    command: tuple[str, ...] = ()
    """Program and arguments, started in the sandbox of each episode that calls the server."""
    host_command: tuple[str, ...] = ()
    """Program and arguments, started on this machine with the rights of the run, once for each episode that calls the server."""
    url: str = Field("", pattern=r"^(https?://[^\s/?#@]+.*)?$")
    """Where it answers over HTTP. Nothing else is reached: redirects are not followed."""
    env: dict[str, str] = Field({})
    """Variables of the program. One on this machine has PATH, HOME, TMPDIR and the locale besides, and no other of the run's."""
    key_env: str = ""
    """Environment variable that holds the bearer token for `url`."""
    only: tuple[str, ...] = ()
    """The tools that are offered; empty: all that it has, at most 64."""
    together: bool = False
    """Whether its calls may run at the same time within a turn (`url` only: a program is asked one thing at a time)."""
    start_timeout_s: float = Field(60.0, gt=0, le=600)
    """Seconds that it may take to be started and to list its tools."""

    @model_validator(mode="after")
    def _one_place(self) -> MCPConfig:
        places = {"command": self.command, "host_command": self.host_command, "url": self.url}
        if len(given := [name for name, value in places.items() if value]) != 1:
            raise ValueError(f"a server has one of command, host_command and url, not {' and '.join(given) or 'none'}")
        if self.together and not self.url:
            raise ValueError("together does nothing with a program, which is asked one thing at a time: leave it out")
        if self.url and self.env:
            raise ValueError("env does nothing with a url: no program is started")
        if self.key_env and not self.url:
            raise ValueError("key_env does nothing without a url: give a program its variables with env")
        if any("\0" in word for word in (*self.command, *self.host_command)) or not all((self.command or self.host_command or ("-",))[:1]):
            raise ValueError("a command begins with the name of a program, and holds no NUL")
        return self


class ToolBounds(Section):
    """What the calls of one tool may take, in place of the task's limits."""

    timeout_s: float | None = Field(None, gt=0, le=3600)
    """Seconds of one call."""
    output_chars: int | None = Field(None, ge=1)
    """Characters shown of one call."""
    calls: int | None = Field(None, ge=1)
    """Calls in one episode."""

    @model_validator(mode="after")
    def _bounds_something(self) -> ToolBounds:
        if self.timeout_s is None and self.output_chars is None and self.calls is None:
            raise ValueError("it bounds nothing: give timeout_s, output_chars or calls")
        return self


class ToolsConfig(Section):
    """Tools beyond those that a task can name by itself. docs/tools.md."""

    mcp: dict[str, MCPConfig] = Field({})
    """MCP servers by name, as sections; a task's tool `mcp:NAME` stands for all tools of one, `mcp:NAME/TOOL` for one."""
    bounds: dict[str, ToolBounds] = Field({})
    """By the tool's name: `timeout_s`, `output_chars` and `calls` (in an episode) in place of the task's limits."""

    @field_validator("mcp")
    @classmethod
    def _named(cls, servers: dict[str, MCPConfig]) -> dict[str, MCPConfig]:
        for name in servers:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", name):
                raise ValueError(f"{name[:80]!r} is no name of a server: 1 to 32 letters, digits, _ and -")
        return servers
