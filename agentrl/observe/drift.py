"""Drift alerts: changes in the metrics of a run that suggest that the reward no longer measures what it should.

The rules `reward-audit`, `length-audit` and `disagreement` compare the newest `WINDOW` steps that have the rule's metrics with the `WINDOW`
steps before them. A metric has changed if the two means differ by more than `SPREADS` standard errors of their difference (Welch,
Biometrika 1947) and by at least the rule's minimum difference. A rule alerts at the first step at which its condition holds, and not again
while the condition continues to hold.

    reward-audit        the mean reward rises while the audit falls
    reward-audit-jump   the mean reward rises and the audit falls by a large amount from two steps to the next two, because a policy may
                        learn to cheat that quickly
    length-audit        episodes become a fifth longer while the audit rises by less than `LEAST`
    disagreement        the judges disagree more than before
    exclusions          a larger share of the attempts fails with a fault that the policy may have provoked
    sample-size         a few tokens dominate the update: the effective sample size (`ess`) is below `LEAST_ESS`
                        (VCPO, arXiv:2602.17616). This rule misses most collapses; see docs/results.md

The rule for exclusions compares the attempts in the newest `WINDOW` steps with the earlier attempts in the newest `HISTORY` steps with a
one-sided Fisher exact test. Test number t in a run has the level `EXCLUSION_LEVEL` / (t (t + 1)). The levels add up to `EXCLUSION_LEVEL`,
so a run of any length with a constant share of exclusions alerts with at most that probability (union bound). The test treats attempts as
independent, so an outage, in which many attempts fail at once, also causes an alert.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from agentrl.config.learner import Limit

Steps = Sequence[Mapping[str, float]]
"""The metrics of finished steps, the oldest first."""

WINDOW = 6
HISTORY = 128
"""Number of newest steps that the rules read. The bound keeps the cost per step constant in long runs."""
SPREADS = 4.0
LEAST = 0.03  # minimum difference in a score or a share
JUMP = 2  # number of steps on either side of a jump
LEAST_AT_ONCE = 0.25  # minimum difference in a score; two steps are too few to estimate the spread
LONGER = 0.2  # minimum increase relative to the earlier length
LEAST_ESS = 0.5  # minimum effective sample size as a share of the trained tokens
DISAGREEMENT = "judge_disagreement"
EXCLUSION_LEVEL = 0.01


def drift_alerts(steps: Steps) -> list[str]:
    """Returns the drift alerts for the newest step. Each alert is one sentence that contains the name of the rule."""
    return [f"drift ({name}): {text}" for name, rule in RULES.items() if (text := rule(steps)) and not rule(steps[:-1])]


def limit_alerts(steps: Steps, limits: Sequence[Limit]) -> list[str]:
    """Returns the alerts for the newest step from `learner.limits` with action=alert: one for each metric that starts to violate its
    limit. `steps` must not be empty."""

    def violated(step: Mapping[str, float], limit: Limit) -> bool:
        value = step.get(limit.metric)
        return value is not None and (value < limit.at if limit.is_minimum else value > limit.at)

    return [
        f"{limit.metric} is {steps[-1][limit.metric]:g}, beyond its limit {limit.at:g} (learner.limits)"
        for limit in limits
        if limit.action == "alert" and violated(steps[-1], limit) and not any(violated(step, limit) for step in steps[-2:-1])
    ]


def past_alerts(steps: Steps, *, newest: int | None = None, limits: Sequence[Limit] = ()) -> Iterator[tuple[int, str]]:
    """Yields pairs (step, alert) for the drift and limit alerts of the newest `newest` steps (None means all), the oldest first."""
    for end in range(1 if newest is None else max(1, len(steps) + 1 - newest), len(steps) + 1):
        window = steps[max(0, end - HISTORY) : end]
        yield from ((int(window[-1]["step"]), text) for text in (*drift_alerts(window), *limit_alerts(window, limits)))


def reward_against_audit(steps: Steps) -> str:
    """Returns an alert if the mean reward rises while the mean audit score falls; otherwise ""."""
    reward, audit = _change(steps, "reward_mean"), _change(steps, "audit_mean")
    if reward is None or audit is None or not (reward.rose(LEAST) and audit.fell(LEAST)):
        return ""
    return f"the mean reward rose from {reward} while the audit fell from {audit}: the reward no longer measures what you want"


def reward_left_audit(steps: Steps) -> str:
    """Returns an alert if the reward rises and the audit falls by `LEAST_AT_ONCE` or more from `JUMP` steps to the next `JUMP`; otherwise
    ""."""
    reward, audit = _change(steps, "reward_mean", JUMP), _change(steps, "audit_mean", JUMP)
    if reward is None or audit is None or reward.by < LEAST_AT_ONCE or -audit.by < LEAST_AT_ONCE:
        return ""
    return (
        f"from {JUMP} steps to the next {JUMP}, the mean reward rose from {reward} while the audit fell from {audit}:"
        " the policy may be exploiting the reward"
    )


def length_against_audit(steps: Steps) -> str:
    """Returns an alert if episodes become longer while the mean audit score hardly rises; otherwise ""."""
    length, audit = _change(steps, "completion_tokens_mean"), _change(steps, "audit_mean")
    if length is None or audit is None or not length.rose(LONGER * abs(length.before)) or audit.by >= LEAST:
        return ""
    return f"the tokens per episode rose from {length}, but the audit hardly rose ({audit}): the reward may depend on length"


def judges_disagree(steps: Steps) -> str:
    """Returns an alert if the mean disagreement between the judges rises; otherwise ""."""
    change = _change(steps, DISAGREEMENT)
    if change is None or not change.rose(LEAST):
        return ""
    return f"the judges' disagreement rose from {change}: the policy may be exploiting one of them"


def few_tokens_act(steps: Steps) -> str:
    """Returns an alert if the effective sample size of the newest update is below `LEAST_ESS`; otherwise ""."""
    size = next((step["ess"] for step in reversed(steps) if "ess" in step), None)
    if size is None or size >= LEAST_ESS:
        return ""
    return (
        f"the effective sample size is {size:.2f} of the tokens, so a few stale tokens dominate the update: lower max_staleness or"
        " learner.lr, or bound the weights with objective.off_policy"
    )


def exclusions_rose(steps: Steps) -> str:
    """Returns an alert if the share of attempts with policy-reachable faults is significantly higher in the newest `WINDOW` steps
    than in the steps before them; otherwise ""."""
    known = [
        (step["excluded_policy_reachable"], step["attempts_ended"]) for step in steps if step.get("excluded_policy_reachable") is not None
    ]
    counts = [(round(share * ended), int(ended)) for share, ended in known]
    newest = len(counts) - WINDOW
    if newest < 1:
        return ""
    (faults, attempts), (earlier_faults, earlier) = (
        tuple(map(sum, zip(*part, strict=True))) for part in (counts[newest:], counts[:newest])
    )
    tests = max(newest, int(steps[-1].get("step", 0)) - WINDOW)  # number of tests so far in the run
    if fisher_p_value(faults, attempts, earlier_faults, earlier) > EXCLUSION_LEVEL / (tests * (tests + 1)):
        return ""
    return (
        f"{faults} of the newest {attempts} attempts ended with a fault that the policy may have caused, compared with"
        f" {earlier_faults} of {earlier} before: the policy may have learned to avoid bad scores. `agentrl failures` shows the episodes"
    )


def fisher_p_value(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """Returns the one-sided p-value of Fisher's exact test (1922) for a larger share of hits in `n` trials than in `other_n` trials."""
    total, everything = hits + other_hits, n + other_n

    def log_choose(all_: int, some: int) -> float:
        return math.lgamma(all_ + 1) - math.lgamma(some + 1) - math.lgamma(all_ - some + 1)

    possible = range(max(hits, total - other_n), min(n, total) + 1)
    terms = (log_choose(total, k) + log_choose(everything - total, n - k) for k in possible)
    return min(1.0, math.fsum(math.exp(term - log_choose(everything, n)) for term in terms))


