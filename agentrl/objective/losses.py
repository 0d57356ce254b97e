"""Per-token terms of the loss (surrogates, off-policy weights and the KL term) and their aggregation.

All tensors are [N], sampled tokens only. `ppo`, `gspo` and `cispo` are the values of `objective.loss` (`agentrl.protocols.Loss`). With A
the advantage and r an importance ratio whose gradient is r * grad log pi, each function returns the term to maximize and a mask of the
tokens whose gradient the function's bound removed.

The decoupled objective (Hilton et al. 2022, arXiv:2110.00641; for language models Fu et al. 2025, arXiv:2505.24298) clips around a
proximal policy pi_prox, the weights at the start of the step, and multiplies the surrogate by a weight for pi_prox / mu, with mu the
behaviour policy. Estimators of the divergence from the KL reference model, with d = log pi - log pi_ref in nats: Schulman 2020
(joschu.net/blog/kl-approx.html).

Terms l_t are aggregated with one denominator for the optimizer step:

    loss = sum_t c_t l_t / D

The weight c_t depends only on the token's rollout, and D is known before the first micro-batch, so micro-batches and ranks add up to
exactly the loss of one large batch.

| aggregation | c_t | D | |
| --- | --- | --- | --- |
| token_mean | 1 | trained tokens | every token counts the same: DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
| sequence_mean | 1 / tokens of the rollout | rollouts | every rollout counts the same: GRPO, arXiv:2402.03300, eq. 3 |
| constant | 1 | rollouts * length | no length bias in either direction: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |

A rollout is an attempt at a task with all its trajectories. In the papers, a rollout is a single sequence, hence the names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.config.objective import Correction, ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.protocols import LossTokens
from agentrl.records import Sample

Surrogate = tuple[Tensor, Tensor]  # [N] to maximize, with gradient; [N] bool, True where the bound is active
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """The built-in implementation of `agentrl.protocols.LossTokens`."""

    log_ratio: Tensor  # [N]
    logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    sequence: Tensor  # [N]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    cap: float

    @classmethod
    def from_config(cls, objective: ObjectiveConfig, **tensors: Any) -> LossInput:
        """Combines the four tensors with the clip bounds of the recipe."""
        bounds: dict[str, Any] = {"clip_low": objective.clip_low, "clip_high": objective.clip_high, "dual_clip": objective.dual_clip}
        return cls(**tensors, **bounds, cap=objective.ratio_cap)


def ppo(tokens: LossTokens) -> Surrogate:
    """Applies `clip` to the ratio of each token, or `dual_clip` if the recipe sets it."""
    ratio = token_ratio(tokens.log_ratio, tokens.cap)
    if tokens.dual_clip is None:
        return clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)
    return dual_clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high, bound=tokens.dual_clip)


def gspo(tokens: LossTokens) -> Surrogate:
    """Applies `clip` to the ratio of each sequence."""
    ratio = sequence_ratio(tokens.log_ratio, Segments.of(tokens.sequence), tokens.cap)
    return clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)


def cispo(tokens: LossTokens) -> Surrogate:
    """Applies `clipped_weight`."""
    return clipped_weight(tokens.log_ratio, tokens.logprobs, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)


def check_surrogate(result: object, tokens: LossTokens, name: str) -> Surrogate:
    """Returns a loss's result if it is a float tensor and a bool tensor of the tokens' shape. Otherwise, raises `PluginError`."""
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Tensor) for part in result):
        types = f" of {', '.join(type(part).__name__ for part in result)}" if isinstance(result, tuple) else ""
        wrong = f"a {type(result).__name__}{types}"
    elif result[0].shape != tokens.logprobs.shape or result[1].shape != tokens.logprobs.shape:
        wrong = f"shapes {list(result[0].shape)} and {list(result[1].shape)} for {list(tokens.logprobs.shape)} tokens"
    elif not result[0].dtype.is_floating_point or result[1].dtype is not torch.bool:
        wrong = f"types {result[0].dtype} and {result[1].dtype}"
    else:
        return result
    raise PluginError(
        f"objective.loss {name!r} returned {wrong}",
        fix="return two tensors with one entry per token: the term to maximize (float), and whether a bound removed its gradient (bool)",
    )


def token_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """Returns r_t = min(pi / pi_old, cap), whose derivative equals its value even if it is truncated.

    The cap acts where the clip does not: on a token with negative advantage whose ratio has grown. The gradient keeps its direction, with a
    weight of at most `cap`. Truncation: Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561.
    """
    value = log_ratio.detach().exp().clamp(max=cap)
    return value * (log_ratio - log_ratio.detach()).exp()


def sequence_ratio(log_ratio: Tensor, segments: Segments, cap: float) -> Tensor:
    """Returns s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|) for every token of sequence i, truncated at `cap`.

    This is GSPO-token (eq. 13): token t carries the gradient s_i * grad log pi(y_t). For a sequence mean with equal advantages, it
    is exactly GSPO's gradient, but advantages may differ between tokens. Zheng et al. 2025, arXiv:2507.18071.
    """
    value = segments.mean(log_ratio).exp().clamp(max=cap).to(log_ratio.dtype)
    return value * (log_ratio - log_ratio.detach()).exp()


def clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """Returns min(r A, clip(r, 1 - low, 1 + high) A).

    PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; the asymmetric range is DAPO's clip-higher, Yu et al. 2025, arXiv:2503.14476.
    With `sequence_ratio`, this is GSPO.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bounded), (bounded < free).detach()


