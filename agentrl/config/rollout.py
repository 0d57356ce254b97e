"""How episodes are made, in training and in evaluations: `rollout` with `branching`, `delegation` and `compaction`, `evaluation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.section import Needs, Section, resumable
from agentrl.plugins import parts
from agentrl.records.paths import pattern_error
from agentrl.records.sampling import MAX_TOP_K, Sampling

SUITE_FAMILY = "agentrl.evaluation.suite_tasks:SuiteTasks"
"""The task family of an evaluation on suites. Its cases are sampled with the settings of `evaluation`; there are no held-out tasks."""
_HELD_OUT = Needs("held-out tasks: set evaluation.heldout or heldout_real", lambda recipe, own: own.heldout or own.heldout_real)
_EVALUATED = Needs(
    "held-out tasks or a gate: set evaluation.heldout, heldout_real or gate",
    lambda recipe, own: own.heldout or own.heldout_real or recipe.gate is not None or recipe.tasks.family == SUITE_FAMILY,
)
_BETWEEN = Needs(
    "a step between the first and the last to evaluate after: set it below steps", lambda recipe, own: own.every < recipe.steps
)
_COLDEST = 0.01  # vLLM samples at this temperature where a lower one above 0 is asked for


def _off_by_none(value: Any, field: ValidationInfo) -> Any:
    """None switches a way of truncating off."""
    return {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[str(field.field_name)] if value is None else value


class BranchingConfig(Section):
    """Groups as forests: some attempts run to a turn, and from the state of each, files and context, others go on."""

    turn: int = Field(1, ge=1)
    """The attempts part after this turn. One that ends before has nothing to part from: attempts of their own fill the group."""
    branches: int = Field(2, ge=2)
    """Attempts that go on from one state, the one that came there included; rollout.group_size is a multiple of it."""


class DelegationConfig(Section):
    """What sub-agents may be started by `rollout.agent=delegating`, and what each of them has. docs/agents.md says how they work."""

    depth: Annotated[
        int, Needs("a sub-agent for each level: set total to at least as many", lambda recipe, own: own.depth <= own.total)
    ] = Field(1, ge=1, le=8)
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
    sandbox: Literal["shared", "own"] = "shared"
    """Where sub-agents work. shared: in the sandbox of their episode, side by side on its files. own: each in a sandbox of its own, of the
    task's spec, which begins with a copy of its caller's working directory and ends with it."""
    returns: tuple[str, ...] = ()
    """Patterns of files, such as out/**, that come back from a sandbox of a sub-agent's own: they are put into a folder of its caller's
    working directory, helper-1 for trajectory 1, which its answer names. Patterns and bounds are those of a task's outputs."""

    @property
    def at_once(self) -> int:
        """Most sub-agents of one episode that are at work at the same time."""
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
            raise ValueError(f"width does nothing above total: no turn can start {self.width} sub-agents when an episode has {self.total}")
        if self.returns and self.sandbox == "shared":
            raise ValueError("returns does nothing with sandbox=shared, where the files of all agents are the same: set sandbox=own")
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
    instructions: str | None = Field(None, min_length=1)
    """What the main agent is told first, in place of the system messages of its task; None: as the task says. docs/tools.md says how two
    wordings are compared."""
    group_size: int = Field(8, ge=1)
    """Attempts at one task; they share a baseline."""
    groups_per_step: int = Field(16, ge=1)
    """Tasks in one learner step."""
    spare_attempts: int = Field(0, ge=0)
    """Attempts that each group begins beyond group_size, so that it need not wait for its slowest: when group_size of them count, the rest
    are cancelled. Episodes that end early are then preferred: docs/objectives.md says what that does."""
    stop_equal_after: int = Field(0, ge=0)
    """Attempts of a group that begin first; where so many count and all score the same, the others are not begun. This saves hopeless
    groups, at the price of rare successes: docs/objectives.md says how much of which. 0: all attempts begin at once."""
    extra_groups: int = Field(0, ge=0)
    """Groups that a step may have beyond these: one is made for each whose attempts all score the same, which teaches nothing. 0: a step
    trains on what is left."""
    concurrency: int = resumable(64, ge=1)
    """Episodes in flight at once."""
    max_cache_use: float = resumable(0.9, gt=0, le=1)
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
    max_retries: int = resumable(2, ge=0)
    """Fresh attempts after an infrastructure failure, before the episode is left out."""
    min_group_size: int = Field(2, ge=1)
    """A group with fewer counted episodes is dropped."""
    max_quarantined: int = resumable(8, ge=0)
    """Broken tasks that are quarantined, and their groups left out, before the run stops with their list."""
    max_fault_rate: float = resumable(0.5, ge=0, le=1)
    """Largest share of the newest attempts (four times `concurrency`, at least 64) that may fail by no doing of the policy before the
    run pauses and says why. 1: it never does."""
    checkpoint_turns: bool = resumable(False)
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
        if self.instructions is not None and self.agent not in parts.AGENT.shipped:
            raise ValueError("instructions do nothing with an agent of your own: hand them on in agent_options")
        return self

    @property
    def agent_settings(self) -> dict[str, Any]:
        """Keyword arguments of the agent, beside `chat`."""
        if self.agent not in parts.AGENT.shipped:
            return dict(self.agent_options)
        settings: dict[str, Any] = {} if self.compaction is None else {"compaction": self.compaction}
        settings |= {} if self.instructions is None else {"instructions": self.instructions}
        return settings | ({"delegation": self.delegation or DelegationConfig()} if self.agent == "delegating" else {})

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, supports=self.top_k > 0)

    @model_validator(mode="after")
    def _first_ones_can_differ(self) -> RolloutConfig:
        first, fewest = self.stop_equal_after, max(2, self.min_group_size)
        if first and not fewest <= first < self.group_size:
            raise ValueError(
                f"stop_equal_after={first} stops no group that could have gone on: give at least {fewest} attempts (two can differ, and"
                f" min_group_size of them must count) and fewer than group_size={self.group_size}, or 0"
            )
        if first and self.branching is not None:
            raise ValueError("stop_equal_after does not go with branching: a branch begins when its stem is there; leave one of them out")
        return self

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


class EvalConfig(Section):
    """Evaluation before and after training: same tasks, same sandboxes, same verifier."""

    heldout: int = Field(160, ge=0)
    """Held-out tasks in each evaluation."""
    heldout_real: int = Field(96, ge=0)
    """Held-out tasks on real data in each evaluation."""
    attempts: Annotated[int, _HELD_OUT] = Field(1, ge=1, le=1024)
    """Attempts at each of these tasks. With more than one there is pass@k, too, and success against compute for several attempts."""
    thinking_tokens: Annotated[tuple[int, ...], _HELD_OUT] = Field((), max_length=16)
    """Bounds on what may be thought in a turn: with each of them the held-out tasks are played once more, and the report draws success
    against compute over these bounds. The rates are those of the tasks' own limits. Empty: nothing is played again."""
    temperature: Annotated[float, _EVALUATED] = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, _EVALUATED] = Field(0, ge=0)
    """Only the so many likeliest tokens are sampled; 0 (or None): off."""
    top_p: Annotated[float, _EVALUATED] = Field(1.0, gt=0, le=1)
    """Only the fewest likeliest tokens that together have this probability; 1: off."""
    min_p: Annotated[float, _EVALUATED] = Field(0.0, ge=0, lt=1)
    """Only tokens with at least this share of the likeliest one's probability; 0: off."""
    every: Annotated[int, _HELD_OUT, _BETWEEN] = Field(0, ge=0)
    """Also evaluate after every so many steps; 0: only before and after."""

    _off = field_validator("top_k", "top_p", "min_p", mode="before")(_off_by_none)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @model_validator(mode="after")
    def _every_key_acts(self) -> EvalConfig:
        if any(most < 1 for most in self.thinking_tokens) or len({*self.thinking_tokens}) < len(self.thinking_tokens):
            raise ValueError("thinking_tokens must be positive, and each bound is given once")
        if 0 < self.temperature < _COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_COLDEST:g}: vLLM samples colder ones at {_COLDEST:g}")
        if self.temperature == 0 and self.attempts > 1:
            raise ValueError("attempts does nothing at temperature=0, where all attempts at a task are alike: leave one of them off")
        if self.temperature == 0 and self.sampling.truncated:
            raise ValueError("top_k, top_p and min_p do nothing at temperature=0, where the likeliest token is taken: leave them off")
        return self
