"""The verbs of an update: what estimates advantages, and what a loss adds. `agentrl.protocols` hands them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageEstimator(Protocol):
    """How much better each attempt of a step did than others: a pure function of scores (`objective.advantage`).

    Args:
        groups: the scores of each group's attempts, after any KL penalty: at least `rollout.min_group_size` finite numbers, which may
            all be equal. Attempts that do not count, and groups that have too few that do, are left out.

    Returns the same shape: a finite float for each score, in its place. A group whose advantages are all 0 trains nothing; one that
    holds NaN or an infinity is left out. It runs on every rank of the learner and must give the same on all of them. Options of the
    recipe (`objective.advantage_options`) are further keyword arguments.
    """

    def __call__(self, groups: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]: ...


class LossTokens(Protocol):
    """What a loss is given: the N sampled tokens of a micro-batch, whole sequences. All tensors are float and [N]."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi(token) - log pi_old(token); carries the gradient. pi_old is what `objective.proximal` says."""
        ...

    @property
    def logprobs(self) -> Tensor:
        """log pi(token), nats, of the distribution that was sampled from: its temperature, its support; carries the gradient."""
        ...

    @property
    def advantages(self) -> Tensor:
        """Constants."""
        ...

    @property
    def sequence(self) -> Tensor:
        """int64: tokens with the same number are one sequence."""
        ...

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...

    @property
    def dual_clip(self) -> float | None: ...

    @property
    def cap(self) -> float:
        """Where a ratio that carries the gradient is truncated, `objective.is_cap`; infinite with `objective.correction=none`."""
        ...


class Loss(Protocol):
    """What each sampled token adds to the objective (`objective.loss`): a surrogate of the policy gradient.

    Returns two tensors [N]: the term to be maximized, differentiable and finite, and a bool that is True where a bound of the loss has
    cut the gradient off (`clip_fraction`, which limits may judge). Weights for off-policy tokens, KL, entropy and the aggregation
    over tokens are added by agentrl, so that they work with every loss. Tokens that the policy did not sample are not among the N. N
    may be 0. Options of the recipe (`objective.loss_options`) are further keyword arguments.
    """

    def __call__(self, tokens: LossTokens) -> tuple[Tensor, Tensor]: ...
