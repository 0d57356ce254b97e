"""A gate between the computation of a gradient's norm and its application.

DeepSpeed computes the norm and applies the gradient in one call. At every stage, offloaded or not, it discards a gradient
cleanly in one case: when the norm is not finite. The gate reports such a norm for a gradient that it refuses.
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

    Yields a list that receives the norm before clipping, over the whole model and all ranks, once a step was tried; NaN when not finite.
    """
    norms: list[float] = []
    name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"
    measure = getattr(optimizer, name)

    def gated(*args: Any, **kwargs: Any) -> Any:
        measured = measure(*args, **kwargs)
        norm = _combined(measured) / float(optimizer.loss_scale)
        norms.append(norm)
        if norm <= above:
            return measured
        return [_infinite(measured[0])] if isinstance(measured, list) else _infinite(measured)

    setattr(optimizer, name, gated)
    try:
        yield norms
    finally:
        delattr(optimizer, name)  # uncovers the class's own method


def _infinite(like: Any) -> Any:
    return torch.full_like(like, math.inf) if torch.is_tensor(like) else math.inf


def _combined(measured: Any) -> float:
    """Stage 3 gives one norm a group, the others the model's; a negative norm means that it is not finite."""
    values = [float(value) for value in (measured if isinstance(measured, list) else [measured])]
    return math.hypot(*values) if all(math.isfinite(value) and value >= 0 for value in values) else math.nan
