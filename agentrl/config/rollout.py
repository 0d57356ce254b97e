"""Settings of episodes in training and evaluation: `rollout` with `branching`, `delegation` and `compaction`, `evaluation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.section import Needs, Section, resumable
from agentrl.plugins import parts
from agentrl.records.paths import pattern_error
from agentrl.records.sampling import MAX_TOP_K, Sampling

SUITE_FAMILY = "agentrl.evaluation.policies:SuiteTasks"
"""The task family of an evaluation on suites. Its cases are sampled with the settings of `evaluation`; there are no held-out tasks."""
_HELD_OUT = Needs("held-out tasks: set evaluation.heldout or heldout_real", lambda recipe, own: own.heldout or own.heldout_real)
_EVALUATED = Needs(
    "held-out tasks or a gate: set evaluation.heldout, heldout_real or gate",
    lambda recipe, own: own.heldout or own.heldout_real or recipe.gate is not None or recipe.tasks.family == SUITE_FAMILY,
)
_BETWEEN = Needs(
    "a step between the first and the last to evaluate after: set it below steps", lambda recipe, own: own.every < recipe.steps
)
_COLDEST = 0.01  # vLLM samples at this temperature if a lower one above 0 is requested


def _off_by_none(value: Any, field: ValidationInfo) -> Any:
    """Replaces None by the value that disables this truncation."""
    return {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[str(field.field_name)] if value is None else value


class BranchingConfig(Section):
    """Tree rollouts: some attempts run to a turn, and other attempts continue from the state (files and context) of each."""

    turn: int = Field(1, ge=1)
    """Turn after which attempts branch. If an attempt ends earlier, independent attempts fill the group."""
    branches: int = Field(2, ge=2)
    """Attempts per branch point, including the first. Must divide rollout.group_size."""


class DelegationConfig(Section):
    """Limits on the sub-agents of `rollout.agent=delegating`, and their tools and sandbox. See docs/agents.md."""

    depth: Annotated[
        int, Needs("a sub-agent for each level: set total to at least as many", lambda recipe, own: own.depth <= own.total)
    ] = Field(1, ge=1, le=8)
    """Levels of sub-agents. 1: only the main agent starts them."""
    width: int = Field(4, ge=1, le=64)
    """Sub-agents that one turn can start in parallel."""
    total: int = Field(16, ge=1, le=1024)
    """Sub-agents per episode, at all depths."""
    turns: int = Field(4, ge=1)
    """Turns per sub-agent. They count towards the task's `Limits.turns` too."""
    tokens: int | None = Field(None, ge=1)
    """Sampled tokens per sub-agent. None: bounded by its turns only."""
    tools: tuple[str, ...] | None = None
    """Tools of sub-agents. None: those of the task. With `submit` they return the submitted answer, otherwise their last message."""
    instruction: str = ""
    """System message of sub-agents. Empty: none."""
    sandbox: Literal["shared", "own"] = "shared"
    """shared: sub-agents work in the episode's sandbox. own: each gets a sandbox that starts with a copy of the caller's working
    directory."""
    returns: tuple[str, ...] = ()
    """File patterns, such as out/**, copied from a sub-agent's sandbox to the caller's folder helper-N (N: trajectory). Needs
    sandbox=own."""

    @property
    def at_once(self) -> int:
        """Maximum number of sub-agents of one episode that work at the same time."""
        return min(self.total, sum(int(self.width**depth) for depth in range(1, self.depth + 1)))

    @field_validator("returns")
    @classmethod
    def _are_patterns(cls, returns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in returns:
            if wrong := pattern_error(pattern):
                raise ValueError(f"{pattern[:80]!r} {wrong}")
        return returns

    @model_validator(mode="after")
    def _every_key_acts(self) -> DelegationConfig:
        if self.total < self.width:
            raise ValueError(f"width={self.width} exceeds total={self.total}, the sub-agents of an episode: lower width or raise total")
        if self.returns and self.sandbox == "shared":
            raise ValueError("returns does nothing with sandbox=shared, because all agents share the same files: set sandbox=own")
        return self


class CompactionConfig(Section):
    """When an agent continues in a new context, from a summary that it writes. See docs/agents.md."""

    share: float = Field(0.75, gt=0, lt=1)
    """Share of policy.max_model_len, or of the task's `Limits.episode_tokens` if less, at which a summary is requested."""
    tokens: int | None = Field(None, ge=1)
    """Context tokens at which a summary is requested, in place of share."""
    summary_tokens: int = Field(256, ge=1)
    """Maximum tokens of a summary. A truncated or empty one, or one with a tool call, is rejected."""
    attempts: int = Field(2, ge=1, le=16)
    """Attempts at a summary before the agent ends with token_limit. Each counts as a turn."""
    request: str = Field(
        "The room for this conversation is nearly used up. Answer with a summary of what you know and what is left to do, without a tool"
        " call. You go on with that summary alone.",
        min_length=1,
    )
    """Prompt that requests the summary."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> CompactionConfig:
        if self.tokens is not None and self.share != 0.75:
            raise ValueError("share does nothing if tokens is set: remove one of them")
        return self


class RolloutConfig(Section):
    """How training episodes are sampled: `rollout`."""

    agent: parts.AgentName = "turns"
    """Agent of each episode. turns: samples and calls tools until the agent submits or answers. delegating: turns, with a tool that starts
    sub-agents."""
    agent_options: parts.Options = Field({})
    """Keyword arguments of a user-supplied agent."""
    delegation: DelegationConfig | None = None
    """Bounds of sub-agents (agent=delegating). None: the defaults."""
    compaction: CompactionConfig | None = None
    """Continues a full context from a summary that the agent writes. None: a full context ends the episode; `{}` uses the defaults."""
    instructions: str | None = Field(None, min_length=1)
    """Replaces the system messages of the tasks for the main agent. None: no replacement."""
    group_size: int = Field(8, ge=1)
    """Attempts per task; they share a baseline."""
    groups_per_step: int = Field(16, ge=1)
    """Tasks per learner step."""
    spare_attempts: int = Field(0, ge=0)
    """Additional attempts per group. When group_size attempts count, the rest are cancelled. Favours short episodes
    (docs/objectives.md)."""
    stop_equal_after: int = Field(0, ge=0)
    """Attempts per group that start first. If all score the same, the others are not started, which misses rare successes
    (docs/objectives.md). 0 disables it."""
    extra_groups: int = Field(0, ge=0)
    """Additional groups per step, one for each group whose attempts all score the same."""
    concurrency: int = resumable(64, ge=1)
    """Episodes in flight at once."""
    max_cache_use: float = resumable(0.9, gt=0, le=1)
    """Share of the KV cache above which no further episode starts. 1: only concurrency limits them."""
    temperature: float = Field(1.0, ge=_COLDEST, le=2)
    """Sampling temperature of training episodes. Logprobs and losses use it too."""
    top_k: int = Field(0, ge=0, le=MAX_TOP_K)
    """Samples from the k most likely tokens. The learner scores each token over the same set. 0 or None disables it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Samples from the fewest most likely of these tokens that have this share of their probability. Needs top_k; 1 disables it."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, relative to the most likely one. Needs top_k; 0 disables it."""
    max_retries: int = resumable(2, ge=0)
    """Retries after an infrastructure fault, before the episode is excluded."""
    min_group_size: int = Field(2, ge=1)
    """Minimum counted episodes of a group. A smaller group is dropped."""
    max_quarantined: int = resumable(8, ge=0)
    """Broken tasks to quarantine before the run stops and lists them."""
    max_fault_rate: float = resumable(0.5, ge=0, le=1)
    """Share of faults not caused by the policy, among the newest attempts, above which the run pauses. 1 disables it."""
    checkpoint_turns: bool = resumable(False)
    """Saves each running episode after every turn, so that --resume continues it. Costs milliseconds per turn, and up to 64 MiB per
    episode."""
    branching: BranchingConfig | None = None
    """Tree rollouts: attempts share their first turns. None: every attempt starts at the prompt; `{}` uses the defaults."""

    @model_validator(mode="after")
    def _options_act(self) -> RolloutConfig:
        parts.check_options(parts.AGENT, self.agent, self.agent_options)
        if self.delegation is not None and self.agent != "delegating":
            raise ValueError(f"delegation does nothing with agent={self.agent}: set agent=delegating")
        if self.compaction is not None and self.agent not in parts.AGENT.shipped:
            raise ValueError("compaction does nothing with a user-supplied agent: pass it in agent_options")
        if self.instructions is not None and self.agent not in parts.AGENT.shipped:
            raise ValueError("instructions do nothing with a user-supplied agent: pass them in agent_options")
        return self

    @property
    def agent_settings(self) -> dict[str, Any]:
        """Keyword arguments of the agent, in addition to `chat`."""
        if self.agent not in parts.AGENT.shipped:
            return dict(self.agent_options)
        settings: dict[str, Any] = {} if self.compaction is None else {"compaction": self.compaction}
        settings |= {} if self.instructions is None else {"instructions": self.instructions}
        return settings | ({"delegation": self.delegation or DelegationConfig()} if self.agent == "delegating" else {})

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of training episodes."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, supports=self.top_k > 0)

    @model_validator(mode="after")
    def _first_ones_can_differ(self) -> RolloutConfig:
        first, fewest = self.stop_equal_after, max(2, self.min_group_size)
        if first and not fewest <= first < self.group_size:
            raise ValueError(
                f"stop_equal_after={first} must be 0, or at least {fewest} (two scores can differ, and min_group_size attempts must count)"
                f" and below group_size={self.group_size}"
            )
        if first and self.branching is not None:
            raise ValueError("stop_equal_after cannot be combined with branching: a branch starts only after its stem; remove one of them")
        return self

    @model_validator(mode="after")
    def _supports_are_bounded(self) -> RolloutConfig:
        if self.top_k == 1:
            raise ValueError("top_k=1 leaves every token without an alternative, so the policy cannot learn; set it to at least 2")
        if self.top_k == 0 and (self.top_p < 1 or self.min_p > 0):
            raise ValueError(
                "top_p and min_p need top_k: the learner scores each token over the set from which it was drawn, and without top_k that set"
                f" can be the whole vocabulary; set top_k as well, for instance to 64 (at most {MAX_TOP_K})"
            )
        return self


class EvalConfig(Section):
    """Evaluation before and after training: same tasks, same sandboxes, same verifier."""

    heldout: int = Field(160, ge=0)
    """Held-out tasks per evaluation."""
    heldout_real: int = Field(96, ge=0)
    """Held-out tasks on real data per evaluation."""
    attempts: Annotated[int, _HELD_OUT] = Field(1, ge=1, le=1024)
    """Attempts per task. With more than one, the report has pass@k and success against compute."""
    thinking_tokens: Annotated[tuple[int, ...], _HELD_OUT] = Field((), max_length=16)
    """Limits on thinking tokens per turn. Held-out tasks run once more with each."""
    temperature: Annotated[float, _EVALUATED] = Field(1.0, ge=0, le=2)
    """Sampling temperature. 0: greedy."""
    top_k: Annotated[int, _EVALUATED] = Field(0, ge=0)
    """Samples from the k most likely tokens. 0 or None disables it."""
    top_p: Annotated[float, _EVALUATED] = Field(1.0, gt=0, le=1)
    """Samples from the fewest most likely tokens that have this probability. 1 disables it."""
    min_p: Annotated[float, _EVALUATED] = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, relative to the most likely one. 0 disables it."""
    every: Annotated[int, _HELD_OUT, _BETWEEN] = Field(0, ge=0)
    """Steps between evaluations during training. 0: only before and after."""

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of evaluations."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @model_validator(mode="after")
    def _every_key_acts(self) -> EvalConfig:
        if any(most < 1 for most in self.thinking_tokens) or len({*self.thinking_tokens}) < len(self.thinking_tokens):
            raise ValueError("thinking_tokens must be positive and different from one another")
        if 0 < self.temperature < _COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_COLDEST:g}: vLLM replaces lower temperatures by {_COLDEST:g}")
        if self.temperature == 0 and self.attempts > 1:
            raise ValueError("attempts does nothing at temperature=0, because all attempts at a task are the same: remove one of them")
        if self.temperature == 0 and self.sampling.truncated:
            raise ValueError("top_k, top_p and min_p do nothing at temperature=0, which takes the most likely token: remove them")
        return self
