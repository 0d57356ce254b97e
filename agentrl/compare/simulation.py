"""The gate on made-up policies whose true pass rates are known: how often it blocks one, by seeded simulation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from agentrl.compare.paired import Scores
from agentrl.compare.rule import Judgement, Rule, judge, suspicious


def evaluate_once(rule: Rule, before: Sequence[float], now: Sequence[float], rng: random.Random) -> Judgement:
    """One evaluation: the reference passes case i with probability `before[i]`, the candidate with `now[i]`, attempt by attempt."""
    reference = _tried(dict(enumerate(before)), rule.repeats, rng)
    candidate = _tried(dict(enumerate(now)), rule.repeats, rng)
    named = suspicious(rule, reference, candidate)
    again = _tried({int(case): now[int(case)] for case in named}, rule.confirm, rng)
    return judge(rule, reference, candidate, again)


def block_rate(rule: Rule, before: Sequence[float], now: Sequence[float], *, evaluations: int, seed: int = 0) -> float:
    """Share of evaluations in which the candidate is blocked."""
    rng = random.Random(seed)
    return sum(evaluate_once(rule, before, now, rng).blocked for _ in range(evaluations)) / evaluations


def _tried(rates: Mapping[int, float], tries: int, rng: random.Random) -> Scores:
    return {f"{case:05d}": [float(rng.random() < rate) for _ in range(tries)] for case, rate in rates.items()}
