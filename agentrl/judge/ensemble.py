"""Several judges of one answer: what they agree on, how far they are apart, and no verdict where that is too far."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from agentrl.base import user_code
from agentrl.base.scores import is_at_least
from agentrl.errors import InfrastructureError, UserError
from agentrl.judge.calibration import require_calibration, validate_requirements
from agentrl.judge.ledger import JudgeUsage
from agentrl.judge.query import digest
from agentrl.protocols import Verifier
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward.verifier_call import call_verifier, needs_sandboxes, prepare_verifier, timeout_of

_TIMEOUT_S = 30.0  # of a member that does not say how long it may take
_OTHER_PARTS = ("", "disagreement", "judges")
_MAX_SAID = 2000  # characters of evidence kept of each member


@dataclass(slots=True)
class _State:
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ensemble:
    """A verifier of several: `Ensemble(judges={"a": one, "b": other, "c": third}, aggregate="median", max_disagreement=0.5)`.

    Members may be judges of different models and prompts, or any verifiers that need no sandboxes. Their scores are parts, beside

        disagreement   how far apart two of them are on average: the mean absolute difference over all pairs
        judges         how many gave a score

    Unscored, never 0: fewer than `quorum` gave a score, the disagreement is above `max_disagreement`, or a majority is tied. It is the
    infrastructure's fault where with the members that were down there would have been a quorum, and the policy's where with those that
    failed at what the episode says there would have been one.
    """

    judges: dict[str, Verifier]
    aggregate: Literal["median", "mean", "majority"] = "median"  # majority: each says yes from `threshold` on; the value is 1 or 0
    threshold: float = 0.5
    quorum: int | None = None  # None: more than half of them
    max_disagreement: float = 0.5
    name: str = "ensemble"
    calibration: str | None = None  # of the ensemble as a whole; see `ModelJudge.calibration`
    min_agreement: float = 0.0
    min_coverage: float = 0.0
    _state: _State = field(default_factory=_State, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.judges) < 2 or any("/" in name or name in _OTHER_PARTS for name in self.judges):
            raise UserError("an ensemble has two judges or more, each with a name without a slash", fix='judges={"strict": a, "mild": b}')
        if any(needs_sandboxes(judge) for judge in self.judges.values()):
            raise UserError("a verifier that needs sandboxes cannot be in an ensemble", fix="name it beside it, in tasks.verifiers")
        known = [one for judge in self.judges.values() if (one := getattr(judge, "identity", ""))]
        if len(set(known)) < len(known):
            raise UserError(
                "two judges of an ensemble ask the same of the same model, so that one would be given the other's kept answer",
                fix="give their endpoints another seed, or, where servers of one name serve other weights, another revision",
            )
        if not 1 <= self._needed <= len(self.judges) or not self.max_disagreement >= 0:
            raise UserError(f"a quorum of {self.quorum} of {len(self.judges)} judges", fix="give a number from 1 to that of the judges")
        validate_requirements(self.calibration, min_agreement=self.min_agreement, min_coverage=self.min_coverage)

    @property
    def identity(self) -> str:
        """A hash of its members' identities and of how they are put together; empty where one of them has none."""
        members = {name: getattr(judge, "identity", "") for name, judge in self.judges.items()}
        how: dict[str, Any] = {"aggregate": self.aggregate, "threshold": self.threshold, "quorum": self._needed}
        how |= {"max_disagreement": self.max_disagreement, "members": members}
        return digest(how) if all(members.values()) else ""

    @property
    def timeout_s(self) -> float:
        return max(timeout_of(judge, _TIMEOUT_S) for judge in self.judges.values()) + user_code.GRACE_S + 1.0

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """See `ModelJudge.prepare`; prepares every member."""
        for judge in self.judges.values():
            prepare_verifier(judge, root=root, folder=folder)
        if self.calibration is not None:
            if not self.identity:
                raise UserError(f"judge {self.name}: a member that has no identity cannot be calibrated", fix="leave the calibration out")
            demands = {"min_agreement": self.min_agreement, "min_coverage": self.min_coverage}
            require_calibration(root / self.calibration, identity=self.identity, name=self.name, **demands)
        self._state.ready = True

    def without_calibration(self, *, ledger: str | None = None) -> Self:
        """The same ensemble, of which neither it nor a member demands a calibration: for measuring it."""
        members = {
            name: judge.without_calibration(ledger=ledger) if hasattr(judge, "without_calibration") else judge
            for name, judge in self.judges.items()
        }
        return replace(self, judges=members, calibration=None, min_agreement=0.0, min_coverage=0.0)

    def spent(self) -> JudgeUsage:
        """Of all members together."""
        total = JudgeUsage()
        for judge in self.judges.values():
            if (spent := getattr(judge, "spent", None)) is not None:
                total = total.plus(spent())
        return total

    async def close(self) -> None:
        for judge in self.judges.values():
            if (close := getattr(judge, "close", None)) is not None:
                await close()

    async def __call__(self, task: Task, episode: Episode) -> Score:
        if not self._state.ready:
            self.prepare(root=Path(), folder=None)
        names = list(self.judges)
        scores = dict(zip(names, await asyncio.gather(*(self._one(name, task, episode) for name in names)), strict=True))
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        evidence = "\n".join(f"{name}: {(score.reason or score.evidence)[:_MAX_SAID]}" for name, score in scores.items())
        if len(values) < self._needed:
            down = sum(score.blame is Blame.INFRASTRUCTURE for score in scores.values())
            provoked = sum(score.blame is Blame.POLICY for score in scores.values())  # as far as a member alone can say: `TaskScorer`
            blame = Blame.INFRASTRUCTURE if len(values) + down >= self._needed else None
            if blame is None and len(values) + down + provoked >= self._needed:
                blame = Blame.POLICY
            return self._none(f"{len(values)} of {len(names)} judges gave a score, {self._needed} are needed", evidence, blame)
        apart = mean_difference(list(values.values()))
        if apart > self.max_disagreement:
            return self._none(f"the judges disagree by {apart:.2f}, at most {self.max_disagreement:g} is allowed", evidence, None)
        value = self._joined(list(values.values()))
        if value is None:
            return self._none("as many judges say yes as no", evidence, None)
        parts = {**values, "disagreement": apart, "judges": float(len(values))}
        for name, score in scores.items():
            if score.value is not None:
                parts |= {f"{name}/{part}": number for part, number in score.parts.items()}
        return Score(value=value, parts=parts, evidence=evidence)

    @property
    def _needed(self) -> int:
        return len(self.judges) // 2 + 1 if self.quorum is None else self.quorum

    def _none(self, reason: str, evidence: str, blame: Blame | None) -> Score:
        return Score(value=None, reason=f"{self.name}: {reason}", evidence=evidence, blame=blame)

    def _joined(self, values: Sequence[float]) -> float | None:
        if self.aggregate == "median":
            return statistics.median(values)
        if self.aggregate == "mean":
            return statistics.fmean(values)
        yes = sum(is_at_least(value, self.threshold) for value in values)
        return None if 2 * yes == len(values) else float(2 * yes > len(values))

    async def _one(self, name: str, task: Task, episode: Episode) -> Score:
        """A member's score; whatever it does, the others count."""
        judge = self.judges[name]
        try:
            return await call_verifier(judge, f"judge {name}", task, episode, None, timeout_s=timeout_of(judge, _TIMEOUT_S))
        except InfrastructureError as error:
            return Score(value=None, reason=user_code.describe_error(error), blame=Blame.INFRASTRUCTURE)


def mean_difference(values: Sequence[float]) -> float:
    """The mean absolute difference over all pairs (Gini's mean difference); 0 for a single value."""
    pairs = list(itertools.combinations(values, 2))
    return math.fsum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else 0.0
