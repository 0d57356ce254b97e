"""The configuration of a run: pydantic models with documented defaults. Unknown keys and wrong types stop before anything starts.

Importing this module, and any recipe file, pulls no torch, vllm or deepspeed. A recipe file is a short Python file with one
module-level `recipe = Recipe(...)`, or one derived from another recipe: `recipe = base.but("learner.lr=1e-4", name="mine")`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl import parts, section
from agentrl.gating import GateConfig
from agentrl.sampling import MAX_TOP_K, Sampling
from agentrl.section import Section
from agentrl.sections import BranchingConfig as BranchingConfig
from agentrl.sections import CaptureConfig as CaptureConfig
from agentrl.sections import CompactionConfig as CompactionConfig
from agentrl.sections import CriticConfig as CriticConfig
from agentrl.sections import DelegationConfig as DelegationConfig
from agentrl.sections import GroupJudging
from agentrl.sections import JudgeServerConfig as JudgeServerConfig
from agentrl.sections import Limit as Limit
from agentrl.sections import LimitsConfig as LimitsConfig
from agentrl.sections import LoraConfig as LoraConfig
from agentrl.sections import MCPConfig as MCPConfig
from agentrl.sections import MemoryConfig as MemoryConfig
from agentrl.sections import PracticeConfig as PracticeConfig
from agentrl.sections import ToolBounds as ToolBounds
from agentrl.sections import ToolsConfig as ToolsConfig

_COLDEST = 0.01  # vLLM samples at this temperature where a lower one above 0 is asked for


def _off_by_none(value: Any, field: ValidationInfo) -> Any:
    """None switches a way of truncating off."""
    return {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[str(field.field_name)] if value is None else value


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


class TasksConfig(GroupJudging):
    family: str
    """A folder of task folders, e.g. `sandboxes/chores`, or the plugin reference of a callable that takes `seed=` and returns a TaskFamily,
    e.g. `sandboxes.tables:Tables`."""
    options: dict[str, str | int | float | bool] = Field({})
    """Further keyword arguments of the family. Of a folder: `heldout`, the share of tasks without a split of their own that is held out."""
    verifiers: tuple[str, ...] = Field(())
    """Who judges, as references such as `rewards.close:close_number`, in place of the verifiers that the tasks name. Empty: those."""
    withhold: tuple[str, ...] = Field(())
    """Suites, as folders relative to the project root: no case of theirs, nor a near twin of one, is ever trained on."""
    practice: PracticeConfig | None = None
    """Tasks made from the cases of suites, for a share of the groups; None: every group has a task of the family."""
    audit: tuple[str, ...] = Field(())
    """Verifiers that judge every episode beside the others, as references: logged and plotted, never trained on. docs/verifiers.md."""

    @field_validator("audit")
    @classmethod
    def _audit_is_another(cls, audit: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if same := sorted({*audit} & {*info.data.get("verifiers", ())}):
            raise ValueError(f"{same[0]} is among tasks.verifiers too: an audit that agrees with itself finds nothing")
        return audit


class EvalConfig(Section):
    """Evaluation before and after training: same tasks, same sandboxes, same verifier."""

    heldout: int = Field(160, ge=0)
    """Held-out tasks in each evaluation."""
    heldout_real: int = Field(96, ge=0)
    """Held-out tasks on real data in each evaluation."""
    attempts: int = Field(1, ge=1, le=1024)
    """Attempts at each of these tasks. With more than one there is pass@k, too, and success against compute for several attempts."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Only the so many likeliest tokens are sampled; 0 (or None): off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the fewest likeliest tokens that together have this probability; 1: off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Only tokens with at least this share of the likeliest one's probability; 0: off."""
    every: int = Field(0, ge=0)
    """Also evaluate after every so many steps; 0: only before and after."""

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @model_validator(mode="after")
    def _every_key_acts(self) -> EvalConfig:
        if 0 < self.temperature < _COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_COLDEST:g}: vLLM samples colder ones at {_COLDEST:g}")
        if self.temperature == 0 and self.attempts > 1:
            raise ValueError("attempts does nothing at temperature=0, where all attempts at a task are alike: leave one of them off")
        if self.temperature == 0 and self.sampling.truncated:
            raise ValueError("top_k, top_p and min_p do nothing at temperature=0, where the likeliest token is taken: leave them off")
        return self


