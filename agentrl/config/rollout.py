"""Settings for episodes in training and evaluation (`rollout` with `group` and `delegation`, `evaluation`, `sampling`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.section import Needs, Section, resumable
from agentrl.plugins import parts
from agentrl.records.paths import pattern_error
from agentrl.records.sampling import MAX_TOP_K, Sampling

SUITE_FAMILY = "agentrl.evaluation.policies:SuiteTasks"
"""The task family for an evaluation on suites. Its cases are sampled with the settings in `evaluation`, and there are no held-out tasks."""
_HELD_OUT = Needs("held-out tasks: set evaluation.heldout or heldout_real", lambda recipe, own: own.heldout or own.heldout_real)
_EVALUATED = Needs(
    "held-out tasks or a gate: set evaluation.heldout, heldout_real or gate",
    lambda recipe, own: own.heldout or own.heldout_real or recipe.gate is not None or recipe.tasks.family.ref == SUITE_FAMILY,
)
_BETWEEN = Needs(
    "a step between the first and the last to evaluate after: set it below steps", lambda recipe, own: own.every < recipe.step_limit
)
_COLDEST = 0.01  # vLLM samples at this temperature if a lower temperature above 0 is requested


class SamplingConfig(Section):
    """The distribution from which tokens are sampled (`rollout.sampling` and `evaluation.sampling`)."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature. Logprobs and losses also use the rollout temperature. 0 (evaluations only): greedy."""
    top_k: int = Field(0, ge=0)
    """Samples from the k most likely tokens. In rollouts at most 128, and the learner scores each token over the same set. 0 or None
    disables it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Samples from the smallest set of the top_k tokens that has this share of their probability. In rollouts it needs top_k. 1 or None
    disables it."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, relative to the most likely token. In rollouts it needs top_k. 0 or None disables it."""

    @field_validator("top_k", "top_p", "min_p", mode="before")
    @classmethod
    def _off_by_none(cls, value: Any, field: ValidationInfo) -> Any:
        """Replaces None with the value that disables the truncation (0 for top_k and min_p, 1 for top_p)."""
        return cls.model_fields[str(field.field_name)].default if value is None else value

    @model_validator(mode="after")
    def _every_key_acts(self) -> SamplingConfig:
        if 0 < self.temperature < _COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_COLDEST:g}: vLLM raises lower temperatures to {_COLDEST:g}")
        if self.temperature == 0 and self.distribution().truncated:
            raise ValueError("top_k, top_p and min_p do nothing at temperature=0, which takes the most likely token: remove them")
        return self

    def distribution(self, *, supports: bool = False) -> Sampling:
        """Returns these settings as a `Sampling` record. `supports`: whether to request the support of every sampled token, which training
        needs."""
        return Sampling(**dict(self), supports=supports)


class GroupConfig(Section):
    """The attempts at one task (`rollout.group`). docs/objectives.md describes the biases of the keys that stop attempts."""

    size: int = Field(8, ge=1)
    """Attempts per task, which share a baseline. A group with fewer than two valid attempts is dropped, unless size is 1."""
    spare_attempts: int = Field(0, ge=0)
    """Additional attempts. Once `size` attempts are valid, the rest are cancelled. Favours short episodes."""
    stop_equal_after: int = Field(0, ge=0)
    """Attempts that start first. If they all score the same, the others are not started, so rare successes are missed. 0 disables it."""
    branches: int = Field(1, ge=1)
    """Tree rollouts: attempts that continue from the same state (files and context), including the first. Must divide size. 1: none."""
    branch_turn: Annotated[int, Needs("branches above 1", lambda recipe, own: own.branches > 1)] = Field(1, ge=1)
    """Turn after which attempts branch. If an attempt ends earlier, independent attempts fill the group."""

    @property
    def min_size(self) -> int:
        """Minimum number of valid attempts: a baseline needs two, except in a recipe whose groups have only one attempt."""
        return min(2, self.size)

    @property
    def starts_together(self) -> int:
        """Number of attempts in a group that start together."""
        return self.size // self.branches if self.branches > 1 else self.stop_equal_after or self.size

    @model_validator(mode="after")
    def _every_key_acts(self) -> GroupConfig:
        if self.stop_equal_after and not 2 <= self.stop_equal_after < self.size:
            raise ValueError(
                f"stop_equal_after={self.stop_equal_after} must be 0, or at least 2 (one score cannot differ) and below size={self.size}"
            )
        if self.size % self.branches:
            raise ValueError(f"size={self.size} must be a multiple of branches={self.branches}: change one of them")
        if self.branches > 1 and (self.stop_equal_after or self.spare_attempts):
            raise ValueError(
                "spare_attempts and stop_equal_after cannot be combined with branches: a branch starts only after its stem, so the attempts"
                " of the fastest stem would end first; remove branches or these keys"
            )
        return self


