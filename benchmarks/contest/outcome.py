"""One run of one side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIDES = ("ours", "trl-together", "trl")
"""agentrl, TRL with the concurrent rollout function of `benchmarks.contest.together`, and unmodified TRL."""
PARTS = ("start", "rollout", "wait", "score", "update", "sync", "evaluation", "other")
"""Where a side's seconds go; docs/peers.md says what is counted where."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation: held-out success after `steps` steps and `clock_s` seconds of training since the start of the command."""

    step: int
    clock_s: float
    value: float
    ci_low: float
    ci_high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. `arrived_s` is None if it did not reach the target."""

    side: str  # of `SIDES`
    seed: int
    ended: str  # arrived | time | steps
    arrived_s: float | None
    clock_s: float  # seconds of training at the end
    steps: int
    curve: tuple[Point, ...]
    after: Point | None  # `agentrl eval` of the resulting model; None if the run wrote no model
    tokens_sampled: int
    tokens_trained: int
    episodes: int
    faults: int  # episodes excluded, or answered with an infrastructure fault
    peak_gib: float
    parts: dict[str, float]  # of `PARTS`, seconds
    machine: dict[str, Any] = field(default_factory=dict)  # `benchmarks.stored.machine` just before the run
    began: float = 0.0  # Unix seconds
    finished: float = 0.0

    @property
    def took_s(self) -> float:
        """Seconds to the target, or the time limit if it was not reached."""
        return self.clock_s if self.arrived_s is None else self.arrived_s

    @property
    def start_s(self) -> float:
        return self.parts.get("start", 0.0)
