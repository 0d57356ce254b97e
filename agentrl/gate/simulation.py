"""The gate on made-up policies whose true pass rates are known: how often it blocks one, by seeded simulation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from agentrl.evaluation.comparison import Scores
from agentrl.gate.rule import GateRule, RuleResult, apply_rule, cases_to_retry


def block_rate(rule: GateRule, before: Sequence[float], now: Sequence[float], *, evaluations: int, seed: int = 0) -> float:
    """Share of evaluations in which the candidate is blocked.

    The reference passes case i with probability `before[i]`, the candidate with `now[i]`, attempt by attempt.
    """
    rng, blocked = random.Random(seed), 0
    for _ in range(evaluations):
        reference = _tried(dict(enumerate(before)), rule.repeats, rng)
        blocked += _evaluated(rule, reference, now, rng)[0].blocked
    return blocked / evaluations


def block_rate_in_a_run(rule: GateRule, rates: Sequence[float], *, evaluations: int, seed: int = 0) -> float:
    """The same for a policy that never changes, evaluated again and again as in a run: whatever is promoted is the next reference."""
    rng, blocked = random.Random(seed), 0
    reference = _tried(dict(enumerate(rates)), rule.repeats, rng)
    for _ in range(evaluations):
        found, candidate = _evaluated(rule, reference, rates, rng)
        blocked += found.blocked
        reference = reference if found.blocked else candidate
    return blocked / evaluations


def _evaluated(rule: GateRule, reference: Scores, now: Sequence[float], rng: random.Random) -> tuple[RuleResult, Scores]:
    candidate = _tried(dict(enumerate(now)), rule.repeats, rng)
    named = cases_to_retry(rule, reference, candidate)
    again = _tried({int(case): now[int(case)] for case in named}, rule.confirm, rng)
    return apply_rule(rule, reference, candidate, again), candidate


def _tried(rates: Mapping[int, float], tries: int, rng: random.Random) -> Scores:
    return {f"{case:05d}": [float(rng.random() < rate) for _ in range(tries)] for case, rate in rates.items()}