class DelegationConfig(Section):
    """Limits on the sub-agents of `rollout.agent=delegating`, and the sub-agents' tools and sandbox. See docs/agents.md."""

    depth: Annotated[int, Needs("a sub-agent for each level: set total to at least depth", lambda recipe, own: own.depth <= own.total)] = (
        Field(1, ge=1, le=8)
    )
    """Levels of sub-agents. 1: only the main agent starts them."""
    total: int = Field(8, ge=1, le=1024)
    """Sub-agents per episode, at all depths. Those started in one turn run concurrently."""
    turns: int = Field(4, ge=1)
    """Turns per sub-agent. They count towards the task's `Limits.turns` too."""
    tools: tuple[str, ...] | None = None
    """Tools for sub-agents. None uses the task's tools. With `submit`, sub-agents return the submitted answer, else their last message."""
    instruction: str = ""
    """System message of sub-agents. Empty: none."""
    sandbox: Literal["shared", "own"] = "shared"
    """shared: sub-agents work in the episode's sandbox. own: each uses a sandbox that starts with a copy of the caller's working
    directory."""
    returns: tuple[str, ...] = ()
    """File patterns, such as out/**, copied from a sub-agent's sandbox to the caller's folder helper-N (N: trajectory). Needs
    sandbox=own."""

    @field_validator("returns")
    @classmethod
    def _are_patterns(cls, returns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in returns:
            if wrong := pattern_error(pattern):
                raise ValueError(f"{pattern[:80]!r} {wrong}")
        return returns

    @model_validator(mode="after")
    def _every_key_acts(self) -> DelegationConfig:
        if self.returns and self.sandbox == "shared":
            raise ValueError("returns does nothing with sandbox=shared, because all agents share the same files: set sandbox=own")
        return self


class RolloutConfig(Section):
    """How training episodes are sampled (`rollout`)."""

    agent: parts.Agent = parts.Part("turns")
    """Agent of each episode. turns: samples and calls tools until the agent submits or answers. delegating: like turns, with a tool that
    starts sub-agents. players: several roles in one environment (docs/environments.md)."""
    delegation: DelegationConfig | None = None
    """Limits on sub-agents (agent=delegating). None uses the defaults."""
    compaction: float | None = Field(None, gt=0, lt=1)
    """Share of the context (policy.max_model_len, or the task's `Limits.episode_tokens` if lower) at which the agent continues from
    a summary. With None, a full context ends the episode."""
    instructions: str | None = Field(None, min_length=1)
    """Replaces the tasks' system messages for the main agent."""
    group: GroupConfig = GroupConfig()
    groups_per_step: int = Field(16, ge=1)
    """Tasks per learner step."""
    extra_groups: int = Field(0, ge=0)
    """Maximum additional groups per step: one for each group whose attempts score the same."""
    concurrency: int = resumable(64, ge=1)
    """Episodes in flight at once; fewer if the server's KV cache is nearly full."""
    workers: int = resumable(0, ge=0, le=256)
    """Processes that run the episodes, each with an equal share of `concurrency`. 0: the driver runs them. More can join (`agentrl worker
    RUN`)."""
    sampling: SamplingConfig = SamplingConfig()
    checkpoint_turns: bool = resumable(False)
    """Saves each running episode after every turn, so that --resume continues it. Costs up to 64 MiB per episode."""

    @model_validator(mode="after")
    def _agent_keys_act(self) -> RolloutConfig:
        if self.delegation is not None and self.agent.ref != "delegating":
            raise ValueError(f"delegation does nothing with agent={self.agent}: set agent=delegating")
        if self.compaction is not None and (self.agent.ref not in parts.AGENT.shipped or self.agent.ref == "players"):
            raise ValueError(f"compaction does nothing with agent={self.agent}: remove it, or pass it in the options of your agent")
        if self.checkpoint_turns and self.agent.ref == "players":
            raise ValueError("checkpoint_turns does nothing with agent=players: an interrupted game restarts; remove it")
        if self.instructions is not None and self.agent.ref not in parts.AGENT.shipped:
            raise ValueError("instructions do nothing with a user-supplied agent: pass them in agent.options")
        return self

    @property
    def needs_league(self) -> bool:
        """Whether the policy plays against its past versions."""
        options = self.agent.options if self.agent.ref == "players" else {}
        players = options.get("players")
        return "league" in (options.get("opponent"), *(players.values() if isinstance(players, dict) else ()))

    @property
    def agent_settings(self) -> dict[str, Any]:
        """Keyword arguments of a built-in agent, in addition to `chat`; empty for a user-supplied agent."""
        settings: dict[str, Any] = {} if self.compaction is None else {"compaction": self.compaction}
        settings |= {} if self.instructions is None else {"instructions": self.instructions}
        settings |= {"sampling": self.distribution} if self.agent.ref == "players" else {}
        return settings | ({"delegation": self.delegation or DelegationConfig()} if self.agent.ref == "delegating" else {})

    @property
    def distribution(self) -> Sampling:
        """The sampling distribution for training episodes."""
        return self.sampling.distribution(supports=self.sampling.top_k > 0)

    @field_validator("sampling")
    @classmethod
    def _can_be_trained_on(cls, sampling: SamplingConfig) -> SamplingConfig:
        if sampling.temperature == 0 or sampling.top_k == 1:
            raise ValueError(
                "temperature=0 and top_k=1 leave only one candidate for every token, so the policy cannot learn: set temperature above 0,"
                " and top_k to 0 or at least 2"
            )
        if sampling.top_k > MAX_TOP_K:
            raise ValueError(f"top_k={sampling.top_k} exceeds the {MAX_TOP_K} tokens that can be recorded: lower it, or set it to 0")
        if sampling.top_k == 0 and sampling.distribution().truncated:
            raise ValueError(
                "top_p and min_p need top_k: the learner scores each token over the set from which it was drawn, and without top_k that set"
                f" can be the whole vocabulary; set top_k as well, for instance to 64 (at most {MAX_TOP_K})"
            )
        return sampling


class EvalConfig(Section):
    """Evaluation before and after training, with the same tasks, sandboxes and verifier."""

    heldout: int = Field(160, ge=0)
    """Held-out tasks per evaluation."""
    heldout_real: int = Field(0, ge=0)
    """Held-out tasks on real data per evaluation."""
    attempts: Annotated[int, _HELD_OUT] = Field(1, ge=1, le=1024)
    """Attempts per task. With more than one, the report contains pass@k and success against compute."""
    thinking_tokens: Annotated[tuple[int, ...], _HELD_OUT] = Field((), max_length=16)
    """Limits on thinking tokens per turn. Held-out tasks are repeated with each limit."""
    sampling: Annotated[SamplingConfig, _EVALUATED] = SamplingConfig()
    every: Annotated[int, _HELD_OUT, _BETWEEN] = Field(0, ge=0)
    """Steps between evaluations during training. 0: only before and after."""

    @property
    def distribution(self) -> Sampling:
        """The sampling distribution for evaluations."""
        return self.sampling.distribution()

    @model_validator(mode="after")
    def _every_key_acts(self) -> EvalConfig:
        if any(most < 1 for most in self.thinking_tokens) or len({*self.thinking_tokens}) < len(self.thinking_tokens):
            raise ValueError("thinking_tokens must be distinct positive numbers")
        if self.sampling.temperature == 0 and self.attempts > 1:
            raise ValueError(
                "attempts does nothing at sampling.temperature=0, because all attempts at a task are the same: remove one of them"
            )
        return self
