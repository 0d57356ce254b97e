"""Sections of a recipe that say nothing of the others; `agentrl.recipe` hands them on: `capture`, `critic`, `judge_servers`, `tools`,
`memory`, `tasks.practice`, `rollout.branching`, `rollout.delegation`, `rollout.compaction`, `learner.limits`, `learner.lora`.
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


class BranchingConfig(Section):
    """Groups as forests: some attempts run to a turn, and from the state of each, files and context, others go on."""

    turn: int = Field(1, ge=1)
    """The attempts part after this turn. One that ends before has nothing to part from: attempts of their own fill the group."""
    branches: int = Field(2, ge=2)
    """Attempts that go on from one state, the one that came there included; rollout.group_size is a multiple of it."""


class DelegationConfig(Section):
    """What sub-agents may be started by `rollout.agent=delegating`, and what each of them has. docs/agents.md says how they work."""

    depth: int = Field(1, ge=1, le=8)
    """How far down sub-agents may be started: with 1 only the main agent has the tool, with 2 its sub-agents have it too."""
    width: int = Field(4, ge=1, le=64)
    """Sub-agents that one turn may start side by side."""
    total: int = Field(16, ge=1, le=1024)
    """Sub-agents in one episode, at every depth together."""
    turns: int = Field(4, ge=1)
    """Turns of one sub-agent. They count in the task's `Limits.turns`, too, which is of all agents together."""
    tokens: int | None = Field(None, ge=1)
    """Tokens that one sub-agent may sample; None: what its turns allow."""
    tools: tuple[str, ...] | None = None
    """Tools of the sub-agents, by the names that tasks use; None: those of the task. With `submit` among them they hand in their answer
    to the agent that called, else their last message is it."""
    instruction: str = ""
    """System message of the sub-agents; empty: none."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> DelegationConfig:
        if self.total < self.width:
            raise ValueError(f"width does nothing above total: no turn can start {self.width} sub-agents when an episode has {self.total}")
        return self


class CompactionConfig(Section):
    """When the context of an agent begins anew, from a summary that it writes itself. docs/agents.md says how that works."""

    share: float = Field(0.75, gt=0, lt=1)
    """Share of its room from which on an agent is asked for a summary: of policy.max_model_len, or of the task's Limits.episode_tokens
    where that is less. It is asked between two turns, when the tools have answered."""
    tokens: int | None = Field(None, ge=1)
    """Tokens of the context from which on it is asked, in place of the share."""
    summary_tokens: int = Field(256, ge=1)
    """Most tokens of a summary; one that is cut off there is rejected, as is an empty one and one with a tool call."""
    attempts: int = Field(2, ge=1, le=16)
    """Attempts at a summary, each from the same place, before the agent ends with token_limit. Each is a turn of the task's limits."""
    request: str = Field(
        "The room for this conversation is nearly used up. Answer with a summary of what you know and what is left to do, without a tool"
        " call. You go on with that summary alone.",
        min_length=1,
    )
    """What the agent reads after the last tool output."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> CompactionConfig:
        if self.tokens is not None and self.share != 0.75:
            raise ValueError("share does nothing beside tokens: leave one of them out")
        return self


class MemoryConfig(Section):
    """Notes that agents write for later episodes of the run, and find again. docs/memory.md says who sees which."""

    scope: Literal["family", "project"] = "family"
    """Which tasks share notes. family: those of one family. project: those whose data name the same `project`, whatever their family."""
    notes: int = Field(4, ge=1, le=64)
    """Notes that one episode may write, with all its agents."""
    note_chars: int = Field(400, ge=1, le=10_000)
    """Most characters of a note; a longer one is refused, which the agent is told."""
    results: int = Field(5, ge=1, le=50)
    """Most notes that one search shows."""
    keep: int = Field(1000, ge=1, le=100_000)
    """Newest notes of a scope that are found. Older ones are deleted."""
    min_score: float | None = None
    """Only what episodes with at least this score wrote is found; None: whatever the score is."""
    heldout_rounds: int = Field(1, ge=1, le=1000)
    """Parts in which an evaluation plays its held-out tasks, one after the other; an episode finds what was written in the parts before,
    of the same evaluation and split, and nothing else. 1: nothing is found in evaluations."""


class CriticConfig(Section):
    """The value model of `objective.advantage=gae`, in the learner's processes: docs/objectives.md says which trunk to choose."""

    trunk: Literal["separate", "shared"] = "separate"
    """separate: a model of its own that starts from the policy's weights. shared: a head on the policy, one forward pass for both."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of its AdamW, at its highest (trunk=shared: of the head); everything else about its optimizer is the learner's."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next; tool output takes no time."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's trace: 1 trusts only what was scored, 0 only the next token's value."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value gains nothing from moving further than this away from what it was before the step; None: no clip."""
    epochs: int = Field(1, ge=1)
    """Passes over each step's batch (trunk=separate)."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of the critic for each of learner.minibatches, in each pass (trunk=separate)."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns; with trunk=shared only its head."""
    vf_coef: float = Field(0.1, gt=0)
    """Weight of the value loss beside the policy's (trunk=shared)."""
    detach: bool = False
    """The value loss trains the head alone; the trunk learns from the policy's loss only (trunk=shared)."""

    @property
    def shared(self) -> bool:
        return self.trunk == "shared"

    @model_validator(mode="after")
    def _every_key_acts(self) -> CriticConfig:
        if self.shared and (self.epochs, self.minibatches) != (1, 1):
            raise ValueError(
                "epochs and minibatches do nothing with trunk=shared: its value loss is part of the policy's optimizer steps;"
                " set learner.minibatches"
            )
        if not self.shared and (self.detach or self.vf_coef != 0.1):
            raise ValueError("detach and vf_coef do nothing with trunk=separate, whose critic has an optimizer of its own")
        return self


class LoraConfig(Section):
    """Low-rank adapters in place of full training: the base weights stay as they are, and a version is the adapter alone."""

    rank: int = Field(16, ge=1)
    """Rank of each adapted layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers that are adapted, e.g. `["q_proj", "v_proj"]`; None: every one but the output head."""


class GroupJudging(Section):
    """The keys of `tasks` on judging groups as a whole."""

    group_judge: str | None = Field(None, min_length=1)
    """Who judges all attempts of a training group together once they are done, as a reference such as `rewards.mine:ranked`; None: each
    attempt is judged by itself. Evaluations and cases are judged by the verifiers, as ever. docs/judges.md."""
    group_weight: float = Field(1.0, gt=0, le=1)
    """Share of the group judge in a training score. 1: it alone, and the verifiers are not asked; below, they have the rest."""

    @model_validator(mode="after")
    def _weight_acts(self) -> GroupJudging:
        if self.group_judge is None and self.group_weight != 1:
            raise ValueError("group_weight does nothing without group_judge")
        return self


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
