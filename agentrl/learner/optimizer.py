"""Optimizer steps that skip gradients that are too large or not finite, and the learning rate schedule.

DeepSpeed computes the norm and applies the gradient in one call. At every ZeRO stage, DeepSpeed discards a gradient cleanly if the norm is
not finite, so `skip_steps_above` reports the norm of a gradient to skip as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentrl.config.recipe import LearnerConfig

BETAS = (0.9, 0.999)
EPS = 1e-8
RATE_SCALE = "rate_scale"  # key in a parameter group; its value is the ratio of the group's learning rate to that of the others


class GuardedAdamW(torch.optim.AdamW):
    """AdamW with global-norm clipping, for plain data parallelism (ZeRO stage 0), where DeepSpeed does not check gradients.

    Gradients are equal on all ranks when `step` is called, so all ranks make the same decision without communication. A step with a
    non-finite gradient norm changes neither weights nor moments: clipping would spread one NaN over all weights.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, max_norm: float, fused: bool | None = None) -> None:
        super().__init__(params, lr=lr, betas=BETAS, eps=EPS, fused=fused)
        self.max_norm = max_norm
        self.grad_norm = float("nan")  # of the latest step, before clipping
        self.skip_above = math.inf

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clips and applies the gradients, unless their norm is not finite or exceeds `skip_above`."""
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        self.grad_norm = norm.item()
        if not self.grad_norm <= self.skip_above or math.isinf(self.grad_norm):
            return
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        super().step(closure)


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Splits parameters into matrices, which decay, and vectors (norm weights, biases), which do not. Returns one group if `weight_decay`
    is 0. Empty groups are omitted."""
    parameters = list(parameters)
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups = (([p for p in parameters if p.dim() > 1], weight_decay), ([p for p in parameters if p.dim() <= 1], 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def learning_rate(learner: LearnerConfig, steps: float, step: int) -> float:
    """Returns the learning rate of step `step` (from 0). The rate rises linearly over `warmup_steps`, then follows `lr_schedule`.

    `steps`, the number of steps, may be infinite, except with `linear` and `cosine`.
    """
    warmup = learner.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / (warmup + 1)
    if learner.lr_schedule == "inverse_sqrt":
        return learner.lr * math.sqrt((warmup + 1) / (step + 1))
    done = (step - warmup) / max(1, steps - warmup)  # below 1, so the last step has a positive rate
    if learner.lr_schedule == "linear":
        return learner.lr * (1.0 - done)
    if learner.lr_schedule == "cosine":
        return learner.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return learner.lr


@contextmanager
def skip_steps_above(optimizer: Any, *, above: float) -> Iterator[list[float]]:
    """Context manager within which a ZeRO optimizer (stage 1, 2 or 3) skips a step whose gradient norm exceeds `above`.

    Yields a list to which the norm over all ranks, before clipping, is appended. The entry is NaN if the norm is not finite. The list stays
    empty if DeepSpeed detects an overflow before it computes the norm.
    """
    norms: list[float] = []
    name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"
    measure = getattr(optimizer, name)

    def limited(*args: Any, **kwargs: Any) -> Any:
        measured = measure(*args, **kwargs)
        norm = _combined(measured) / float(optimizer.loss_scale)
        norms.append(norm)
        if norm <= above:
            return measured
        return [_infinite(measured[0])] if isinstance(measured, list) else _infinite(measured)

    setattr(optimizer, name, limited)
    try:
        yield norms
    finally:
        delattr(optimizer, name)  # restores the class's method


def _infinite(like: Any) -> Any:
    return torch.full_like(like, math.inf) if torch.is_tensor(like) else math.inf


def _combined(measured: Any) -> float:
    """Returns the gradient norm of the model.

    Stage 3 reports one norm per group, the other stages a single norm. A negative number stands for a norm that is not finite.
    """
    values = [float(value) for value in (measured if isinstance(measured, list) else [measured])]
    return math.hypot(*values) if all(math.isfinite(value) and value >= 0 for value in values) else math.nan
