"""What several verifiers say together of the single trajectories of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from agentrl.records import Score


def weighted_branches(scores: Sequence[Score], weights: Sequence[float], name: Literal["branches", "without"]) -> tuple[float | None, ...]:
    """The weighted sum over verifiers, trajectory by trajectory, of what they say; empty when none says anything.

    One that says nothing of a trajectory stands by its value of the whole episode: it is worth that by itself, and would be worth that
    without it. None where no verifier says anything.

    Args:
        scores: each with a value.
        weights: one for each, which add up to 1.
    """
    given: list[tuple[float | None, ...]] = [getattr(score, name) for score in scores]
    return tuple(
        None
        if all(one[at] is None for one in given if one)
        else sum(weight * _value(score, one[at] if one else None) for score, weight, one in zip(scores, weights, given, strict=True))
        for at in range(max(map(len, given), default=0))
    )


def _value(score: Score, said: float | None) -> float:
    assert score.value is not None, "only scores with a value are combined"
    return score.value if said is None else said


def add_branches(made: Score, scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """A combined score with what its parts say of single trajectories."""
    some, theirs = list(scores.values()), [weights[name] for name in scores]
    return replace(made, branches=weighted_branches(some, theirs, "branches"), without=weighted_branches(some, theirs, "without"))
