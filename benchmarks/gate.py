"""Simulates how often the gate blocks an unchanged policy, and one whose pass rate dropped by ten points.

    python benchmarks/gate.py
    python benchmarks/gate.py --cases 100 --repeats 8 --evaluations 1000 --json

Policies are simulated with a known true pass rate per case, so it is known whether a block is a false alarm. The rule is that of runs
(`agentrl.gate.rule`). Prints a Markdown table, and how often a rule with zero tolerance would block an unchanged policy.
The exit status is 1 if an unchanged policy is blocked in significantly more than `--alpha` of the evaluations, or if a drop of ten points
is detected less often than stated for the settings of the first row.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.evaluation.comparison import Scores
from agentrl.gate.rule import GateRule, RuleResult, apply_rule, cases_to_retry
from benchmarks import stored

STATED = {"0.95 -> 0.85 in every case": 0.8, "a tenth of the cases lost, 0.95 elsewhere": 0.95}
"""Power for a drop of ten points with 50 cases, 4 repeats, 24 further attempts and alpha 0.05. The table has the other scenarios."""

Rates = tuple[list[float], list[float]]


def policies(cases: int) -> dict[str, Rates]:
    """Returns scenarios: name -> true pass rates of all cases, of the baseline and of the candidate."""
    mixed = [(1.0, 0.95, 0.8, 0.5, 0.05)[place % 5] for place in range(cases)]
    tenth = max(1, cases // 10)
    return {
        "unchanged, 0.95": ([0.95] * cases, [0.95] * cases),
        "unchanged, 0.5": ([0.5] * cases, [0.5] * cases),
        "unchanged, from 0.05 to 1": (mixed, mixed),
        "0.95 -> 0.85 in every case": ([0.95] * cases, [0.85] * cases),
        "0.7 -> 0.6 in every case": ([0.7] * cases, [0.6] * cases),
        "a tenth of the cases lost, 0.95 elsewhere": ([0.95] * cases, [0.0] * tenth + [0.95] * (cases - tenth)),
        "one case lost, 0.95 elsewhere": ([0.95] * cases, [0.0] + [0.95] * (cases - 1)),
    }


def block_rate(rule: GateRule, before: Sequence[float], now: Sequence[float], *, evaluations: int, seed: int = 0) -> float:
    """Share of evaluations in which the candidate is blocked.

    The baseline passes case i with probability `before[i]`, the candidate with `now[i]`, attempt by attempt.
    """
    rng = random.Random(seed)
    blocked = sum(_evaluate(rule, _attempts(dict(enumerate(before)), rule.repeats, rng), now, rng)[0].blocked for _ in range(evaluations))
    return blocked / evaluations


def block_rate_in_a_run(rule: GateRule, rates: Sequence[float], *, evaluations: int, seed: int = 0) -> float:
    """Returns the share of blocked evaluations in a run of an unchanged policy, in which each promoted version is the next baseline."""
    rng, blocked = random.Random(seed), 0
    baseline = _attempts(dict(enumerate(rates)), rule.repeats, rng)
    for _ in range(evaluations):
        result, candidate = _evaluate(rule, baseline, rates, rng)
        blocked += result.blocked
        baseline = baseline if result.blocked else candidate
    return blocked / evaluations


def _evaluate(rule: GateRule, baseline: Scores, now: Sequence[float], rng: random.Random) -> tuple[RuleResult, Scores]:
    candidate = _attempts(dict(enumerate(now)), rule.repeats, rng)
    retried = cases_to_retry(rule, baseline, candidate)
    retried_scores = _attempts({int(case): now[int(case)] for case in retried}, rule.confirm, rng)
    return apply_rule(rule, baseline, candidate, retried_scores), candidate


def _attempts(rates: Mapping[int, float], tries: int, rng: random.Random) -> Scores:
    return {f"{case:05d}": [float(rng.random() < rate) for _ in range(tries)] for case, rate in rates.items()}


def most_by_chance(alpha: float, evaluations: int) -> float:
    """Returns the largest share of blocks that is consistent with a rate of `alpha`: mean plus three standard deviations."""
    return alpha + 3 * math.sqrt(alpha * (1 - alpha) / evaluations)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--confirm", type=int, default=24)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--evaluations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="also write the rates to docs/results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rule = GateRule(repeats=args.repeats, confirm=args.confirm, alpha=args.alpha)
    block_rates = {
        name: block_rate(rule, before, now, evaluations=args.evaluations, seed=args.seed)
        for name, (before, now) in policies(args.cases).items()
    }
    mixed, _ = policies(args.cases)["unchanged, from 0.05 to 1"]
    block_rates["unchanged, from 0.05 to 1, each promoted one the next baseline"] = block_rate_in_a_run(
        rule, mixed, evaluations=args.evaluations, seed=args.seed
    )
    standard = (args.cases, args.repeats, args.confirm, args.alpha) == (50, 4, 24, 0.05)
    most = most_by_chance(args.alpha, args.evaluations)
    wrong = [name for name, rate in block_rates.items() if name.startswith("unchanged") and rate > most]
    wrong += [name for name, least in STATED.items() if standard and block_rates[name] < least]
    zero = 1 - 0.95**args.cases
    if args.store:
        command = shlex.join(["python", "benchmarks/gate.py", *(word for word in sys.argv[1:] if word != "--store")])
        settings = {name: getattr(args, name) for name in ("cases", "repeats", "confirm", "alpha", "evaluations")}
        origin = stored.origin(command, ["agentrl/evaluation", "agentrl/gate", "benchmarks/gate.py"], [args.seed])
        stored.keep(f"gate-{args.cases}x{args.repeats}", origin, **settings, blocked=block_rates)
    if args.json:
        print(json.dumps({"blocked": block_rates, "zero_tolerance": zero, "wrong": wrong, **vars(args)}))
        return bool(wrong)
    print(f"{args.cases} cases, {args.repeats} repeats, {args.confirm} additional attempts, alpha {args.alpha:g};", end=" ")
    print(f"{args.evaluations} evaluations each, seed {args.seed}\n")
    print("| policy | blocked |\n| --- | --- |")
    for name, rate in block_rates.items():
        print(f"| {name} | {rate:.1%} |")
    print(f"\nZero tolerance, one attempt at each case, would block an unchanged policy of 0.95 in {zero:.1%} of the evaluations.")
    for name in wrong:
        print(f"not at the stated rate: {name}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
