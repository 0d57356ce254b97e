"""The gate's rule, which decides whether a candidate is worse than the baseline on the suite or on a case.

One evaluation spends seven tenths of `alpha`, the allowed probability of a false alarm: half of it on the test of the suite, and half on
the tests of single cases. The rest is a reserve: a baseline with a lucky score stays in place as long as it blocks candidates, so false
alarms are more frequent over a run than in a single evaluation. A probability of 0.035 in each evaluation becomes 0.05 in the long run.

Suite: a one-sided sign-flip test of the case differences. A significant drop of the mean score by more than `margin` blocks the candidate.

Case: among many cases, some always look worse by chance. So cases that look worse are retried, and Fisher's one-sided test is applied to
all attempts of the candidate at the case. To block, a case must look worse in the first attempts too, and this additional condition can
only reduce the number of false alarms. Holm's correction counts all cases in the suite, whether retried or not. If no case has enough
attempts for a significant result, the test of the suite spends both halves.

A case may set a threshold. Such a case does not block a candidate whose mean score is at least the threshold, which is also an additional
condition. A case may also set its number of attempts. Whether a case can block a candidate depends only on the numbers of attempts, never
on scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.base.numbers import is_above
from agentrl.evaluation.comparison import Scores, pair_scores
from agentrl.evaluation.results import attempt_passes
from agentrl.evaluation.statistics import fisher_p_value, holm_rejections, sign_flip_test
from agentrl.records.fields import Record

_SPENT = 0.7
"""Share of `alpha` that one evaluation may spend."""
_LOOKS_WORSE = 0.1
"""Maximum one-sided p-value of the first attempts at which a case is retried."""
CASES_NAMED = 3
"""Maximum number of cases that a reason names, the clearest first; `RuleResult.regressed` contains all."""
MAX_RETRIED_CASES = 32
"""Maximum number of cases retried in one evaluation. The cases that look worst are chosen."""
_LEAST_PAIRED = 0.8
"""Minimum share of the baseline's cases that must be scored on both sides for a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule(Record):
    """Settings of the gate: see `agentrl.config.gate.GateConfig`."""

    repeats: int = 4
    confirm: int = 24
    alpha: float = 0.05
    margin: float = 0.0
    threshold: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)  # case -> threshold, for cases that have their own

    def can_block(self, cases: int, before: int, now: int) -> bool:
        """Whether a case with these numbers of attempts can block a candidate in a suite of `cases` cases.

        A case can block if a change from always passing to never passing would be significant.
        """
        best = fisher_p_value(0, now + self.confirm, before, before)
        return can_trigger_retry(before, now) and best <= self.case_alpha / cases

    def pass_threshold(self, case: str) -> float:
        """Returns the minimum score with which an attempt at a case passes."""
        return self.thresholds.get(case, self.threshold)

    @property
    def case_alpha(self) -> float:
        """The part of `alpha` that the tests of all cases together may spend."""
        return _SPENT * self.alpha / 2

    def suite_alpha(self, before: Scores, now: Scores) -> float:
        """Returns the part of `alpha` that the test for a drop of the mean over the suite may spend. If no case can block, this includes
        the part for the cases."""
        return self.case_alpha if _blocking_cases(self, before, now) else 2 * self.case_alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDrop(Record):
    """The passed and total attempts of the baseline and of the candidate at a retried case."""

    case: str
    before_passed: int
    before_tries: int
    passed: int
    tries: int
    p_value: float
    blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult(Record):
    """The result of applying the gate's rule to a candidate."""

    enough: bool  # False means that too few cases were scored on both sides for a decision
    blocked: bool
    suite_blocks: bool = False
    cases: int  # scored on both sides
    unscored: int  # pairs of attempts that one side did not score
    effect: float = 0.0  # mean over cases of the score now minus before
    p_value: float = 1.0  # one-sided p-value of the suite
    suite_alpha: float = 0.0
    again: tuple[CaseDrop, ...] = ()  # retried cases, the clearest drop first

    @property
    def regressed(self) -> tuple[CaseDrop, ...]:
        """The retried cases that block the candidate."""
        return tuple(drop for drop in self.again if drop.blocks)

    @property
    def reason(self) -> str:
        """The reason, in one line, why the candidate is blocked or too few cases were scored to decide; empty if it passes."""
        if not self.enough:
            return f"only {self.cases} cases were scored for both versions, too few to decide"
        reasons = []
        if self.suite_blocks:
            reasons.append(f"the suite's score fell by {-100 * self.effect:.1f} points (p = {self.p_value:.2g} <= {self.suite_alpha:g})")
        for drop in self.regressed[:CASES_NAMED]:
            before, now = f"{drop.before_passed} of {drop.before_tries} before", f"{drop.passed} of {drop.tries} now"
            reasons.append(f"case {drop.case}: {before}, {now} (p = {drop.p_value:.2g})")
        if (more := len(self.regressed) - CASES_NAMED) > 0:
            reasons.append(f"and {more} more {'case' if more == 1 else 'cases'}")
        return "; ".join(reasons)