class RolloutConfig(Section):
    agent: parts.AgentName = "turns"
    """What acts in an episode. turns: samples, calls the task's tools, shows their output, until the agent submits or answers.
    delegating: so too, with a tool that starts sub-agents."""
    agent_options: parts.Options = Field({})
    """Keyword arguments of an agent that is named by reference."""
    delegation: DelegationConfig | None = None
    """What the sub-agents of agent=delegating may do; None: the defaults of these keys."""
    compaction: CompactionConfig | None = None
    """When an agent that ships goes on from a summary of its own; None: a full context ends the episode. `{}` takes its defaults."""
    group_size: int = Field(8, ge=1)
    """Attempts at one task; they share a baseline."""
    groups_per_step: int = Field(16, ge=1)
    """Tasks in one learner step."""
    extra_groups: int = Field(0, ge=0)
    """Groups that a step may have beyond these: one is made for each whose attempts all score the same, which teaches nothing. 0: a step
    trains on what is left."""
    concurrency: int = Field(64, ge=1)
    """Episodes in flight at once."""
    max_cache_use: float = Field(0.9, gt=0, le=1)
    """Share of the server's key/value cache up to which further episodes begin, by what those in flight take; a server that runs out of it
    computes contexts again. 1: as many as `concurrency` says."""
    temperature: float = Field(1.0, ge=_COLDEST, le=2)
    """Sampling temperature of training episodes; logprobs and losses are taken at it."""
    top_k: int = Field(0, ge=0, le=MAX_TOP_K)
    """Only the so many likeliest tokens are sampled; 0 (or None): off. What each token could have been is kept with it, and the learner
    scores it over the same tokens: docs/objectives.md says what that means."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Of these, only the fewest likeliest that together have this share of their probability; 1: off. Needs top_k, which bounds them."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Only tokens with at least this share of the likeliest one's probability; 0: off. Needs top_k, which bounds what is kept."""
    max_retries: int = Field(2, ge=0)
    """Fresh attempts after an infrastructure failure, before the episode is left out."""
    min_group_size: int = Field(2, ge=1)
    """A group with fewer counted episodes is dropped."""
    max_quarantined: int = Field(8, ge=0)
    """Broken tasks that are quarantined, and their groups left out, before the run stops with their list."""
    max_fault_rate: float = Field(0.5, ge=0, le=1)
    """Largest share of the newest attempts (four times `concurrency`, at least 64) that may fail by no doing of the policy before the
    run pauses and says why. 1: it never does."""
    checkpoint_turns: bool = False
    """Keep every running episode's state in the run folder after each turn, so that --resume goes on from there. Costs a snapshot of the
    working directory and a file a turn: some milliseconds with little in it, and up to 64 MiB of disk for each episode in flight."""
    branching: BranchingConfig | None = None
    """Tree rollouts; None: every attempt runs from the beginning. `{}` takes its defaults."""

    @model_validator(mode="after")
    def _options_act(self) -> RolloutConfig:
        parts.check_options(parts.AGENT, self.agent, self.agent_options)
        if self.delegation is not None and self.agent != "delegating":
            raise ValueError(f"delegation does nothing with agent={self.agent}: set agent=delegating")
        if self.compaction is not None and self.agent not in parts.AGENT.shipped:
            raise ValueError("compaction does nothing with an agent of your own: hand it on in agent_options")
        return self

    @property
    def agent_settings(self) -> dict[str, Any]:
        """Keyword arguments of the agent, beside `chat`."""
        if self.agent not in parts.AGENT.shipped:
            return dict(self.agent_options)
        settings: dict[str, Any] = {} if self.compaction is None else {"compaction": self.compaction}
        return settings | ({"delegation": self.delegation or DelegationConfig()} if self.agent == "delegating" else {})

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, supports=self.top_k > 0)

    @model_validator(mode="after")
    def _supports_are_bounded(self) -> RolloutConfig:
        if self.top_k == 1:
            raise ValueError("top_k=1 leaves every token without an alternative, so that nothing can be learned; take at least 2")
        if self.top_k == 0 and (self.top_p < 1 or self.min_p > 0):
            raise ValueError(
                "top_p and min_p need top_k: the learner scores a token over the very tokens that it was drawn from, and without top_k"
                f" there may be as many of them as the vocabulary has; set top_k as well, for instance to 64 (at most {MAX_TOP_K})"
            )
        return self


