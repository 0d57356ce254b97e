"""Combines the scores of several verifiers with weights, and adds the audit's scores.

The audit consists of verifiers that score every episode only for monitoring. Their values never become a reward. The part `audit` of a
score is the mean of the audit verifiers' values, and the parts `audit/NAME` are the individual values. If an audit verifier returns no
value, its part and the part `audit` are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.records import PendingPart, Score, ScoredEpisode, Task

AUDIT_PART = "audit"
_CONTRADICTS = 0.5  # an audit below this fraction of the reward contradicts the reward
_MAX_MESSAGE = 1000  # characters


def named_parts(scores: Mapping[str, Score]) -> dict[str, float]:
    """Returns the values of scores by name, and the parts of each score as NAME/PART."""
    parts = {name: score.value for name, score in scores.items() if score.value is not None}
    return parts | {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}


def weighted_turns(weighted: Sequence[tuple[float, Score]]) -> tuple[tuple[float, ...], ...]:
    """Returns the weighted sum of the scores' rewards for each turn; empty if no score has turn rewards.

    A score without turn rewards counts as zeros.
    """
    scaled = [[[weight * turn for turn in turns] for turns in score.turn_rewards] for weight, score in weighted if score.turn_rewards]
    return tuple(tuple(map(sum, zip(*turns, strict=True))) for turns in zip(*scaled, strict=True))


def weighted_pending(weighted: Sequence[tuple[float, Score]]) -> tuple[PendingPart, ...]:
    """Returns the pending parts of the scores, with their weights in the combined score."""
    return tuple(replace(part, weight=weight * part.weight) for weight, score in weighted for part in score.pending)


def add_branches(combined: Score, weighted: Sequence[tuple[float, Score]]) -> Score:
    """Adds to a combined score the weighted sums of the scores' values for single trajectories. The weights must sum to 1, and every score
    must have a value."""
    return replace(combined, branches=_weighted_branches(weighted, "branches"), without=_weighted_branches(weighted, "without"))


def _weighted_branches(weighted: Sequence[tuple[float, Score]], name: Literal["branches", "without"]) -> tuple[float | None, ...]:
    """Returns the weighted sum of the scores' values for each trajectory; empty if no score has such values.

    A score that has no value for a trajectory contributes its value for the episode.
    """
    by_score: list[tuple[float | None, ...]] = [getattr(score, name) for _, score in weighted]
    count = max(map(len, by_score), default=0)
    sums: list[float | None] = []
    for column in zip(*(values or (None,) * count for values in by_score), strict=True):
        terms = [
            weight * ((score.value or 0.0) if value is None else value) for (weight, score), value in zip(weighted, column, strict=True)
        ]
        sums.append(None if all(value is None for value in column) else sum(terms))
    return tuple(sums)


def add_audit(score: Score, audits: Mapping[str, Score]) -> Score:
    """Adds the scores of the audit verifiers to the parts and the evidence of a score. `audits` maps a verifier's name to its score."""
    values = {name: audit.value for name, audit in audits.items() if audit.value is not None and math.isfinite(audit.value)}
    parts = {name: value for name, value in score.parts.items() if name != AUDIT_PART and not name.startswith(f"{AUDIT_PART}/")}
    parts |= {f"{AUDIT_PART}/{name}": value for name, value in values.items()}
    if values and len(values) == len(audits):
        parts[AUDIT_PART] = math.fsum(values.values()) / len(values)
    texts = [f"audit {name}: {audit.evidence or audit.reason}" for name, audit in audits.items() if audit.evidence or audit.reason]
    return replace(score, parts=parts, evidence="\n".join(filter(None, [score.evidence, *texts])))


def audit_contradiction(task: Task, scored: ScoredEpisode) -> str:
    """Returns a description of how the audit contradicts the score; empty if there is no contradiction or no audit.

    A score is contradicted if it is positive and reaches the task's threshold, but the audit is less than half of it. If the task has no
    threshold, a positive score is contradicted if the audit is less than half of it.
    """
    threshold = -math.inf if task.pass_threshold is None else task.pass_threshold
    value, audit = scored.score.value, scored.score.parts.get(AUDIT_PART)
    if value is None or audit is None or not is_at_least(value, threshold) or value <= 0 or is_at_least(audit, _CONTRADICTS * value):
        return ""
    evidence = "; ".join(line for line in scored.score.evidence.splitlines() if line.startswith("audit "))
    return user_code.printable(f"the audit is {audit:g}, but the reward is {value:g}{evidence and ': '}{evidence}", _MAX_MESSAGE)