def can_trigger_retry(before: int, now: int) -> bool:
    """Whether a case is retried if all of `before` attempts passed and none of `now` attempts passes.

    For example, a case is retried after 3 and 3 attempts.
    """
    return fisher_p_value(0, now, before, before) <= _LOOKS_WORSE


def cases_to_retry(rule: GateRule, before: Scores, now: Scores) -> tuple[str, ...]:
    """Returns the cases to retry: those that look worse than before and can block a candidate, the worst first.

    There are at most `MAX_RETRIED_CASES`, and none if `rule.confirm` is 0.
    """
    if not rule.confirm:
        return ()
    drops = [_drop(rule, case, before, now, {}) for case in _blocking_cases(rule, before, now)]
    worse = sorted((drop for drop in drops if drop.p_value <= _LOOKS_WORSE), key=lambda drop: (drop.p_value, drop.case))
    return tuple(drop.case for drop in worse[:MAX_RETRIED_CASES])


def apply_rule(rule: GateRule, before: Scores, now: Scores, again: Scores) -> RuleResult:
    """Decides whether the candidate's scores `now` are worse than the baseline's scores `before`.

    If fewer than 80% of the cases in `before` are scored in both evaluations, the result has `enough=False` and does not block the
    candidate.

    Args:
        before: scores of all planned attempts of the baseline at the cases of the suite; None means unscored.
        now: scores of the candidate's first attempts at the same cases; None means unscored.
        again: scores of the candidate's additional attempts at the cases that `cases_to_retry` returns.
    """
    both = pair_scores(before, now)
    pairs, unscored = both.pairs, both.unscored
    if not pairs or len(pairs) < _LEAST_PAIRED * len(before):
        return RuleResult(enough=False, blocked=False, cases=len(pairs), unscored=unscored)
    differences = [pair.difference for pair in pairs]
    effect, alpha = float(sum(differences) / len(pairs)), rule.suite_alpha(before, now)
    p_value = sign_flip_test(differences).low
    suite_blocks = p_value <= alpha and is_above(-effect, rule.margin)
    retried = set(cases_to_retry(rule, before, now)) & again.keys()
    drops = [_drop(rule, case, before, now, again) for case in sorted(retried)]
    rejected = holm_rejections([drop.p_value for drop in drops], rule.case_alpha, hypotheses=len(before))
    drops = [
        replace(drop, blocks=block and not _reaches_own_threshold(rule, drop.case, now, again))
        for drop, block in zip(drops, rejected, strict=True)
    ]
    drops.sort(key=lambda drop: (drop.p_value, drop.case))
    return RuleResult(
        enough=True,
        blocked=suite_blocks or any(drop.blocks for drop in drops),
        suite_blocks=suite_blocks,
        cases=len(pairs),
        unscored=unscored,
        effect=effect,
        p_value=p_value,
        suite_alpha=alpha,
        again=tuple(drops),
    )


def _blocking_cases(rule: GateRule, before: Scores, now: Scores) -> list[str]:
    """Returns the cases that have enough attempts to block a candidate."""
    return [case for case in before.keys() & now.keys() if rule.can_block(len(before), len(before[case]), len(now[case]))]


def _reaches_own_threshold(rule: GateRule, case: str, now: Scores, again: Scores) -> bool:
    scores = _scored(now[case], again.get(case, ()))
    return case in rule.thresholds and bool(scores) and attempt_passes(math.fsum(scores) / len(scores), rule.thresholds[case])


def _drop(rule: GateRule, case: str, before: Scores, now: Scores, again: Scores) -> CaseDrop:
    baseline, candidate = _scored(before[case]), _scored(now[case], again.get(case, ()))
    passed, before_passed = (sum(attempt_passes(score, rule.pass_threshold(case)) for score in scores) for scores in (candidate, baseline))
    return CaseDrop(
        case=case,
        before_passed=before_passed,
        before_tries=len(baseline),
        passed=passed,
        tries=len(candidate),
        p_value=fisher_p_value(passed, len(candidate), before_passed, len(baseline)),
    )


def _scored(*attempts: Sequence[float | None]) -> list[float]:
    return [score for scores in attempts for score in scores if score is not None]