class SandboxConfig(Section):
    backend: parts.Backend = "auto"
    """auto: docker when a daemon answers, bubblewrap otherwise. There is no host backend."""
    options: parts.Options = Field({})
    """Keyword arguments of a backend that is named by reference."""
    max_open: int = Field(64, ge=1)
    """Sandboxes open at once."""
    open_timeout_s: float = Field(60.0, gt=0)
    """Deadline for opening one sandbox."""
    warm: int = Field(8, ge=0)
    """Sandboxes kept ready ahead of need (used once, then destroyed)."""

    @model_validator(mode="after")
    def _options_act(self) -> SandboxConfig:
        parts.check_options(parts.BACKEND, self.backend, self.options)
        return self


class ServingConfig(Section):
    engine: Literal["vllm"] = "vllm"
    """Inference server."""
    host: str = "127.0.0.1"
    """Address the server binds to. Its control routes have no authentication: keep it on loopback or a private network."""
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences decoded at once."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of GPU memory for the server (GPU only)."""
    kv_cache_gb: float = Field(0.5, gt=0)
    """Key/value cache in GiB (CPU only)."""
    threads: int = Field(0, ge=0)
    """CPU threads of the engine; 0: all cores (CPU only)."""
    weight_transfer: parts.Channel = "file"
    """file: safetensors mapped by the server, single machine. delta: so too, but most versions are only what changed since their parent,
    with checksums (pays in bfloat16 with a small learning rate). nccl: from the learner's GPUs to another one, the server's."""
    weight_transfer_options: parts.Options = Field({})
    """Keyword arguments of a weight channel that is named by reference."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """Deadline for the server to answer after a start; requests wait as long for one that is being restarted."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Deadline of one completion, and of one weight swap."""
    probe_max_abs_diff: float = Field(1e-3, gt=0)
    """A swap whose logprob probe differs by more (nats) is refused. Use about 0.15 with bfloat16."""

    @model_validator(mode="after")
    def _options_act(self) -> ServingConfig:
        parts.check_options(parts.CHANNEL, self.weight_transfer, self.weight_transfer_options)
        return self


