"""Drift alarms: what the figures of a run's steps say when the reward has stopped meaning what it should.

But for the jump, every rule compares the newest `WINDOW` steps that have its figures with the `WINDOW` before them. A figure has moved
when its two means differ by more than `SPREADS` standard errors (of a difference of means: Welch, Biometrika 1947) and by at least the
rule's own least difference, so that neither noise nor a trifle raises an alarm. A rule speaks at the step where it begins to hold, not
again while it goes on holding.

    reward-audit        mean reward rises while the audit falls
    reward-audit-jump   the same within two steps, and by much: a policy that finds a cheat may need no more
    length-audit        episodes grow longer by a fifth while the audit rises by less than `LEAST`
    disagreement        judges disagree more
    unscored            a larger share of the episodes gets no score
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

Steps = Sequence[Mapping[str, float]]
"""The figures of finished steps, oldest first; a figure that a step has none of is not in it."""

WINDOW = 6
SPREADS = 4.0
LEAST = 0.03  # of a score or a share
JUMP = 2  # steps on either side of a jump
LEAST_AT_ONCE = 0.25  # of a score: two steps say nothing of the spread
LONGER = 0.2  # of the length before
DISAGREEMENT = "judge_disagreement"


def drift_alerts(steps: Steps) -> list[str]:
    """What began with the newest of these steps, a sentence each with the rule's name."""
    return [f"drift ({name}): {text}" for name, rule in RULES.items() if (text := rule(steps)) and not rule(steps[:-1])]


def reward_against_audit(steps: Steps) -> str:
    reward, audit = _change(steps, "reward_mean"), _change(steps, "audit_mean")
    if reward is None or audit is None or not (reward.rose(LEAST) and audit.fell(LEAST)):
        return ""
    return f"the mean reward rose from {reward}, and the audit fell from {audit}: what is rewarded is no longer what is wanted"


def reward_left_audit(steps: Steps) -> str:
    reward, audit = _change(steps, "reward_mean", JUMP), _change(steps, "audit_mean", JUMP)
    if reward is None or audit is None or reward.by < LEAST_AT_ONCE or -audit.by < LEAST_AT_ONCE:
        return ""
    return f"within {2 * JUMP} steps the mean reward rose from {reward}, and the audit fell from {audit}: a cheat was found"


def length_against_audit(steps: Steps) -> str:
    length, audit = _change(steps, "completion_tokens_mean"), _change(steps, "audit_mean")
    if length is None or audit is None or not length.rose(LONGER * abs(length.before)) or audit.by >= LEAST:
        return ""
    return f"the tokens of an episode rose from {length}, and the audit hardly rose ({audit}): length may be what pays"


def judges_disagree(steps: Steps) -> str:
    change = _change(steps, DISAGREEMENT)
    if change is None or not change.rose(LEAST):
        return ""
    return f"the judges' disagreement rose from {change}: the policy may have found what one of them falls for"


def more_unscored(steps: Steps) -> str:
    change = _change(steps, "unscored_share")
    if change is None or not change.rose(LEAST):
        return ""
    return f"the share of episodes without a score rose from {change}: what cannot be judged is not learned from"


RULES: Mapping[str, Callable[[Steps], str]] = {
    "reward-audit": reward_against_audit,
    "reward-audit-jump": reward_left_audit,
    "length-audit": length_against_audit,
    "disagreement": judges_disagree,
    "unscored": more_unscored,
}


class _Change:
    """A figure's mean before and now, and how far apart chance would put them."""

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
    """Over the newest steps that have the figure; None before there are two whole windows of them."""
    known: list[float] = []
    for step in reversed(steps):
        value = step.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            known.append(value)
        if len(known) == 2 * window:
            return _Change(known[window:], known[:window])
    return None