def dual_clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float, bound: float) -> Surrogate:
    """Returns `clip`, bounded from below by bound * A for A < 0: max(min(r A, clip(r) A), bound A). `bound` is above 1.

    A token with negative advantage that has become far more likely since it was sampled stops contributing. Ye et al. 2019,
    arXiv:1912.09729, eq. 5.
    """
    inner, clipped = clip(ratio, advantages, low=low, high=high)
    floor = bound * advantages
    beyond = (advantages < 0) & (inner < floor)
    return torch.where(beyond, floor, inner), clipped | beyond.detach()


def clipped_weight(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """Returns sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, and no token loses its gradient.

    CISPO, MiniMax 2025, arXiv:2506.13585, eq. 4 and 5, which have no lower bound (`low` = 1). The mask marks clipped weights.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return weight * advantages * logprobs, weight != ratio


Estimator = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns d, which is unbiased and of either sign. The expected gradient of d on tokens sampled from pi is zero, so this estimator
    belongs in the reward."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns d^2 / 2, which is biased and never negative. The expected gradient of this estimator on tokens sampled from pi is that of
    KL(pi || pi_ref)."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns exp(-d) - 1 + d, which is unbiased and never negative: the term in GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4).

    The expected gradient of this estimator on tokens sampled from pi is that of the reverse divergence, KL(pi_ref || pi).
    """
    gap = reference - logprobs
    return gap.expm1() - gap  # for small gaps, exp(gap) - 1 would lose all float32 digits


def kl_term(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns one estimate per token, [N]. The gradient flows through `logprobs` only."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, reference.detach())


def sequence_penalty(behaviour: Tensor, reference: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Returns k1 summed over each sequence, float64 [count]; `objective.kl=k1_reward` subtracts `objective.kl_coef` times this sum from the
    score.

        s'_i = s_i - coef * sum_t (log mu(y_t) - log pi_ref(y_t))

    with mu the behaviour policy. Ouyang et al. 2022, arXiv:2203.02155; RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 4.
    `sequence` [N]: number of each token's sequence, in [0, count).
    """
    gap = k1(behaviour.double(), reference.double())
    return sum_segments(gap, sequence, count)


SECOND_MOMENT = 0.04
"""Largest mean of (log rho_t)^2 over the tokens of a batch that `second_moment` keeps, as in all experiments of arXiv:2510.01161."""


def second_moment_reach(log_ratio: Tensor, add: Callable[[Tensor], Tensor], *, at_most: float = SECOND_MOMENT) -> float:
    """Returns the largest |log rho| that `second_moment` keeps. The tokens with the largest |log rho| are masked until the mean square over
    the remaining tokens is at most `at_most`.

    The result is infinite if no token has to be masked. Tokens with the same |log rho| are masked together, so the result does not depend
    on their order. `log_ratio`: this rank's tokens [N]. `add`: sums a tensor over all ranks; every rank calls it the same number of times.
    """
    sizes, _ = log_ratio.detach().double().abs().sort()
    squares = sizes.square().cumsum(0)

    def exceeds(reach: float) -> bool:
        count = int(torch.searchsorted(sizes, reach, right=True))
        total, tokens = add(torch.tensor([squares[count - 1].item() if count else 0.0, count], dtype=torch.float64)).tolist()
        return bool(total > at_most * tokens)

    if not exceeds(math.inf):
        return math.inf
    low, high = 0, 0x7FF << 52  # bit patterns of 0 and infinity; those of non-negative floats are ordered like the floats
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeds(_float(middle)) else (middle, high)
    return _float(low)


def _float(bits: int) -> float:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    return float(value)


def importance_weights(log_ratio: Tensor, segments: Segments, correction: Correction, *, reach: float = math.inf) -> tuple[Tensor, Tensor]:
    """Returns weights [N] without gradient, and a mask of the truncated or masked ratios.

    With rho_t = pi_prox / mu of the token (`level` token) or the product of these ratios over its sequence (`level` sequence):

        truncate:  w = min(rho, cap)                         slightly biased, bounded variance
        mask:      w = rho if floor <= rho <= cap else 0     tokens too far off-policy are ignored
        second_moment:  w = min(rho, cap) if |log rho| <= `reach` else 0
        none:      w = 1                                     no correction

    Truncated: Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561. Masked token by token: IcePop, Ling Team 2025, arXiv:2510.18855.
    TRL calls truncation and masking, at both levels, the vLLM importance sampling correction. Second moment: M2PO, Zheng et al. 2025,
    arXiv:2510.01161, with `reach` from `second_moment_reach` over the batch. As in AReaL, `second_moment` masks tokens on both sides of 1;
    the authors' code masks only tokens on the side where PPO clips. `log_ratio`: [N] log pi_prox - log mu.
    """
    if correction.weights == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    whole = log_ratio.detach() if correction.level == "token" else segments.sum(log_ratio).to(log_ratio.dtype)
    ratio = whole.exp()
    if correction.weights == "truncate":
        return ratio.clamp(max=correction.cap), ratio > correction.cap
    if correction.weights == "second_moment":
        outside = whole.double().abs() > reach
        return ratio.clamp(max=correction.cap).masked_fill(outside, 0.0), outside | (ratio > correction.cap)
    outside = (ratio > correction.cap) | (ratio < correction.floor)
    return ratio.masked_fill(outside, 0.0), outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Assigns the tokens of a micro-batch to sequences."""

    index: Tensor  # [N] int64 in [0, S): the token's sequence
    tokens: Tensor  # [S] int64: trained tokens of each sequence

    @classmethod
    def of(cls, sequence: Tensor) -> Segments:
        """Returns the segments for sequence numbers [N], one per token; the numbers need not be consecutive."""
        _, index, tokens = torch.unique(sequence, return_inverse=True, return_counts=True)
        return cls(index=index, tokens=tokens)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over each token's sequence, float64 [N], without gradient."""
        return sum_segments(values.detach().double(), self.index, len(self.tokens))[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over each token's sequence, float64 [N], without gradient."""
        return self.sum(values) / self.tokens[self.index]


def sum_segments(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the sums [count] of the values [N] with equal `index` [N], added in order.

    The order is fixed, unlike `index_add_` on CUDA, so a resumed update is bitwise identical.
    """
    if not len(index):
        return values.new_zeros(count)
    lengths = torch.bincount(index, minlength=count)
    sums: Tensor = torch.segment_reduce(values[index.argsort(stable=True)], "sum", lengths=lengths)
    return sums


def token_weights(aggregation: Aggregation, segments: Segments, dtype: torch.dtype, *, rollout_tokens: Tensor | None = None) -> Tensor:
    """Returns c_t, [N]. `rollout_tokens`: trained tokens of each token's rollout, [N]; None means that every sequence is a rollout."""
    if aggregation == "sequence_mean":
        return (segments.tokens[segments.index] if rollout_tokens is None else rollout_tokens).to(dtype).reciprocal()
    return torch.ones_like(segments.index, dtype=dtype)


def loss_denominator(samples: Sequence[Sample], aggregation: Aggregation, *, length: int) -> float:
    """Returns D over all ranks and micro-batches of an optimizer step. `length` is the constant in tokens by which the `constant`
    aggregation multiplies the number of rollouts.

    D is 0.0 if the batch has no trained tokens. No optimizer step is performed for such a batch.
    """
    if aggregation == "token_mean":
        return float(sum(sum(sample.loss_mask) for sample in samples))
    rollouts = len({(sample.group_index, sample.episode_id) for sample in samples if any(sample.loss_mask)})
    return float(rollouts if aggregation == "sequence_mean" else rollouts * length)
