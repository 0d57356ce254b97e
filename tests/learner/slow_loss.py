"""A loss that is slow, like a first batch that compiles, and that can hang."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

_calls = 0


def slow(tokens: Any, *, seconds: float, stuck_at: int) -> tuple[Tensor, Tensor]:
    """The plain surrogate, `seconds` late. Call number `stuck_at` never returns: its process runs without making a step."""
    global _calls
    _calls += 1
    time.sleep(seconds)
    while _calls == stuck_at:
        time.sleep(0.01)
    surrogate: Tensor = tokens.log_ratio.exp() * tokens.advantages
    return surrogate, torch.zeros_like(surrogate, dtype=torch.bool)
