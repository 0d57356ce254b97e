"""Checks each optimizer step against the recipe's limits. On a violation, skips the step, rolls back or halts.

All ranks check the same metrics (already summed over ranks), so they make the same decision without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.config.recipe import LearnerConfig
from agentrl.errors import LearnerHalted
from agentrl.records import Batch, Group
from agentrl.records.fields import Record, Text
from agentrl.version.rollback import BUDGET_STEPS, recent_steps

SKIP, ROLLBACK, HALT = "skip", "rollback", "halt"
_SEVERITY = (SKIP, ROLLBACK, HALT)
MAX_BAD_UPDATES = 3  # optimizer steps skipped in a row: one may be bad luck, three mean damaged weights or experience
MAX_ROLLBACKS = 2  # within `BUDGET_STEPS`: a third would repeat what failed twice, so the run halts instead
MAX_BAD_GROUPS = 16  # excluded within `BUDGET_STEPS`: finite numbers are the rule, so more indicate a fault in the verifier or the server
REFUSE_ALL = -1.0  # limit on the gradient norm that rejects every gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCounts(Record):
    """Counts of a run's setbacks; part of every checkpoint."""

    bad_in_a_row: int = 0  # optimizer steps of the policy skipped since the last applied one
    critic_bad_in_a_row: int = 0
    bad_groups: tuple[int, ...] = ()  # steps of the groups that were excluded within the last `BUDGET_STEPS` steps
    rollbacks: tuple[int, ...] = ()  # steps that were rolled back within the last `BUDGET_STEPS` steps
    undone: int = 0  # steps by which rollbacks have set back the schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFailure(Record):
    """A setback, such as a skipped group or optimizer step: a line in `failures/updates.jsonl`."""

    step: int
    action: str  # skip, rollback or halt
    what: str  # group; critic or policy for an optimizer step; gate or user for a requested rollback
    reasons: tuple[Text, ...]
    groups: tuple[int, ...]
    episodes: tuple[str, ...]
    metrics: Mapping[str, float | None]  # metrics of the optimizer step; None means not finite


