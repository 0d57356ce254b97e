"""Advantage estimators and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageEstimator(Protocol):
    """Computes advantages from scores: a pure function (`objective.advantage`).

    Args:
        groups: the scores of each group's attempts, after any KL penalty. Each group has at least `GroupConfig.min_size` finite numbers.
            Excluded attempts, and groups with too few attempts, are not included.

    Returns one finite float per score, in the same shape. A group whose advantages are all 0 does not contribute to training. A group with
    a NaN or infinite advantage is excluded. The function runs on every learner rank and must return the same values on all ranks.
    `objective.advantage.options` are passed as keyword arguments.
    """

    def __call__(self, groups: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Computes the advantages of one learner step."""
        ...


class LossTokens(Protocol):
    """The N sampled tokens of a micro-batch of complete sequences. All tensors have the shape [N]."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi(token) - log pi_old(token), with gradient. `objective.off_policy` selects pi_old."""
        ...

    @property
    def logprobs(self) -> Tensor:
        """log pi(token) in nats, with gradient, under the sampling distribution, that is, with its temperature and support."""
        ...

    @property
    def advantages(self) -> Tensor:
        """Advantages, without gradient."""
        ...

    @property
    def sequence(self) -> Tensor:
        """Sequence number of each token (int64). Tokens with the same number belong to one sequence."""
        ...

    @property
    def clip_low(self) -> float:
        """`objective.clip_low`."""
        ...

    @property
    def clip_high(self) -> float:
        """`objective.clip_high`."""
        ...

    @property
    def dual_clip(self) -> float | None:
        """`objective.dual_clip`."""
        ...

    @property
    def cap(self) -> float:
        """Maximum importance ratio that has a gradient, `objective.off_policy.cap`; infinite with the preset `none`."""
        ...


class Loss(Protocol):
    """A surrogate for the policy gradient: the contribution of each sampled token to the objective (`objective.loss`).

    Returns two tensors [N]: the term to maximize, differentiable and finite; and a bool that is True for tokens whose gradient a bound of
    the loss cut off (`clip_fraction`). agentrl adds off-policy weights, KL, entropy and the aggregation over tokens, so that they work with
    every loss. The N tokens include only tokens that the policy sampled. N may be 0. `objective.loss.options` are passed as keyword
    arguments.
    """

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """Computes the term and the clip flags of each token."""
        ...
