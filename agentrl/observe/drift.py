"""Drift alerts: metrics of a run which show that the reward no longer measures what it should.

Each rule but the jump and the sample size compares the newest `WINDOW` steps that have its metrics with the `WINDOW` before them. A metric
has changed if the two means differ by more than `SPREADS` standard errors (of a difference of means: Welch, Biometrika 1947) and by the
least difference of the rule. A rule alerts at the first step where its condition holds, and not while it continues to hold.

    reward-audit        the mean reward rises while the audit falls
    reward-audit-jump   the same within two steps, by a large amount: a policy that has learned a cheat may need no longer
    length-audit        episodes become a fifth longer while the audit rises by less than `LEAST`
    disagreement        judges disagree more
    unscored            a larger share of the episodes gets no score
    sample-size         few tokens determine the update: the effective sample size (`ess`) is below `LEAST_ESS`. Its collapse precedes that
                        of the policy (VCPO, arXiv:2602.17616)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

Steps = Sequence[Mapping[str, float]]
"""The metrics of finished steps, the oldest first."""

WINDOW = 6
SPREADS = 4.0
LEAST = 0.03  # of a score or a share
JUMP = 2  # steps on either side of a jump
LEAST_AT_ONCE = 0.25  # of a score; two steps give no estimate of the spread
LONGER = 0.2  # relative to the length before
LEAST_ESS = 0.5  # share of the trained tokens
DISAGREEMENT = "judge_disagreement"


def drift_alerts(steps: Steps) -> list[str]:
    """The alerts of the newest step, one sentence each with the rule's name."""
    return [f"drift ({name}): {text}" for name, rule in RULES.items() if (text := rule(steps)) and not rule(steps[:-1])]


def reward_against_audit(steps: Steps) -> str:
    """Alerts if the mean reward rises while the audit falls."""
    reward, audit = _change(steps, "reward_mean"), _change(steps, "audit_mean")
    if reward is None or audit is None or not (reward.rose(LEAST) and audit.fell(LEAST)):
        return ""
    return f"the mean reward rose from {reward}, and the audit fell from {audit}: the reward no longer measures what you want"


def reward_left_audit(steps: Steps) -> str:
    """Alerts if the mean reward rises and the audit falls by a large amount within a few steps."""
    reward, audit = _change(steps, "reward_mean", JUMP), _change(steps, "audit_mean", JUMP)
    if reward is None or audit is None or reward.by < LEAST_AT_ONCE or -audit.by < LEAST_AT_ONCE:
        return ""
    return f"within {2 * JUMP} steps the mean reward rose from {reward}, and the audit fell from {audit}: it may have learned a cheat"


def length_against_audit(steps: Steps) -> str:
    """Alerts if episodes become longer while the audit hardly rises."""
    length, audit = _change(steps, "completion_tokens_mean"), _change(steps, "audit_mean")
    if length is None or audit is None or not length.rose(LONGER * abs(length.before)) or audit.by >= LEAST:
        return ""
    return f"the tokens of an episode rose from {length}, and the audit hardly rose ({audit}): the reward may depend on length"


def few_tokens_act(steps: Steps) -> str:
    """Alerts if the effective sample size of the newest update is small."""
    size = next((step["ess"] for step in reversed(steps) if "ess" in step), None)
    if size is None or size >= LEAST_ESS:
        return ""
    return (
        f"the effective sample size is {size:.2f} of the tokens, so few stale tokens determine the update: lower max_staleness or"
        " learner.lr, or bound the weights with objective.off_policy"
    )


def _rising_share(metric: str, text: str) -> Callable[[Steps], str]:
    """A rule that alerts if a metric between 0 and 1 rises. `text` has a place for its means."""

    def rule(steps: Steps) -> str:
        change = _change(steps, metric)
        return text.format(change) if change is not None and change.rose(LEAST) else ""

    return rule


RULES: Mapping[str, Callable[[Steps], str]] = {
    "reward-audit": reward_against_audit,
    "reward-audit-jump": reward_left_audit,
    "length-audit": length_against_audit,
    "disagreement": _rising_share(DISAGREEMENT, "the judges' disagreement rose from {}: the policy may be exploiting one of them"),
    "unscored": _rising_share("unscored_share", "the share of episodes without a score rose from {}: the run does not learn from them"),
    "sample-size": few_tokens_act,
}


class _Change:
    """The mean of a metric before and now, with the standard error of the difference."""

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
    """Over the newest steps with the metric; None before two windows are complete."""
    known: list[float] = []
    for step in reversed(steps):
        value = step.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            known.append(value)
        if len(known) == 2 * window:
            return _Change(known[window:], known[:window])
    return None