class UpdateGuard:
    """Checks each optimizer step before its gradient is applied, and counts setbacks.

    `counts` is saved in the checkpoint, so a run that is resumed repeatedly still stops at its limits.
    """

    def __init__(self, learner: LearnerConfig, counts: FailureCounts = FailureCounts()) -> None:
        self.counts = counts
        self.rolling_back = False  # the current step must be undone
        self.start_weights_passed = False  # the weights at the start of the current step passed every check
        self._limits = {limit.metric: limit for limit in learner.limits if limit.action != "alert"}  # the driver raises alerts
        self._setbacks: list[UpdateFailure] = []
        self._checked = 0

    def begin_step(self) -> None:
        """Starts a new step."""
        self.rolling_back, self.start_weights_passed, self._checked = False, False, 0

    def take_failures(self) -> tuple[UpdateFailure, ...]:
        """Returns the setbacks since the last call."""
        setbacks, self._setbacks = tuple(self._setbacks), []
        return setbacks

    def exclude_groups(self, step: int, groups: Sequence[Group], dropped: Mapping[int, str]) -> int:
        """Records the groups that `assemble` dropped because of a non-finite value, and returns how many there are.

        Raises `LearnerHalted` once `MAX_BAD_GROUPS` groups have been dropped within `BUDGET_STEPS` steps.
        """
        bad = [group for group in groups if dropped.get(group.index, "").startswith("non_finite")]
        for group in bad:
            self._setbacks.append(
                UpdateFailure(
                    step=step,
                    action=SKIP,
                    what="group",
                    reasons=(dropped[group.index],),
                    groups=(group.index,),
                    episodes=tuple(scored.episode.id for scored in group.episodes),
                    metrics={},
                )
            )
        excluded = (*recent_steps(self.counts.bad_groups, step), *[step] * len(bad))
        self.counts = replace(self.counts, bad_groups=excluded)
        if bad and len(excluded) >= MAX_BAD_GROUPS:
            raise LearnerHalted(
                f"step {step}: {len(excluded)} groups were excluded within {BUDGET_STEPS} steps because a value was not finite;"
                " failures/updates.jsonl lists them. Look for a verifier that returns infinity, or a server with wrong logprobs"
            )
        return len(bad)

    def largest_norm(self, metrics: Mapping[str, float]) -> float:
        """Returns the largest gradient norm that may be applied, given the other metrics; negative if no gradient may be applied."""
        if self._violations(metrics):
            return REFUSE_ALL
        limit = self._limits.get("grad_norm")
        return math.inf if limit is None else limit.at

    def record_policy_step(self, part: Batch, metrics: Mapping[str, float], *, applied: bool) -> None:
        """Records an optimizer step of the policy. `metrics` include `grad_norm`, which may be NaN or infinite.

        Raises `LearnerHalted` if a limit demands a halt or a third rollback within `BUDGET_STEPS` steps, or if `MAX_BAD_UPDATES` steps in a
        row were skipped.
        """
        self.start_weights_passed = self.start_weights_passed or (applied and self._checked == 0)
        self._checked += 1
        if applied:
            self.counts = replace(self.counts, bad_in_a_row=0)
            return
        violations = self._violations(metrics)
        action = max((action for _, action in violations), key=_SEVERITY.index)
        reasons = tuple(reason for reason, _ in violations)
        rollbacks = recent_steps(self.counts.rollbacks, part.step)
        if action == ROLLBACK and len(rollbacks) >= MAX_ROLLBACKS:
            action = HALT
            reasons += (f"{len(rollbacks)} rollbacks occurred within {BUDGET_STEPS} steps, and at most {MAX_ROLLBACKS} are allowed",)
        self._setbacks.append(_setback(part, action, "policy", reasons, metrics))
        if action == HALT:
            raise LearnerHalted(
                f"step {part.step}: {'; '.join(reasons)}. The run stops before this update, with the weights of version {part.step}."
                " Resume it with different learner.limits, or see failures/updates.jsonl"
            )
        if action == ROLLBACK:
            self.rolling_back = True
            self.counts = replace(self.counts, rollbacks=(*rollbacks, part.step), bad_in_a_row=0)
            return
        self.counts = replace(self.counts, bad_in_a_row=self.counts.bad_in_a_row + 1)
        self._stop_at(self.counts.bad_in_a_row, part, "optimizer steps", reasons)

    def record_critic_step(self, part: Batch, metrics: Mapping[str, float], *, applied: bool) -> None:
        """Records an optimizer step of the critic. Raises `LearnerHalted` if `MAX_BAD_UPDATES` steps in a row were skipped."""
        if applied:
            self.counts = replace(self.counts, critic_bad_in_a_row=0)
            return
        reasons = ("the critic's gradient is not finite",)
        self._setbacks.append(_setback(part, SKIP, "critic", reasons, metrics))
        self.counts = replace(self.counts, critic_bad_in_a_row=self.counts.critic_bad_in_a_row + 1)
        self._stop_at(self.counts.critic_bad_in_a_row, part, "optimizer steps of the critic", reasons)

    def _stop_at(self, in_a_row: int, part: Batch, what: str, reasons: Sequence[str]) -> None:
        if in_a_row >= MAX_BAD_UPDATES:
            raise LearnerHalted(
                f"step {part.step}: {in_a_row} {what} in a row were skipped, the last because"
                f" {'; '.join(reasons)}. The weights are those of the last applied update. Lower learner.lr, loosen a limit, or look for"
                " damaged weights or experience: failures/updates.jsonl lists the episodes"
            )

    def _violations(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Returns a (reason, action) pair for each metric that is not finite or violates its limit. Missing metrics are not checked.

        NaN violates every limit on its metric.
        """
        violations = []
        if metrics.get("advantages_not_finite"):
            violations.append((f"{metrics['advantages_not_finite']:.0f} advantages are not finite", SKIP))
        for name, what in (("loss", "the loss is"), ("grad_norm", "the gradient is")):
            if not math.isfinite(metrics.get(name, 0.0)):
                violations.append((f"{what} not finite", SKIP))
        for metric, limit in self._limits.items():
            if metric not in metrics:
                continue
            value, bound = metrics[metric], f"its limit {limit.at:g} (learner.limits)"
            if math.isnan(value):
                violations.append((f"{metric} is not a number, so {bound} cannot be checked", limit.action))
            elif value < limit.at if limit.is_minimum else value > limit.at:
                violations.append((f"{metric} {value:.4g} is {'below' if limit.is_minimum else 'above'} {bound}", limit.action))
        return violations


def _setback(part: Batch, action: str, what: str, reasons: tuple[str, ...], metrics: Mapping[str, float]) -> UpdateFailure:
    return UpdateFailure(
        step=part.step,
        action=action,
        what=what,
        reasons=reasons,
        groups=part.group_indices,
        episodes=tuple(dict.fromkeys(sample.episode_id for sample in part.samples)),
        metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
    )
