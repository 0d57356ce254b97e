"""The gate's rule: when a candidate is worse than the reference, on the suite or on a case, and an unchanged policy passes.

Two questions share the chance of a false alarm, half each. Together they spend seven tenths of `alpha`: a reference that was lucky is
kept while it refuses candidates, so in a run of many evaluations alarms come more often than in one. For a single exact test, repeated
with a reference that each candidate replaces when it passes, a chance of 0.035 each becomes 0.05 in the long run.

The suite: a one-sided sign-flip test of the case differences. One significant drop of more than `margin` blocks.

A case: attempts that went badly are no proof, since among many cases some always do. Cases that look worse are tried again, and the
test (Fisher's, one-sided) is of all the candidate's attempts together. Looking worse is a condition on top of that test, so it can
only make false alarms rarer; Holm's correction is over every case of the suite, tried again or not. With too few attempts for any
case to be significant, the suite has both halves.

A case may have a threshold of its own. An attempt at it has passed from there, and where the candidate's attempts still reach it on
average, what the case asks for holds, and it does not block: again a condition on top of the test. It may have attempts of its own
number, too. Whether it can be singled out follows from how often both versions were to try it, never from how that went.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.base.scores import is_above, is_at_least
from agentrl.evaluation.comparison import Scores, pair_scores
from agentrl.evaluation.exact import fisher_p_value, holm_rejections, sign_flip_test
from agentrl.records.fields import Record

_SPENT = 0.7
"""Share of `alpha` that one evaluation may spend."""
_LOOKS_WORSE = 0.1
"""One-sided p-value of the first attempts from which a case is tried again."""
CASES_NAMED = 3
"""Cases that a reason names, the clearest ones; `RuleResult.regressed` has all."""
MAX_RETRIED_CASES = 32
"""Cases that are tried again in one evaluation; of more, those that look worst."""
_PAIRED = 0.8
"""Share of the suite's cases that must be pairs, or nothing is concluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule(Record):
    """Settings of the gate: see `agentrl.config.gate.GateConfig`."""

    repeats: int = 4
    confirm: int = 24
    alpha: float = 0.05
    margin: float = 0.0
    threshold: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)  # of the cases that have one of their own

    def can_block(self, cases: int, before: int, now: int) -> bool:
        """Whether a case with these numbers of attempts can block in a suite of this size: whether the change from always passed to never
        passed would be significant."""
        best = fisher_p_value(0, now + self.confirm, before, before)
        return can_trigger_retry(before, now) and best <= self.case_alpha / cases

    def pass_threshold(self, case: str) -> float:
        """Score from which an attempt at a case has passed."""
        return self.thresholds.get(case, self.threshold)

    @property
    def case_alpha(self) -> float:
        """What the cases together may spend of `alpha`."""
        return _SPENT * self.alpha / 2

    def suite_alpha(self, before: Scores, now: Scores) -> float:
        """What the suite as a whole may spend of `alpha`: all, where no case can block."""
        return self.case_alpha if _nameable(self, before, now) else 2 * self.case_alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDrop(Record):
    """A case, before and now."""

    case: str
    before_passed: int
    before_tries: int
    passed: int
    tries: int
    p_value: float
    blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult(Record):
    """What the rule says of a candidate."""

    enough: bool  # False: too few cases were scored on both sides, and nothing is concluded
    blocked: bool
    suite_blocks: bool = False
    cases: int  # pairs
    unscored: int  # excluded attempts
    effect: float = 0.0  # mean score now minus before, over cases
    p_value: float = 1.0  # of the suite, one-sided
    suite_alpha: float = 0.0
    again: tuple[CaseDrop, ...] = ()  # cases that were tried again, the clearest first

    @property
    def regressed(self) -> tuple[CaseDrop, ...]:
        """The cases that block."""
        return tuple(one for one in self.again if one.blocks)

    @property
    def reason(self) -> str:
        """The reason for a block in one line, with the clearest cases; empty if nothing blocks."""
        if not self.enough:
            return f"only {self.cases} cases were scored for both versions, too few to judge"
        said = []
        if self.suite_blocks:
            said.append(f"the suite fell by {-100 * self.effect:.1f} points (p = {self.p_value:.2g} <= {self.suite_alpha:g})")
        said += [
            f"case {one.case}: {one.before_passed} of {one.before_tries} before, {one.passed} of {one.tries} now (p = {one.p_value:.2g})"
            for one in self.regressed[:CASES_NAMED]
        ]
        if (more := len(self.regressed) - CASES_NAMED) > 0:
            said.append(f"and {more} more {'case' if more == 1 else 'cases'}")
        return "; ".join(said)


