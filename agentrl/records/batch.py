"""Training samples, and the batch for one learner step."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record
from agentrl.records.sampling import Supports


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """One token sequence to train on. T is the number of tokens; entry t of every tuple describes token t.

    A sample has either advantages, or rewards from which a critic computes advantages.
    """

    episode_id: str
    group_index: int
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T] True if the policy sampled the token
    logprobs: tuple[float, ...]  # [T] behaviour logprobs, 0.0 where masked
    versions: tuple[int, ...]  # [T] policy version that sampled the token, -1 where masked
    advantages: tuple[float, ...] = ()  # [T] 0.0 where masked
    rewards: tuple[float, ...] = ()  # [T] reward at that token, 0.0 where masked
    supports: Supports | None = None  # [T] whole vocabulary for masked tokens; None means the whole vocabulary for all tokens
    rollout_tokens: int | None = None  # number of trained tokens in all samples of the episode; None if this is the only sample
    trajectory: int = 0  # index of the sample's trajectory in the episode
    continued_in: int | None = None  # index of the trajectory that continues the episode in a new context; used only with rewards
    last_state: tuple[int, ...] = ()  # see `Trajectory.last_state`; used only with rewards

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        n = len(self.token_ids)
        if self.supports is not None:
            self.supports.check("Sample", self.token_ids)
        if self.advantages and self.rewards:
            raise ValueError("Sample: give advantages or rewards, not both")
        for name in ("loss_mask", "logprobs", "versions", "rewards" if self.rewards else "advantages"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"Sample.{name} has {len(getattr(self, name))} entries for {n} tokens")
        if n and self.loss_mask[0]:
            raise ValueError("Sample: token 0 cannot be trained, because it has no context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Record):
    """The samples of one learner step on all ranks. `denominator` is the global number of trained tokens."""

    step: int
    samples: tuple[Sample, ...]
    denominator: int
    group_indices: tuple[int, ...]  # all groups that the step consumes, including groups without a sample
