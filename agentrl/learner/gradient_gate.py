"""Skips DeepSpeed optimizer steps whose gradient norm is too large.

DeepSpeed computes the norm and applies the gradient in one call. At every stage it discards a gradient cleanly if the norm is not
finite, so the norm of a gradient to skip is reported as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def skip_steps_above(optimizer: Any, *, above: float) -> Iterator[list[float]]:
    """Inside the context this ZeRO optimizer (stage 1, 2 or 3) skips a step whose gradient norm exceeds `above`.

    Yields a list that receives the norm before clipping, over all ranks; NaN if it is not finite.
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
    """The model's norm. Stage 3 reports one norm per group, the others a single one; a negative norm means that it is not finite."""
    values = [float(value) for value in (measured if isinstance(measured, list) else [measured])]
    return math.hypot(*values) if all(math.isfinite(value) and value >= 0 for value in values) else math.nan
