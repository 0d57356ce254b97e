"""The configuration of a run: pydantic models with documented defaults. Unknown keys and wrong types raise an error before anything
starts.

The sections are defined in other modules of this package. This module contains the recipe and the checks across sections.

Importing this module or a recipe file does not import torch, vllm or deepspeed. A recipe file is a short Python file with one module-level
`recipe = Recipe(...)`, or with a recipe derived from another recipe: `recipe = base.but("learner.lr=1e-4", name="mine")`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.base import secrets
from agentrl.base.untrusted_files import read_bytes
from agentrl.config import section
from agentrl.config.cluster import ClusterConfig, resource_errors, store_problem
from agentrl.config.gate import CaptureConfig, GateConfig
from agentrl.config.learner import LearnerConfig, Limit, LoraConfig
from agentrl.config.objective import CriticConfig, ObjectiveConfig, OffPolicyConfig
from agentrl.config.rollout import DelegationConfig, EvalConfig, GroupConfig, RolloutConfig, SamplingConfig
from agentrl.config.section import Needs, Section, resumable
from agentrl.config.serving import JudgeServerConfig, PolicyConfig, ServingConfig
from agentrl.config.tasks import GroupJudging, TasksConfig
from agentrl.config.tools import MCPConfig, MemoryConfig, SandboxConfig, ServerName, ToolConfig
from agentrl.errors import UserError
from agentrl.plugins import parts
from agentrl.plugins.parts import Part

__all__ = [
    "CaptureConfig",
    "ClusterConfig",
    "CriticConfig",
    "DelegationConfig",
    "EvalConfig",
    "GateConfig",
    "GroupConfig",
    "GroupJudging",
    "JudgeServerConfig",
    "LearnerConfig",
    "Limit",
    "LoraConfig",
    "MCPConfig",
    "MemoryConfig",
    "ObjectiveConfig",
    "OffPolicyConfig",
    "Part",
    "PolicyConfig",
    "Recipe",
    "RolloutConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ServingConfig",
    "TasksConfig",
    "ToolConfig",
    "build",
    "load",
]

_LARGEST = 16 << 20  # bytes of a recipe's file
_LAGS = Needs("a version that can lag that far: set it below steps", lambda recipe, own: own.max_staleness < own.step_limit)
_OVERLAPS = Needs("steps that overlap: set max_staleness above 0", lambda recipe, own: own.max_staleness > 0)


HOSTED_AGENT = "agentrl.environment.hosted:HostedAgent"
OWN_SOLVER = "agentrl"
"""Value of the option `solver` with which the turn loop, instead of the family's program, drives the model on the family's tasks."""


class Recipe(Section):
    """The complete configuration of a run, such as `Recipe(name=..., policy=..., tasks=...)`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run. Its folder is `runs/NAME` unless `--run-dir` is given."""
    seed: int = Field(0, ge=0)
    """Seed for task order, sampler and learner. Sampling is not bitwise repeatable, because batching is asynchronous."""
    steps: int | None = resumable(16, ge=1)
    """Learner steps. None means until ctrl-C or SIGTERM."""
    max_staleness: Annotated[int, _LAGS] = Field(1, ge=0)
    """Maximum lag of an episode, in learner versions. 0: on-policy; rollouts wait for each update."""
    pipeline_depth: Annotated[int | None, _OVERLAPS] = Field(None, ge=1)
    """Blocks of rollout.groups_per_step groups in flight at once, at most max_staleness + 1 (default). A lower value reduces the mean
    staleness, but rollouts may wait for updates."""
    order: Annotated[Literal["oldest_first", "in_order", "replay"], _OVERLAPS] = "oldest_first"
    """Finished groups that a learner step uses. oldest_first: those sampled by the oldest weights. in_order: those started for this step,
    which waits for the slowest. replay: like oldest_first, but each step also trains on the groups of the previous step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of server and learner. auto: cuda if torch finds a GPU, else cpu."""
    policy: PolicyConfig
    tasks: TasksConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvalConfig = resumable(EvalConfig())
    mcp: dict[ServerName, MCPConfig] = Field({})
    """MCP servers by name. The task tool `mcp:NAME` stands for all tools of a server, and `mcp:NAME/TOOL` for one. See docs/tools.md."""
    tools: dict[str, ToolConfig] = Field({})
    """Limits and descriptions of tools, by name. They replace the defaults."""
    memory: MemoryConfig | None = None
    """Notes that agents write for later episodes. None disables memory; `{}` uses the defaults."""
    capture: CaptureConfig = resumable(CaptureConfig())
    cluster: ClusterConfig = resumable(ClusterConfig())
    store: parts.Store = Part("sqlite")
    """Store for scored groups between rollouts and learner. sqlite: a file in the run folder. redis: the same file, to which a Redis stream
    carries groups from rollout workers. The option keep_steps=N deletes episodes after N steps, but keeps the ledger."""
    trackers: tuple[parts.Tracker, ...] = resumable((Part("terminal"), Part("tensorboard")))
    """Receivers of metrics, in addition to `metrics.jsonl`. terminal: progress. tensorboard: event files in logs/tensorboard."""
    sandbox: SandboxConfig = resumable(SandboxConfig())
    serving: ServingConfig = resumable(ServingConfig())
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig | None = None
    """Value model for objective.advantage=gae, which requires it. `{}` uses the defaults."""
    learner: LearnerConfig = LearnerConfig()
    judge_servers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], JudgeServerConfig] = Field({})
    """Servers that the run starts for its judges, by name. A judge refers to one with `agentrl.judge.served(NAME)`."""
    gate: GateConfig | None = resumable(None)
    """Evaluates versions on a suite before promotion. None promotes the last version."""

    @property
    def agent(self) -> Part:
        """The agent of the run, which is `HostedAgent` if the environment's program drives the model and `rollout.agent` has its default
        `turns`, and `rollout.agent` otherwise."""
        family, kind = self.tasks.family, parts.environment_kind(self.tasks.family.ref)
        hosted = kind is not None and kind.host and family.options.get("solver") != OWN_SOLVER
        return Part(HOSTED_AGENT) if hosted and self.rollout.agent.ref == "turns" else self.rollout.agent

    @model_validator(mode="after")
    def _no_secrets_by_value(self) -> Recipe:
        """Rejects secrets that are given by value, because the run folder stores the recipe and the report prints it."""
        if errors := list(secrets.literal_secret_errors(self.model_dump(mode="json"))):
            raise ValueError("; ".join(errors))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        """Rejects inconsistent keys. Reports all inconsistencies at once, because correcting one key may require correcting another."""
        checks = (
            self._combinations,
            self._resources,
            self._weight_store,
            lambda: resource_errors(self.cluster.resources, list(self.part_counts), ranks=self.learner.ranks),
            lambda: section.keys_without_effect(self),
            self._equal_scores_teach_nothing,
            self._one_restart_policy,
            self._sandboxes_suffice,
            self._memory_is_read,
            self._learner_parts,
            self._limits_act,
            self._ratio_moves,
            self._objective_acts,
        )
        if problems := [problem for check in checks for problem in check()]:
            raise ValueError("\n".join(problems))
        return self

    def _combinations(self) -> Iterator[str]:
        if self.objective.advantage.ref in ("grpo", "rloo", "reinforce++-baseline") and self.rollout.group.size < 2:
            yield (
                "rollout.group.size must be at least 2: the score of a single attempt equals its baseline, whatever objective.normalize_std"
                " is; only objective.advantage=reinforce++ and gae work without a group"
            )
        if self.rollout.group.size * self.rollout.groups_per_step < 2:
            yield "rollout.groups_per_step must be at least 2 when rollout.group.size is 1: one score has no baseline"
        if self.tasks.group_judge is not None and self.rollout.group.size < 2:
            yield "tasks.group_judge compares the attempts of a group: rollout.group.size must be at least 2"
        if self.objective.credit == "siblings" and self.rollout.group.branches == 1:
            yield "objective.credit=siblings compares attempts that branched from the same state: set rollout.group.branches"
        if self.rollout.extra_groups and self.objective.advantage.ref in ("reinforce++", "gae"):
            yield (
                f"rollout.extra_groups replaces groups whose attempts score the same; with objective.advantage={self.objective.advantage},"
                " which compares all attempts of a step, such groups also have a training signal: set extra_groups to 0"
            )
        if self.steps is None and self.learner.lr_schedule in ("linear", "cosine"):
            yield (
                f"learner.lr_schedule={self.learner.lr_schedule} decays until the last step, but a run with steps=None has no last step:"
                " set constant or inverse_sqrt, or set steps"
            )
        if isinstance(self.objective.entropy_coef, tuple) and (self.steps is None or self.steps < 2):
            yield (
                "objective.entropy_coef=[first, last] needs at least two steps: set steps to 2 or more, or objective.entropy_coef to one"
                " number"
            )
        if self.depth > self.max_staleness + 1:
            yield f"pipeline_depth must be at most max_staleness + 1 = {self.max_staleness + 1}: lower it, or raise max_staleness"
        if self.tasks.weighting and self.objective.advantage.ref in ("reinforce++", "gae"):
            yield (
                "tasks.weighting samples tasks less often if their attempts score the same; with objective.advantage="
                f"{self.objective.advantage} such tasks also have a training signal: set weighting to false"
            )

    def _resources(self) -> Iterator[str]:
        if self.store.ref == "redis" and not self.rollout.workers:
            yield "store=redis needs rollout workers: set rollout.workers, or store=sqlite"
        if self.store.ref in parts.STORE.shipped:
            yield from self._store_options()
        if self.serving.replicas > self.rollout.concurrency:
            yield "serving.replicas exceeds rollout.concurrency: an episode uses one server, so some servers would be idle; lower replicas"
        if self.serving.weight_transfer.ref == "nccl" and self.device == "cpu":
            yield "serving.weight_transfer=nccl copies from GPU to GPU; with device=cpu use weight_transfer=file"
        if self.learner.kernels == "liger" and self.device == "cpu":
            yield "learner.kernels=liger needs a GPU; with device=cpu use kernels=torch"
        if self.learner.keep_versions <= self.max_staleness:
            yield "learner.keep_versions must exceed max_staleness: a version must stay on disk until it has served"
        if self.learner.max_tokens_per_microbatch * self.learner.sequence_parallel < self.policy.max_model_len:
            yield (
                "learner.max_tokens_per_microbatch times learner.sequence_parallel must be at least policy.max_model_len: an episode can"
                " only be split over the ranks of a team"
            )
        if self.learner.minibatches > self.rollout.groups_per_step:
            yield "learner.minibatches must not exceed rollout.groups_per_step"

    def _weight_store(self) -> Iterator[str]:
        transfer = self.serving.weight_transfer
        if not transfer.options or transfer.ref not in parts.CHANNEL.with_options:
            return
        if unknown := ", ".join(sorted(set(transfer.options) - {"store"})):
            yield f"serving.weight_transfer.options: unknown {unknown}; the only option is store"
        elif problem := store_problem(transfer.options["store"]):
            yield f"serving.weight_transfer.options.store {problem}"
        elif self.cluster.is_local:
            yield "serving.weight_transfer.options.store carries versions to other machines: set cluster.address, or remove it"

    def _store_options(self) -> Iterator[str]:
        options = self.store.options
        if self.store.ref == "sqlite" and set(options) - {"keep_steps"}:
            unknown = ", ".join(sorted(set(options) - {"keep_steps"}))
            yield f"store.options of store=sqlite: unknown {unknown}; the only option is keep_steps"
        least = self.max_staleness + self.learner.keep_checkpoints + 2
        keep = options.get("keep_steps", least)
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < least:
            yield (
                f"store.options.keep_steps must be an integer of at least max_staleness + learner.keep_checkpoints + 2 = {least}: the"
                " driver still reads the episodes of these steps, and the learner repeats steps after a fault"
            )
        if "keep_steps" in options and self.tasks.weighting:
            yield "tasks.weighting needs all episodes after a resume: remove store.options.keep_steps, or set weighting to false"

    def _equal_scores_teach_nothing(self) -> Iterator[str]:
        objective = self.objective
        if not self.rollout.group.stop_equal_after:
            return
        if self.tasks.group_judge is not None:
            yield "rollout.group.stop_equal_after needs early scores, but tasks.group_judge scores a complete group: remove one of them"
        teaching = [
            f"objective.{key}={getattr(objective, key)}"
            for key, teaches in (
                ("advantage", objective.advantage.ref in ("reinforce++", "gae")),
                ("turn_coef", objective.turn_coef > 0),
                ("credit", objective.credit in ("verifier", "counterfactual")),
                ("kl", objective.kl == "k1_reward"),
            )
            if teaches
        ]
        if teaching:
            yield (
                f"rollout.group.stop_equal_after stops groups whose attempts score the same, because they have no training signal; with"
                f" {' and '.join(teaching)} they have one: set stop_equal_after to 0"
            )

    def _one_restart_policy(self) -> Iterator[str]:
        if self.policy.rewritten_context == "restart" and (self.rollout.compaction is not None or self.rollout.agent.ref == "delegating"):
            yield (
                "policy.rewritten_context=restart works only for agents with one context at a time: rollout.compaction and"
                " rollout.agent=delegating need a chat template that does not rewrite earlier context; leave it at refuse"
            )

    @property
    def step_limit(self) -> float:
        """Number of learner steps; infinite if the run continues until it is stopped."""
        return math.inf if self.steps is None else self.steps

    @property
    def depth(self) -> int:
        """Maximum number of blocks of groups in flight at once."""
        return self.max_staleness + 1 if self.pipeline_depth is None else self.pipeline_depth

    @property
    def part_counts(self) -> dict[str, int]:
        """Part -> number of processes, for the parts that a training run starts. With store=redis and no `url`, the run starts a Redis
        server."""
        counts = {"server": self.serving.replicas, "learner": self.cluster.learner_nodes, "worker": self.rollout.workers}
        counts |= {"gate": int(self.gate_has_server), "redis": int(self.store.ref == "redis" and "url" not in self.store.options)}
        counts |= {f"judge-{name}": 1 for name in self.judge_servers}
        return {name: count for name, count in counts.items() if count}

    @property
    def gate_has_server(self) -> bool:
        """Whether the recipe has a gate with a separate server."""
        return self.gate is not None and self.gate.server == "own"

    @property
    def max_concurrent_episodes(self) -> int:
        """Maximum number of episodes in flight: the rollouts and, with gate.server=own, the same number of attempts for the gate."""
        return self.rollout.concurrency * (2 if self.gate_has_server else 1)

    def _sandboxes_suffice(self) -> Iterator[str]:
        """Rejects a value of sandbox.max_open with which episodes could deadlock, because an agent keeps its sandbox while its sub-agents
        wait for theirs."""
        delegation, most = self.rollout.delegation, self.sandbox.max_open
        if delegation is None or delegation.sandbox == "shared":
            return
        each, beside = 1 + delegation.total, self.max_concurrent_episodes // self.rollout.concurrency
        if self.max_concurrent_episodes * each > most:
            fewer = f", or rollout.concurrency={most // each // beside}" if most >= each * beside else ""
            gate = ", and as many attempts of gate.server=own," if beside > 1 else ""
            yield (
                f"rollout.delegation.sandbox=own: an episode can use {each} sandboxes at once, its own and those of {delegation.total}"
                f" sub-agents. rollout.concurrency={self.rollout.concurrency} such episodes{gate} could deadlock with"
                f" sandbox.max_open={most}: set sandbox.max_open={self.max_concurrent_episodes * each}{fewer}, or a lower"
                " rollout.delegation.total"
            )

    def _memory_is_read(self) -> Iterator[str]:
        if self.memory is None:
            return
        if self.rollout.agent.ref not in parts.AGENT.shipped:
            yield "memory works only with built-in agents: a user-supplied agent does not get the memory tools; remove memory"
        if self.memory.heldout_rounds > max(1, self.evaluation.heldout, self.evaluation.heldout_real):
            yield "memory.heldout_rounds exceeds the number of tasks of every evaluation: lower it to at most that number"
        if self.step_limit < self.depth + 1 and self.memory.heldout_rounds == 1:
            yield (
                "memory does nothing: no step starts late enough to read the notes of an earlier step; set steps to pipeline_depth + 1 or"
                " more, or memory.heldout_rounds above 1"
            )

    def _learner_parts(self) -> Iterator[str]:
        learner = self.learner
        if learner.lora is not None and self.serving.weight_transfer.ref in ("delta", "nccl"):
            yield "serving.weight_transfer=nccl and delta transfer complete models, but learner.lora publishes adapters: use file"
        if learner.ranks % learner.sequence_parallel:
            yield "learner.sequence_parallel must divide learner.ranks: it is the number of ranks in a team"
        if learner.sequence_parallel > 1 and self.critic is not None:
            yield "learner.sequence_parallel above 1 does not support a critic: choose an objective.advantage other than gae"
        if learner.offload == "optimizer" and learner.zero_stage == 0:
            yield "learner.offload=optimizer needs learner.zero_stage 1, 2 or 3: at stage 0 DeepSpeed has no optimizer to move"
        if learner.offload == "parameters" and learner.zero_stage != 3:
            yield "learner.offload=parameters needs learner.zero_stage=3: at other stages every rank stores all weights"

    def _limits_act(self) -> Iterator[str]:
        limits = {limit.metric for limit in self.learner.limits}
        rejecting = {limit.metric: limit.at for limit in self.learner.limits if limit.action != "alert"}
        if "kl_reference" in limits and self.objective.kl not in ("k1", "k2", "k3"):
            yield "learner.limits: metric=kl_reference does nothing, because it is not computed; set objective.kl to k1, k2 or k3"
        if rejecting.get("grad_norm", math.inf) <= self.learner.max_grad_norm:
            yield "learner.limits: the limit on grad_norm must exceed learner.max_grad_norm; otherwise no gradient is ever clipped"
        if "mismatch_kl" in limits and self.max_staleness > 0:
            yield (
                "learner.limits: metric=mismatch_kl needs max_staleness=0: it is measured only on tokens that the learner's current weights"
                " sampled. With a higher max_staleness, use serving.probe_max_abs_diff, which compares server and learner at every swap, or"
                " metric=kl_behaviour, which measures staleness and mismatch together"
            )

    def _ratio_moves(self) -> Iterator[str]:
        objective = self.objective
        if not objective.off_policy.recomputes(1) or self.learner.minibatches > 1:
            return
        usual = type(objective).model_fields
        named = [f"objective.{key}" for key in ("clip_low", "clip_high", "dual_clip") if getattr(objective, key) != usual[key].default]
        if any(limit.metric == "clip_fraction" for limit in self.learner.limits):
            named.append("a limit on clip_fraction in learner.limits")
        if named:
            yield (
                f"{', '.join(named)}: no token is ever clipped with objective.off_policy.preset={objective.off_policy.preset} and"
                " learner.minibatches=1, because the ratio is 1 in the only optimizer step of a batch; raise learner.minibatches, or leave"
                " them at their defaults"
            )

    def _objective_acts(self) -> Iterator[str]:
        off_policy = self.objective.off_policy
        if self.objective.loss.ref == "cispo" and off_policy.cap is not None and not off_policy.recomputes(self.learner.minibatches):
            yield "objective.off_policy.cap does nothing: cispo clips the weight; set clip_high, or objective.off_policy.preset=truncate"
        if (self.objective.advantage.ref == "gae") != (self.critic is not None):
            yield "objective.advantage=gae and critic go together: write critic=CriticConfig(), or choose a different advantage"
        if self.critic is not None and self.critic.minibatches * self.learner.minibatches > self.rollout.groups_per_step:
            yield "critic.minibatches times learner.minibatches must not exceed rollout.groups_per_step"


def build(data: Mapping[str, Any]) -> Recipe:
    """Validates plain data and returns it as a recipe. Raises `RecipeError` with one line per invalid key."""
    return section.build(Recipe, data)


def load(path: Path) -> Recipe:
    """Returns the recipe saved in a run folder (`recipe.json`). Raises `RecipeError` if it is invalid, `OSError` if the file cannot be
    read, and `UserError` if the file is not JSON or is too large."""
    try:
        data = json.loads(read_bytes(path, most=_LARGEST, inside=path.parent))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}", fix="restore the file from a backup") from None
    return build(data)