class ObjectiveConfig(Section):
    """Which algorithm: docs/objectives.md says which settings make which."""

    advantage: parts.Advantage = "grpo"
    """Baseline of an episode's score. grpo: its group's mean. rloo: the mean of the rest of its group. reinforce++: the batch's mean.
    reinforce++-baseline: its group's mean, scaled over the batch. gae: a critic's values, token by token (PPO; needs `critic`)."""
    advantage_options: parts.Options = Field({})
    """Keyword arguments of an estimator that is named by reference."""
    credit: Literal["episode", "branches", "roles", "verifier", "counterfactual", "siblings"] = "episode"
    """What each trajectory of an episode is given: the contexts of its sub-agents and summaries, and attempts that branched. episode: the
    episode's advantage. branches: the same, divided by their number. roles: the episode's score against a baseline of those that have
    the role. verifier: what a verifier says that it is worth by itself. counterfactual: what the score loses without it, where a verifier
    says so. siblings: the mean from this turn on against that of the attempts at its branch point (needs rollout.branching)."""
    normalize_std: bool | None = None
    """Divide by the standard deviation, of the group (grpo, rloo) or of the batch (reinforce++, gae). None: as the estimator's paper does,
    which is yes, but for rloo."""
    turn_coef: float = Field(0.0, ge=0)
    """Weight of turn-level advantages, added where verifiers reward single turns (`Score.turn_rewards`)."""
    loss: parts.LossName = "clip"
    """clip: PPO's, ratio by token. gspo: ratio by sequence. cispo: clipped weight, full gradient."""
    loss_options: parts.Options = Field({})
    """Keyword arguments of a loss that is named by reference."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Distance below 1 at which the importance ratio is clipped; 1: never from below."""
    clip_high: float = Field(0.2, gt=0)
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with a negative advantage stops contributing (loss=clip)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: every trained token counts the same. sequence_mean: every rollout does, with all its trajectories. constant: each token,
    whatever the batch's tokens: sum / (rollouts * constant_length)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that aggregation=constant divides by for each rollout. None: policy.max_model_len."""
    proximal: Literal["auto", "behaviour", "recompute"] = "auto"
    """What the ratio is taken against. behaviour: the logprobs of sampling. recompute: those of the weights at the start of the step
    (decoupled). auto: recompute when learner.minibatches is above 1."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weights from the behaviour policy to the proximal one. truncate: capped. mask: 0 outside [is_floor, is_cap]. none: 1."""
    is_level: Literal["token", "sequence"] = "token"
    """Whether these weights are ratios of tokens or of whole sequences."""
    is_cap: float = Field(2.0, gt=0)
    """Truncated importance sampling: cap on behaviour-policy correction weights."""
    is_floor: float = Field(0.0, ge=0)
    """Smallest weight that correction=mask keeps."""
    staleness_decay: float = Field(1.0, gt=0, le=1)
    """A token's advantage is multiplied by this for each version it lags behind the learner."""
    kl: Literal["none", "k1", "k2", "k3", "k1_reward"] = "none"
    """Estimator of the divergence from version 0: in the loss (k1, k2, k3), or summed over the episode and taken off its score
    (k1_reward)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of that divergence."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss."""

    @property
    def divides_by_std(self) -> bool:
        return self.advantage != "rloo" if self.normalize_std is None else self.normalize_std

    @property
    def caps_ratio(self) -> bool:
        """Whether the ratio that carries the gradient is truncated at `is_cap`, besides the correction weights."""
        return self.loss != "cispo" and self.correction != "none"

    def recomputes(self, minibatches: int) -> bool:
        """Whether the proximal policy's logprobs are computed at the start of a step."""
        return self.proximal == "recompute" or (self.proximal == "auto" and minibatches > 1)

    @model_validator(mode="after")
    def _every_key_acts(self) -> ObjectiveConfig:
        parts.check_options(parts.ADVANTAGE, self.advantage, self.advantage_options)
        parts.check_options(parts.LOSS, self.loss, self.loss_options)
        if self.credit != "episode" and self.advantage == "gae":
            raise ValueError(f"credit={self.credit} does nothing with advantage=gae, whose critic credits every token: set credit=episode")
        if self.credit not in ("episode", "branches") and self.advantage not in ("grpo", "rloo"):
            raise ValueError(f"credit={self.credit} takes its baselines from the group: set advantage=grpo or rloo")
        if self.normalize_std is not None and self.advantage not in parts.ADVANTAGE.shipped and not self.turn_coef:
            raise ValueError(
                "normalize_std does nothing with an estimator of your own, which scales as it likes: leave it out, or hand it on in"
                " advantage_options"
            )
        if self.dual_clip is not None and self.loss != "clip":
            raise ValueError(f"dual_clip does nothing with loss={self.loss}; leave it at None or set loss=clip")
        if self.caps_ratio and self.dual_clip is not None and self.dual_clip >= self.is_cap:
            raise ValueError(
                "dual_clip does nothing at or above is_cap, where the ratio is truncated first; raise is_cap or set correction=none"
            )
        if self.caps_ratio and 1.0 + self.clip_high >= self.is_cap:
            raise ValueError("clip_high does nothing when 1 + clip_high reaches is_cap, where the ratio is truncated first; raise is_cap")
        if self.constant_length is not None and self.aggregation != "constant":
            raise ValueError(f"constant_length does nothing with aggregation={self.aggregation}; set aggregation=constant")
        if self.correction == "none" and (self.is_level == "sequence" or self.is_cap != 2.0):
            raise ValueError("is_level and is_cap do nothing with correction=none; leave them at their defaults")
        if self.is_floor and self.correction != "mask":
            raise ValueError(f"is_floor does nothing with correction={self.correction}; set correction=mask")
        if self.is_floor >= self.is_cap:
            raise ValueError("is_floor must be below is_cap: no weight lies between them")
        if (self.kl == "none") != (self.kl_coef == 0):
            raise ValueError("kl and kl_coef go together: kl says how the divergence is estimated, kl_coef (above 0) how much it weighs")
        return self