RULES: Mapping[str, Callable[[Steps], str]] = {
    "reward-audit": reward_against_audit,
    "reward-audit-jump": reward_left_audit,
    "length-audit": length_against_audit,
    "disagreement": judges_disagree,
    "exclusions": exclusions_rose,
    "sample-size": few_tokens_act,
}


class _Change:
    """The mean of a metric in an earlier window and in the newest window, with the standard error of the difference."""

    def __init__(self, before: Sequence[float], now: Sequence[float]) -> None:
        self.before, self.now = statistics.fmean(before), statistics.fmean(now)
        self._error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(now) / len(now))

    @property
    def by(self) -> float:
        return self.now - self.before

    def rose(self, least: float) -> bool:
        return self.by >= least and self.by > SPREADS * self._error

    def fell(self, least: float) -> bool:
        return -self.by >= least and -self.by > SPREADS * self._error

    def __str__(self) -> str:
        return f"{self.before:.3g} to {self.now:.3g}"


def _change(steps: Steps, name: str, window: int = WINDOW) -> _Change | None:
    """Returns the change between the two newest windows of steps that have the metric; None if there are not enough such steps."""
    known: list[float] = []
    for step in reversed(steps):
        value = step.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            known.append(value)
        if len(known) == 2 * window:
            return _Change(known[window:], known[:window])
    return None
