"""A veto between a gradient's norm and its use.

DeepSpeed computes the norm and applies the gradient in one call, and knows one way to throw a gradient away cleanly, whatever the
stage and wherever it is kept: the norm is not a number. A gradient that is refused takes that way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def veto(optimizer: Any, *, above: float) -> Iterator[list[float]]:
    """Inside, a step of this ZeRO optimizer (stage 1, 2 or 3) with a gradient norm over `above` is not made.

    Gives a list that holds the norm before clipping, of the whole model over all ranks, once a step was tried; NaN when it is not finite.
    """
    norms: list[float] = []
    name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"
    measure = getattr(optimizer, name)

    def judged(*args: Any, **kwargs: Any) -> Any:
        found = measure(*args, **kwargs)
        norm = _combined(found) / float(optimizer.loss_scale)
        norms.append(norm)
        if norm <= above:
            return found
        return [_infinite(found[0])] if isinstance(found, list) else _infinite(found)

    setattr(optimizer, name, judged)
    try:
        yield norms
    finally:
        delattr(optimizer, name)  # the class's own shows again


def _infinite(like: Any) -> Any:
    return torch.full_like(like, math.inf) if torch.is_tensor(like) else math.inf


def _combined(found: Any) -> float:
    """Stage 3 gives the norms of its groups, the others that of the model; a negative one stands for one that is not finite."""
    values = [float(value) for value in (found if isinstance(found, list) else [found])]
    return math.hypot(*values) if all(math.isfinite(value) and value >= 0 for value in values) else math.nan