class LearnerConfig(Section):
    lr: float = Field(5e-4, gt=0)
    """Learning rate of AdamW, at its highest."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stays, or falls to nearly 0 at the last of `steps`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices; vectors do not decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient's global norm is clipped to this."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage: 1 shards optimizer state over the ranks, 2 also gradients, 3 also weights."""
    ranks: int = Field(1, ge=1)
    """Learner processes (torchrun --nproc-per-node)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; `{}` takes their defaults. They want a learning rate about ten times higher."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lives in the CPU's memory instead of the GPU's. optimizer: master weights, Adam's moments and its step (zero_stage 1 to 3).
    parameters: these and the weights, fetched layer by layer (zero_stage 3)."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share every sequence (Ulysses), for contexts too long for one. Divides `ranks`, and the model's key heads."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch; above 1 the later ones are off-policy and the ratio clip matters."""
    max_tokens_per_microbatch: int = Field(16384, ge=16)
    """Tokens in one forward/backward pass on one rank; there is no padding, and a shared token counts once."""
    share_prefixes: bool = True
    """Tokens that samples begin with in common (a group's prompt, the history of turns) are computed once, forward and backward."""
    gradient_checkpointing: bool | None = None
    """Recompute layers in the backward pass: less memory, about a third more arithmetic. None: on CUDA only."""
    kernels: Literal["torch", "liger"] = "torch"
    """What computes norms, MLPs and rotary positions. liger: fused GPU kernels of the package liger-kernel, checked at the start."""
    threads: int = Field(0, ge=0)
    """CPU threads per rank; 0: torch's default."""
    max_bad_updates: int = Field(3, ge=1)
    """Optimizer steps left out in a row, because something was not finite or a limit said skip, before the run stops."""
    max_bad_groups: int = Field(16, ge=1)
    """Groups left out in the whole run, because a score, logprob or advantage was not finite, before the run stops."""
    limits: LimitsConfig = LimitsConfig()
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept on disk."""
    full_every: int = Field(8, ge=2)
    """With serving.weight_transfer=delta: every so many versions one is published whole, and so is one that changed in most bytes."""
    keep_versions: int = Field(4, ge=2)
    """Newest exported policy versions kept on disk, and as many promoted ones, besides version 0 and the serving one."""


class Recipe(Section):
    """Everything a run needs. `Recipe(name=..., policy=..., tasks=...)`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the run; its folder is `runs/NAME` unless --run-dir says otherwise."""
    seed: int = Field(0, ge=0)
    """Fixes the tasks and seeds the server's sampler and the learner. Sampling is not repeatable bit for bit: batching is asynchronous."""
    steps: int = Field(16, ge=1)
    """Learner steps."""
    max_staleness: int = Field(1, ge=0)
    """Learner versions an episode may lag behind. 0: strictly on-policy, rollouts wait for each update."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where server and learner compute. auto: cuda where torch finds a GPU, else cpu."""
    policy: PolicyConfig
    tasks: TasksConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvalConfig = EvalConfig()
    tools: ToolsConfig = ToolsConfig()
    memory: MemoryConfig | None = None
    """Notes that agents write for later episodes and find again; None: there are none. `{}` takes its defaults."""
    capture: CaptureConfig = CaptureConfig()
    store: parts.Store = "sqlite"
    """Where scored groups wait for the learner. sqlite: a file in the run folder."""
    store_options: parts.Options = Field({})
    """Keyword arguments of a store that is named by reference."""
    trackers: tuple[parts.TrackerName, ...] = ("terminal", "tensorboard")
    """Who hears of the run's figures, besides `metrics.jsonl`, which is always written. terminal: progress, where a person can see it.
    tensorboard: event files in logs/tensorboard."""
    tracker_options: dict[str, parts.Options] = Field({})
    """Keyword arguments of trackers that are named by reference, by that name."""
    sandbox: SandboxConfig = SandboxConfig()
    serving: ServingConfig = ServingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig | None = None
    """The value model that objective.advantage=gae needs, and nothing else uses; `{}` takes its defaults."""
    learner: LearnerConfig = LearnerConfig()
    judge_servers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], JudgeServerConfig] = Field({})
    """Servers that the run starts for its judges, by the name that `agentrl.reward.judges.served(NAME)` takes."""
    gate: GateConfig | None = None
    """Regression cases that every version is held to before it is promoted; None: the last version is promoted unjudged."""

    @model_validator(mode="after")
    def _parts_are_named(self) -> Recipe:
        parts.check_options(parts.STORE, self.store, self.store_options)
        for name, options in self.tracker_options.items():
            parts.check_options(parts.TRACKER, name, options)
            if name not in self.trackers:
                raise ValueError(f"tracker_options are given for {name!r}, which is not among trackers: {', '.join(self.trackers)}")
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Recipe:
        if self.objective.advantage in ("grpo", "rloo", "reinforce++-baseline") and self.rollout.group_size < 2:
            raise ValueError(
                "rollout.group_size must be at least 2: an attempt alone is its own baseline, whatever objective.normalize_std is;"
                " only objective.advantage=reinforce++ and gae need no group"
            )
        if self.rollout.group_size * self.rollout.groups_per_step < 2:
            raise ValueError("rollout.groups_per_step must be at least 2 when rollout.group_size is 1: one score has no baseline")
        if self.tasks.group_judge is not None and self.rollout.group_size < 2:
            raise ValueError("tasks.group_judge compares the attempts of a group: rollout.group_size must be at least 2")
        if self.rollout.min_group_size > self.rollout.group_size:
            raise ValueError("rollout.min_group_size must not exceed rollout.group_size")
        if self.rollout.branching is not None and self.rollout.group_size % self.rollout.branching.branches:
            raise ValueError("rollout.group_size must be a multiple of rollout.branching.branches")
        if self.objective.credit == "siblings" and self.rollout.branching is None:
            raise ValueError("objective.credit=siblings compares attempts that branched, and none do: set rollout.branching")
        compaction, longest = self.rollout.compaction, self.policy.max_model_len
        if compaction is not None and (compaction.tokens or compaction.share * longest) + compaction.summary_tokens >= longest:
            raise ValueError(
                "rollout.compaction begins where no summary fits: its tokens (or share of policy.max_model_len) and summary_tokens together"
                " must be less than policy.max_model_len"
            )
        if self.serving.weight_transfer == "nccl" and self.device == "cpu":
            raise ValueError("serving.weight_transfer=nccl copies from GPU to GPU; with device=cpu use weight_transfer=file")
        if self.learner.kernels == "liger" and self.device == "cpu":
            raise ValueError("learner.kernels=liger are GPU kernels; with device=cpu use kernels=torch")
        if self.serving.weight_transfer != "delta" and self.learner.full_every != 8:
            raise ValueError("learner.full_every does nothing: every version is whole; set serving.weight_transfer=delta")
        if self.learner.keep_versions <= self.max_staleness:
            raise ValueError("learner.keep_versions must exceed max_staleness: a version is kept at least until it has served")
        if self.learner.max_tokens_per_microbatch * self.learner.sequence_parallel < self.policy.max_model_len:
            raise ValueError(
                "learner.max_tokens_per_microbatch times learner.sequence_parallel must be at least policy.max_model_len: an episode is"
                " split over the ranks of a team, and nowhere else"
            )
        if self.rollout.extra_groups and self.objective.advantage in ("reinforce++", "gae"):
            raise ValueError(
                f"rollout.extra_groups replaces groups whose attempts score the same; with objective.advantage={self.objective.advantage},"
                " which compares a step's attempts with one another, these teach too: set it to 0"
            )
        if self.learner.minibatches > self.rollout.groups_per_step:
            raise ValueError("learner.minibatches must not exceed rollout.groups_per_step")
        return self

    @model_validator(mode="after")
    def _one_way_to_begin_anew(self) -> Recipe:
        if self.policy.rewritten_context == "restart" and (self.rollout.compaction is not None or self.rollout.agent == "delegating"):
            raise ValueError(
                "policy.rewritten_context=restart is for agents with one context at a time: rollout.compaction and"
                " rollout.agent=delegating need a template that is extended exactly; leave it at refuse"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_read(self) -> Recipe:
        if self.memory is None:
            return self
        if self.rollout.agent not in parts.AGENT.shipped:
            raise ValueError("memory is for the agents that ship: one of your own is not given its tools; leave memory out")
        if self.memory.heldout_rounds > max(1, self.evaluation.heldout, self.evaluation.heldout_real):
            raise ValueError("memory.heldout_rounds exceeds the tasks of every evaluation, which has no more parts than tasks")
        if self.steps < self.max_staleness + 2 and self.memory.heldout_rounds == 1:
            raise ValueError(
                "memory does nothing: no step is late enough to read what another wrote; set steps to max_staleness + 2 or more, or"
                " memory.heldout_rounds above 1"
            )
        return self

    @model_validator(mode="after")
    def _learner_parts(self) -> Recipe:
        learner = self.learner
        if learner.lora is not None and self.serving.weight_transfer in ("delta", "nccl"):
            raise ValueError("serving.weight_transfer=nccl and delta are of whole models, learner.lora publishes adapters: use file")
        if learner.ranks % learner.sequence_parallel:
            raise ValueError("learner.sequence_parallel must divide learner.ranks: ranks form teams of that many")
        if learner.sequence_parallel > 1 and self.critic is not None:
            raise ValueError("learner.sequence_parallel above 1 has no critic (objective.advantage=gae) yet: choose another advantage")
        if learner.offload == "optimizer" and learner.zero_stage == 0:
            raise ValueError("learner.offload=optimizer needs learner.zero_stage 1, 2 or 3: at stage 0 DeepSpeed has no optimizer to move")
        if learner.offload == "parameters" and learner.zero_stage != 3:
            raise ValueError("learner.offload=parameters needs learner.zero_stage=3: below it every rank computes with whole weights")
        return self

    @model_validator(mode="after")
    def _limits_act(self) -> Recipe:
        limits = self.learner.limits
        if limits.max_kl_reference is not None and self.objective.kl not in ("k1", "k2", "k3"):
            raise ValueError("learner.limits.max_kl_reference does nothing: no reference is computed; set objective.kl to k1, k2 or k3")
        if limits.max_grad_norm is not None and limits.max_grad_norm.at <= self.learner.max_grad_norm:
            raise ValueError("learner.limits.max_grad_norm must exceed learner.max_grad_norm, or no gradient is ever clipped")
        if limits.max_mismatch_kl is not None and self.max_staleness > 0:
            raise ValueError(
                "learner.limits.max_mismatch_kl needs max_staleness=0: it is judged on tokens that the learner's very weights sampled, and"
                " a step of older ones has none, so that nothing would be held to it. serving.probe_max_abs_diff compares server and"
                " learner at every swap, whatever the staleness; learner.limits.max_kl bounds age and mismatch together"
            )
        return self

    @model_validator(mode="after")
    def _ratio_moves(self) -> Recipe:
        objective = self.objective
        if objective.proximal != "recompute" or self.learner.minibatches > 1:
            return self
        usual = type(objective).model_fields
        named = [f"objective.{key}" for key in ("clip_low", "clip_high", "dual_clip") if getattr(objective, key) != usual[key].default]
        if self.learner.limits.max_clip_fraction is not None:
            named.append("learner.limits.max_clip_fraction")
        if named:
            raise ValueError(
                f"{', '.join(named)}: nothing is ever clipped with objective.proximal=recompute and learner.minibatches=1, since the ratio"
                " is taken against the very weights that the one optimizer step of a batch begins with; raise learner.minibatches, or"
                " leave them at their defaults"
            )
        return self

    @model_validator(mode="after")
    def _objective_acts(self) -> Recipe:
        decoupled = self.objective.recomputes(self.learner.minibatches)
        if not decoupled and (self.objective.correction == "mask" or self.objective.is_level == "sequence"):
            raise ValueError(
                "objective.correction=mask and objective.is_level=sequence weigh a proximal policy, and there is none: its logprobs are"
                " the behaviour policy's; set objective.proximal=recompute"
            )
        if not decoupled and self.objective.loss == "cispo" and self.objective.is_cap != 2.0:
            raise ValueError("objective.is_cap does nothing: cispo bounds its own weight; set clip_high, or objective.proximal=recompute")
        if (self.objective.advantage == "gae") != (self.critic is not None):
            raise ValueError("objective.advantage=gae and critic go together: write critic=CriticConfig(), or choose another advantage")
        if self.critic is not None and self.critic.minibatches * self.learner.minibatches > self.rollout.groups_per_step:
            raise ValueError("critic.minibatches times learner.minibatches must not exceed rollout.groups_per_step")
        if self.critic is not None and self.objective.staleness_decay < 1:
            raise ValueError("objective.staleness_decay does nothing with objective.advantage=gae: a critic makes its advantages later")
        if self.objective.staleness_decay < 1 and self.max_staleness == 0:
            raise ValueError("objective.staleness_decay does nothing with max_staleness=0: no token is ever stale")
        return self


def apply_overrides(recipe: Recipe, overrides: list[str]) -> Recipe:
    """Lays the command line's `a.b=value` over a recipe: `recipe.but(*overrides)`."""
    return recipe.but(*overrides)


def build(data: Mapping[str, Any]) -> Recipe:
    """Validates plain data into a Recipe, or raises `RecipeError` with one line per wrong key."""
    return section.build(Recipe, data)


def load(path: Path) -> Recipe:
    """The recipe saved in a run folder (`recipe.json`)."""
    return build(json.loads(path.read_text()))
