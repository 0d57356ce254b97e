"""Combines the scores of several judges. If the judges disagree too much, the episode is unscored."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.errors import InfrastructureError, UserError
from agentrl.judge.calibration import require_calibration, validate_requirements
from agentrl.judge.ledger import JudgeUsage
from agentrl.judge.query import digest
from agentrl.protocols import Verifier
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward.scorer import named_parts
from agentrl.reward.verifier_call import call_verifier, needs_sandboxes, prepare_verifier, timeout_of

_TIMEOUT_S = 30.0  # deadline of a member that declares none
_Aggregate = Literal["median", "mean", "majority"]
_OTHER_PARTS = ("", "disagreement", "judges")
_MAX_EVIDENCE = 2000  # maximum length of each member's evidence, in characters


@dataclass(slots=True)
class _State:
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ensemble:
    """A verifier that combines others: `Ensemble(judges={"a": one, "b": other, "c": third}, aggregate="median", max_disagreement=0.5)`.

    Members may be judges with different models and prompts, or any verifiers that need no sandboxes. The parts of the score are the scores
    of the members, and

        disagreement   the mean absolute difference over all pairs of members
        judges         the number of members with a score

    The episode is unscored, never 0, if fewer than `quorum` members returned a score, if the disagreement exceeds `max_disagreement`, or if
    a majority vote is tied. A missing quorum is blamed on the infrastructure if the scores of the members that were down would complete the
    quorum. Otherwise it is blamed on the task if the quorum would be complete with these scores and the scores of the members that reported
    a fault of the task, or else if it would be complete with those of the members that failed because of the episode's text, on the policy.
    """

    judges: dict[str, Verifier]
    aggregate: _Aggregate = "median"  # majority: scores of at least `threshold` are votes for 1, others for 0
    threshold: float = 0.5
    quorum: int | None = None  # None means more than half of the members
    max_disagreement: float = 0.5
    name: str = "ensemble"
    calibration: str | None = None  # calibration of the ensemble, not of its members; see `ModelJudge.calibration`
    min_agreement: float = 0.0
    min_coverage: float = 0.0
    _state: _State = field(default_factory=_State, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.judges) < 2 or any("/" in name or name in _OTHER_PARTS for name in self.judges):
            raise UserError(
                "an ensemble needs two or more judges; a name must not contain a slash, be empty, or be disagreement or judges",
                fix='write judges={"strict": a, "mild": b}',
            )
        if any(needs_sandboxes(judge) for judge in self.judges.values()):
            raise UserError("a verifier that needs sandboxes cannot be in an ensemble", fix="add it to tasks.verifiers instead")
        identities = [identity for judge in self.judges.values() if (identity := getattr(judge, "identity", ""))]
        if len(set(identities)) < len(identities):
            raise UserError(
                "two judges of an ensemble send the same prompts to the same model, so one would receive the other's cached answers",
                fix="use different seeds, or different revisions if servers with the same model name serve different weights",
            )
        if self.aggregate not in get_args(_Aggregate) or not math.isfinite(self.threshold):
            raise UserError(
                f"aggregate={self.aggregate!r} with threshold={self.threshold} cannot combine scores",
                fix=f"use one of {', '.join(get_args(_Aggregate))}, and a finite threshold",
            )
        if not 1 <= self._needed <= len(self.judges) or not self.max_disagreement >= 0:
            raise UserError(
                f"quorum must be from 1 to {len(self.judges)}, and max_disagreement at least 0;"
                f" got {self.quorum} and {self.max_disagreement}",
                fix="use values in these ranges",
            )
        validate_requirements(self.calibration, min_agreement=self.min_agreement, min_coverage=self.min_coverage)

    @property
    def identity(self) -> str:
        """Hash of the members' identities and the ensemble's settings; empty if a member has no identity."""
        members = {name: getattr(judge, "identity", "") for name, judge in self.judges.items()}
        settings: dict[str, Any] = {"aggregate": self.aggregate, "threshold": self.threshold, "quorum": self._needed}
        settings |= {"max_disagreement": self.max_disagreement, "members": members}
        return digest(settings) if all(members.values()) else ""

    @property
    def timeout_s(self) -> float:
        """Deadline of a verdict in seconds."""
        return max(timeout_of(judge, _TIMEOUT_S) for judge in self.judges.values()) + user_code.GRACE_S + 1.0

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares every member; see `ModelJudge.prepare`. Also raises `UserError` if a calibration is set and a member has no identity."""
        for judge in self.judges.values():
            prepare_verifier(judge, root=root, folder=folder)
        if self.calibration is not None:
            if not self.identity:
                raise UserError(
                    f"judge {self.name}: it has a member without an identity, so it cannot be calibrated", fix="remove the calibration"
                )
            demands = {"min_agreement": self.min_agreement, "min_coverage": self.min_coverage}
            require_calibration(root / self.calibration, identity=self.identity, name=self.name, **demands)
        self._state.ready = True

    def without_calibration(self, *, ledger: str | None = None) -> Self:
        """Returns a copy in which neither the ensemble nor a member requires a calibration, for measuring the ensemble."""
        members = {
            name: judge.without_calibration(ledger=ledger) if hasattr(judge, "without_calibration") else judge
            for name, judge in self.judges.items()
        }
        return replace(self, judges=members, calibration=None, min_agreement=0.0, min_coverage=0.0)

    def spent(self) -> JudgeUsage:
        """Returns the total usage of all members."""
        total = JudgeUsage()
        for judge in self.judges.values():
            if (spent := getattr(judge, "spent", None)) is not None:
                total = total.plus(spent())
        return total

    async def close(self) -> None:
        """Closes the members."""
        for judge in self.judges.values():
            if (close := getattr(judge, "close", None)) is not None:
                await close()

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the episode with all members concurrently."""
        if not self._state.ready:
            self.prepare(root=Path(), folder=None)
        gathered = await asyncio.gather(*(self._member_score(name, task, episode) for name in self.judges))
        scores = dict(zip(self.judges, gathered, strict=True))
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        evidence = "\n".join(f"{name}: {(score.reason or score.evidence)[:_MAX_EVIDENCE]}" for name, score in scores.items())
        if len(values) < self._needed:
            reason = f"{len(values)} of {len(scores)} judges gave a score, but the quorum is {self._needed}"
            return self._unscored(reason, evidence, self._blame(scores.values()))
        disagreement = mean_difference(list(values.values()))
        if disagreement > self.max_disagreement:
            return self._unscored(
                f"the judges disagree by {disagreement:.2f}, but the maximum is {self.max_disagreement:g}", evidence, None
            )
        value = self._aggregate(list(values.values()))
        if value is None:
            return self._unscored("the vote of the judges is tied", evidence, None)
        parts = named_parts({name: scores[name] for name in values}) | {"disagreement": disagreement, "judges": float(len(values))}
        return Score(value=value, parts=parts, evidence=evidence)

    @property
    def _needed(self) -> int:
        return len(self.judges) // 2 + 1 if self.quorum is None else self.quorum

    def _blame(self, scores: Collection[Score]) -> Blame | None:
        """Returns the first blame in this order with which the quorum would be complete; None if there is none."""
        available = sum(score.value is not None for score in scores)
        for blame in (Blame.INFRASTRUCTURE, Blame.TASK, Blame.POLICY):  # `TaskScorer` checks whether the policy is to blame
            available += sum(score.blame is blame for score in scores)
            if available >= self._needed:
                return blame
        return None

    def _unscored(self, reason: str, evidence: str, blame: Blame | None) -> Score:
        return Score(value=None, reason=f"{self.name}: {reason}", evidence=evidence, blame=blame)

    def _aggregate(self, values: Sequence[float]) -> float | None:
        if self.aggregate == "median":
            return statistics.median(values)
        if self.aggregate == "mean":
            return statistics.fmean(values)
        yes = sum(is_at_least(value, self.threshold) for value in values)
        return None if 2 * yes == len(values) else float(2 * yes > len(values))

    async def _member_score(self, name: str, task: Task, episode: Episode) -> Score:
        """Returns a member's score. If the member fails, returns a score without a value."""
        judge = self.judges[name]
        try:
            return await call_verifier(judge, f"judge {name}", task, episode, None, timeout_s=timeout_of(judge, _TIMEOUT_S))
        except InfrastructureError as error:
            return Score(value=None, reason=user_code.describe_error(error), blame=Blame.INFRASTRUCTURE)


def mean_difference(values: Sequence[float]) -> float:
    """Returns the mean absolute difference over all pairs of values (Gini's mean difference); 0 for a single value."""
    pairs = list(itertools.combinations(values, 2))
    return math.fsum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else 0.0
