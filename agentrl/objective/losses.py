"""Surrogates of the policy gradient: each sampled token's contribution to the objective, before aggregation.

`ppo`, `gspo` and `cispo` are what a recipe's `objective.loss` names: each is an `agentrl.protocols.Loss`.

All tensors are [N], sampled tokens only. With A the advantage and r an importance ratio whose gradient is r * grad log pi, each
function returns the term to maximize and a mask of the tokens whose gradient its bound cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import PluginError
from agentrl.objective.aggregate import Segments
from agentrl.protocols import LossTokens

Surrogate = tuple[Tensor, Tensor]  # [N] to maximize, with gradient; [N] bool, True where the bound is active


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """`agentrl.protocols.LossTokens`."""

    log_ratio: Tensor  # [N]
    logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    sequence: Tensor  # [N]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    cap: float


def ppo(tokens: LossTokens) -> Surrogate:
    """`clip` of the ratio by token, with `dual_clip` where the recipe sets it."""
    ratio = token_ratio(tokens.log_ratio, tokens.cap)
    if tokens.dual_clip is None:
        return clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)
    return dual_clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high, bound=tokens.dual_clip)


def gspo(tokens: LossTokens) -> Surrogate:
    """`clip` of the ratio by sequence."""
    ratio = sequence_ratio(tokens.log_ratio, Segments.of(tokens.sequence), tokens.cap)
    return clip(ratio, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)


def cispo(tokens: LossTokens) -> Surrogate:
    """`clipped_weight`, which bounds itself."""
    return clipped_weight(tokens.log_ratio, tokens.logprobs, tokens.advantages, low=tokens.clip_low, high=tokens.clip_high)


def check_surrogate(made: object, tokens: LossTokens, name: str) -> Surrogate:
    """What a loss gave, if it is two tensors of the tokens' shape, the second of them bool. Raises `PluginError` naming the loss."""
    if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(one, Tensor) for one in made):
        wrong = f"a {type(made).__name__}" + (f" of {', '.join(type(one).__name__ for one in made)}" if isinstance(made, tuple) else "")
    elif made[0].shape != tokens.logprobs.shape or made[1].shape != tokens.logprobs.shape:
        wrong = f"shapes {list(made[0].shape)} and {list(made[1].shape)} for {list(tokens.logprobs.shape)} tokens"
    elif not made[0].dtype.is_floating_point or made[1].dtype is not torch.bool:
        wrong = f"types {made[0].dtype} and {made[1].dtype}"
    else:
        return made
    raise PluginError(
        f"objective.loss {name!r} gave {wrong}",
        fix="return two tensors, of a float and of a bool for each token: the term to be maximized, and where a bound cut the gradient off",
    )


def token_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """r_t = min(pi / pi_old, cap), whose derivative equals its value even where it is truncated.

    The cap acts where the clip does not: on a token with negative advantage whose ratio has grown. The gradient keeps its direction,
    with a weight of at most `cap`. Truncation: Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561.
    """
    value = log_ratio.detach().exp().clamp(max=cap)
    return value * (log_ratio - log_ratio.detach()).exp()


def sequence_ratio(log_ratio: Tensor, segments: Segments, cap: float) -> Tensor:
    """s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|) for every token of sequence i, truncated at `cap`.

    This is the form GSPO-token (eq. 13), whose token t carries the gradient s_i * grad log pi(y_t): for a sequence mean with equal
    advantages it is exactly GSPO's gradient, and advantages may differ between tokens. Zheng et al. 2025, arXiv:2507.18071.
    """
    value = segments.mean(log_ratio).exp().clamp(max=cap).to(log_ratio.dtype)
    return value * (log_ratio - log_ratio.detach()).exp()


def clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A).

    PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; the asymmetric range is DAPO's clip-higher, Yu et al. 2025, arXiv:2503.14476.
    With `sequence_ratio` this is GSPO.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bounded), (bounded < free).detach()


def dual_clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float, bound: float) -> Surrogate:
    """`clip`, bounded from below by bound * A for A < 0: max(min(r A, clip(r) A), bound A); `bound` above 1.

    A token with negative advantage that has become far more likely than when it was sampled stops contributing. Ye et al. 2019,
    arXiv:1912.09729, eq. 5.
    """
    inner, clipped = clip(ratio, advantages, low=low, high=high)
    floor = bound * advantages
    beyond = (advantages < 0) & (inner < floor)
    return torch.where(beyond, floor, inner), clipped | beyond.detach()


def clipped_weight(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, no token loses its gradient.

    CISPO, MiniMax 2025, arXiv:2506.13585, eq. 4 and 5; there without a lower bound (`low` = 1). True where the weight was clipped.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return weight * advantages * logprobs, weight != ratio