def can_trigger_retry(before: int, now: int) -> bool:
    """Whether a case that always passed in so many attempts and now never does in so many would be tried again: with 3 and 3 it would."""
    return fisher_p_value(0, now, before, before) <= _LOOKS_WORSE


def cases_to_retry(rule: GateRule, before: Scores, now: Scores) -> tuple[str, ...]:
    """The cases that look worse and are worth trying again, the worst first; none where no case could block."""
    if not rule.confirm:
        return ()
    drops = [drop for case in _nameable(rule, before, now) if (drop := _drop(rule, case, before, now, {})).p_value <= _LOOKS_WORSE]
    return tuple(drop.case for drop in sorted(drops, key=lambda one: (one.p_value, one.case))[:MAX_RETRIED_CASES])


def apply_rule(rule: GateRule, before: Scores, now: Scores, again: Scores) -> RuleResult:
    """Whether `now` is worse than `before`.

    Args:
        before: the reference's attempts at every case of the suite, as many as were to be made; None where one has no score.
        now: the candidate's.
        again: the candidate's further attempts at the cases that `cases_to_retry` names.
    """
    both = pair_scores(before, now)
    pairs, unscored = both.pairs, both.unscored
    if not pairs or len(pairs) < _PAIRED * len(before):
        return RuleResult(enough=False, blocked=False, cases=len(pairs), unscored=unscored)
    differences = [pair.difference for pair in pairs]
    effect, share = float(sum(differences) / len(pairs)), rule.suite_alpha(before, now)
    p_value = sign_flip_test(differences).low
    suite_blocks = p_value <= share and is_above(-effect, rule.margin)
    looked = set(cases_to_retry(rule, before, now)) & again.keys()
    drops = [_drop(rule, case, before, now, again) for case in sorted(looked)]
    rejected = holm_rejections([drop.p_value for drop in drops], rule.case_alpha, hypotheses=len(before))
    found = [replace(drop, blocks=block and not _holds(rule, drop.case, now, again)) for drop, block in zip(drops, rejected, strict=True)]
    found.sort(key=lambda one: (one.p_value, one.case))
    return RuleResult(
        enough=True,
        blocked=suite_blocks or any(one.blocks for one in found),
        suite_blocks=suite_blocks,
        cases=len(pairs),
        unscored=unscored,
        effect=effect,
        p_value=p_value,
        suite_alpha=share,
        again=tuple(found),
    )


def attempt_passes(score: float | None, threshold: float) -> bool:
    """Whether an attempt with this score has passed."""
    return score is not None and is_at_least(score, threshold)


def _nameable(rule: GateRule, before: Scores, now: Scores) -> list[str]:
    """The cases that can block, by how often they were to be tried."""
    return [case for case in before.keys() & now.keys() if rule.can_block(len(before), len(before[case]), len(now[case]))]


def _holds(rule: GateRule, case: str, now: Scores, again: Scores) -> bool:
    """Whether the candidate's attempts still reach what a case asks for itself, on average."""
    scores = [score for score in (*now[case], *again.get(case, ())) if score is not None]
    return case in rule.thresholds and bool(scores) and attempt_passes(math.fsum(scores) / len(scores), rule.thresholds[case])


def _drop(rule: GateRule, case: str, before: Scores, now: Scores, again: Scores) -> CaseDrop:
    reference = [score for score in before[case] if score is not None]
    candidate = [score for score in (*now[case], *again.get(case, ())) if score is not None]
    counts = [sum(attempt_passes(score, rule.pass_threshold(case)) for score in scores) for scores in (candidate, reference)]
    p_value = fisher_p_value(counts[0], len(candidate), counts[1], len(reference))
    return CaseDrop(
        case=case, before_passed=counts[1], before_tries=len(reference), passed=counts[0], tries=len(candidate), p_value=p_value
    )
