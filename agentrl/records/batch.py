"""Training samples and the batch of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record
from agentrl.records.sampling import Supports


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """One token sequence to train on. All tuples have the length of `token_ids`; position t describes token t.

    A sample has advantages, or the rewards of which a critic makes them: the other of the two is empty.
    """

    episode_id: str
    group_index: int
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T] True where the policy sampled the token
    logprobs: tuple[float, ...]  # [T] behaviour logprobs, 0.0 where masked
    versions: tuple[int, ...]  # [T] policy version that sampled the token, -1 where masked
    advantages: tuple[float, ...] = ()  # [T] 0.0 where masked
    rewards: tuple[float, ...] = ()  # [T] what the episode earned at that token, 0.0 where masked
    supports: Supports | None = None  # [T] those of masked tokens are the whole vocabulary; None: all are
    rollout_tokens: int | None = None  # trained tokens of all samples of its episode; None: it is the only one

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        n = len(self.token_ids)
        if self.supports is not None:
            self.supports.check("Sample", self.token_ids)
        if self.advantages and self.rewards:
            raise ValueError("Sample: advantages are given, or rewards for a critic, never both")
        for name in ("loss_mask", "logprobs", "versions", "rewards" if self.rewards else "advantages"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"Sample.{name} has {len(getattr(self, name))} entries for {n} tokens")
        if n and self.loss_mask[0]:
            raise ValueError("Sample: token 0 has no context, so it cannot be trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Record):
    """What one optimizer step consumes, over all ranks. `denominator` is the global count of trained tokens."""

    step: int
    samples: tuple[Sample, ...]
    denominator: int
    group_indices: tuple[int, ...]  # every group this step consumes, those without a sample included
