"""Scores an episode with the verifiers of its task. Each verifier has a deadline.

A verifier is user code that reads an agent's text. If a verifier fails, the episode receives a reason instead of a value. If the
agent's text caused the failure, the verifier's score is its lowest value instead. The run continues in both cases.

The scores of several verifiers are combined with weights. The audit consists of verifiers that score every episode only for monitoring.
Their values never become a reward. The part `audit` of a score is the mean of the audit verifiers' values, and the parts `audit/NAME` are
the individual values. If an audit verifier returns no value, its part and the part `audit` are missing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.errors import InfrastructureError, PluginError
from agentrl.plugins.references import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, PendingPart, Score, ScoredEpisode, Task
from agentrl.reward.verifier_call import (
    CONTROL_ANSWERS,
    VerifierTimeout,
    bounds_of,
    call_verifier,
    control_episode,
    needs_sandboxes,
    prepare_verifier,
    timeout_of,
)

log = logging.getLogger(__name__)
AUDIT_PART = "audit"
_CONTRADICTS = 0.5  # an audit below this fraction of the reward contradicts the reward
_MAX_MESSAGE = 1000  # characters


@dataclass(frozen=True, slots=True)
class _Scored:
    """An episode that a verifier scored, the value, and the seconds that the verifier needed."""

    task: Task
    episode: Episode
    value: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScorer:
    """Scores an episode with every verifier of its task. The value is the mean of the verifiers' values, and each verifier
    is a named part.

    The verifiers in `audit` only add parts and evidence; see the module's docstring.
    """

    timeout_s: float = 30.0
    sandboxes: SandboxBackend | None = None  # backend for verifiers that use sandboxes
    sandbox_timeout_s: float = 9000.0  # deadline of such a verifier, which sets deadlines for the programs that it runs
    max_retries: int = 2  # retries after infrastructure failures
    controls: bool = True  # whether to call a failing verifier with control answers, to find failures that the agent's text caused
    root: Path = Path()  # project root; passed to the `prepare` method of verifiers, with the run folder if there is one
    folder: Path | None = None
    audit: tuple[str, ...] = ()
    _verifiers: dict[str, Verifier | SandboxVerifier] = field(default_factory=dict, repr=False)
    _lowest: dict[str, float] = field(default_factory=dict, repr=False)  # lowest value that each verifier has returned
    _best: dict[str, _Scored] = field(default_factory=dict, repr=False)

    def load(self, references: Sequence[str]) -> None:
        """Resolves verifiers in advance, and prepares each verifier that is a `PreparedVerifier`.

        Raises `PluginError` if a reference does not resolve or is not callable, and `UserError` if a verifier cannot be used.
        """
        for reference in references:
            if reference in self._verifiers:
                continue
            verifier = resolve(reference)
            if not callable(verifier):
                raise PluginError(f"verifier {reference!r} is not callable", fix="write async def score(task, episode) -> Score")
            prepare_verifier(verifier, root=self.root, folder=self.folder)
            self._verifiers[reference] = verifier

    @property
    def late(self) -> tuple[str, ...]:
        """The loaded verifiers with a true attribute `is_late`, whose scores arrive after the episode."""
        return tuple(reference for reference, verifier in self._verifiers.items() if getattr(verifier, "is_late", False))

    @property
    def residual(self) -> tuple[str, ...]:
        """The loaded verifiers with a true attribute `residual`, whose late parts are applied after the group has been trained."""
        return tuple(reference for reference in self.late if getattr(self._verifiers[reference], "residual", False))

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the episode and adds the audit.

        Raises the errors of `load`, and `PluginError` if a verifier needs sandboxes and there is no backend.
        """
        references = [*task.verifiers, *self.audit]
        self.load(references)
        if self.sandboxes is None and (unusable := [name for name in references if needs_sandboxes(self._verifiers[name])]):
            raise PluginError(f"verifier {unusable[0]!r} needs sandboxes", fix="pass a backend as TaskScorer(sandboxes=...)")
        return await self.audit_score(task, episode, await self._mean_score(task, episode))

    async def audit_score(self, task: Task, episode: Episode, score: Score) -> Score:
        """Adds the audit to a score.

        Returns the score unchanged if there is no audit, or if the score has neither a value nor pending parts.
        """
        if not self.audit or score.is_absent:
            return score
        self.load(self.audit)
        return add_audit(score, {reference: await self._score(reference, task, episode) for reference in self.audit})

    async def _mean_score(self, task: Task, episode: Episode) -> Score:
        scores = {reference: await self._score(reference, task, episode) for reference in task.verifiers}
        evidence = "\n".join(score.evidence for score in scores.values() if score.evidence)
        unscored = [f"{name}: {score.reason}" for name, score in scores.items() if score.is_absent]
        if unscored or not scores:
            blame = next((score.blame for score in scores.values() if score.blame is not None), None)
            return Score(value=None, reason="; ".join(unscored) or "the task has no verifier", evidence=evidence, blame=blame)
        total = sum(score.partial if score.value is None else score.value for score in scores.values())
        if not math.isfinite(total):
            return Score(value=None, reason="the mean of the verifiers' scores is not finite")
        weighted = [(1 / len(scores), score) for score in scores.values()]
        turns = weighted_turns(weighted)
        if pending := weighted_pending(weighted):
            if len({part.name for part in pending}) < len(pending):
                return Score(value=None, reason="two verifiers wait for late parts with the same name: rename one of the parts")
            return Score(
                value=None,
                parts=named_parts(scores),
                evidence=evidence,
                reason=f"waits for late scores: {', '.join(part.name for part in pending)}",
                turn_rewards=turns,
                pending=pending,
                partial=total / len(scores),
            )
        combined = Score(value=total / len(scores), parts=named_parts(scores), evidence=evidence, turn_rewards=turns)
        return add_branches(combined, weighted)

    async def _score(self, reference: str, task: Task, episode: Episode) -> Score:
        late = True
        for attempt in range(self.max_retries + 1):
            try:
                return await self._score_or_provoked(reference, task, episode)
            except InfrastructureError as error:
                late = late and isinstance(error, VerifierTimeout)
                log.warning("verifier %s on %s: %s", reference, episode.id, user_code.describe_error(error))
                reason = f"verifier: {user_code.describe_error(error, 2000)}"
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # time for a server or subprocess to restart
        if late and self.controls and await self._blocks_verifier(reference, task, episode):
            evidence = f"{reference}: {reason}, because of this episode's text; it scores another episode in time"
            return self._lowest_score(reference, evidence, episode)
        return Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)

    async def _blocks_verifier(self, reference: str, task: Task, episode: Episode) -> bool:
        """Whether the verifier scores its best episode so far in time, and then times out on this episode again."""
        if (best := self._best.get(reference)) is None:
            return False
        try:
            if (await self._call(reference, best.task, best.episode)).value is None:
                return False
        except InfrastructureError:
            return False
        try:
            await self._call(reference, task, episode)
        except InfrastructureError as error:
            return isinstance(error, VerifierTimeout)
        return False

    def _lowest_score(self, reference: str, evidence: str, episode: Episode, *values: float) -> Score:
        """Returns the verifier's lowest value: its lower bound or, if it has none, the lowest of 0, `values` and all returned values."""
        bounds = bounds_of(self._verifiers[reference])
        lowest = min(0.0, *values, self._lowest.get(reference, 0.0)) if bounds is None else bounds[0]
        log.warning("verifier %s on %s: %s", reference, episode.id, evidence)
        return Score(value=lowest, evidence=evidence[:2000])

    async def _score_or_provoked(self, reference: str, task: Task, episode: Episode) -> Score:
        """Returns the score, or the lowest value if the episode's text makes the verifier fail.

        The text is the cause if the verifier fails on the episode twice, scores a control episode, and fails on the episode again. A
        verifier that fails on all control episodes is broken, and there is no value. If a verifier also fails on its best episode so far,
        it has lost a resource that control episodes do not need, and the infrastructure is to blame.
        """
        started = time.monotonic()
        score = await self._call(reference, task, episode)
        if score.value is not None:
            self._remember(reference, task, episode, score.value, time.monotonic() - started)
        if score.blame is not Blame.POLICY:
            return score
        if not self.controls:
            return replace(score, blame=None)
        again = await self._call(reference, task, episode)
        if again.blame is not Blame.POLICY:
            return again
        controls = {answer: (await self._call(reference, task, control_episode(episode, answer))).value for answer in CONTROL_ANSWERS}
        values = [value for value in controls.values() if value is not None]
        if not values:
            return replace(again, blame=None)
        best = self._best.get(reference)
        if best is not None and (repeated := await self._call(reference, best.task, best.episode)).blame is Blame.POLICY:
            reason = f"{again.reason}; it now also fails on {best.episode.id}, which it scored before: {repeated.reason}"
            return Score(value=None, reason=reason[:2000], blame=Blame.INFRASTRUCTURE)
        if (last := await self._call(reference, task, episode)).blame is not Blame.POLICY:
            return last  # the failure was temporary and did not depend on the episode
        answer = next(answer for answer, value in controls.items() if value is not None)
        evidence = f"{reference}: {again.reason}, because of this episode's text; it scores an episode that submits {answer!r}"
        return self._lowest_score(reference, evidence, episode, *values)

    def _remember(self, reference: str, task: Task, episode: Episode, value: float, seconds: float) -> None:
        """Records the verifier's lowest value and the episode with its highest value. If several episodes have that
        value, the episode that was scored fastest is kept."""
        self._lowest[reference] = min(value, self._lowest.get(reference, value))
        best = self._best.get(reference)
        if best is None or (value, -seconds) > (best.value, -best.seconds):
            self._best[reference] = _Scored(task, episode, value, seconds)

    async def _call(self, reference: str, task: Task, episode: Episode) -> Score:
        verifier, what = self._verifiers[reference], f"verifier {reference}"
        limit = self.sandbox_timeout_s if needs_sandboxes(verifier) else timeout_of(verifier, self.timeout_s)
        return await call_verifier(verifier, what, task, episode, self.sandboxes, timeout_s=limit)


def named_parts(scores: Mapping[str, Score]) -> dict[str, float]:
    """Returns the values of scores by name, and the parts of each score as NAME/PART."""
    parts = {name: score.value for name, score in scores.items() if score.value is not None}
    return parts | {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}


def weighted_turns(weighted: Sequence[tuple[float, Score]]) -> tuple[tuple[float, ...], ...]:
    """Returns the weighted sum of the scores' rewards for each turn; empty if no score has turn rewards.

    A score without turn rewards counts as zeros.
    """
    scaled = [[[weight * turn for turn in turns] for turns in score.turn_rewards] for weight, score in weighted if score.turn_rewards]
    return tuple(tuple(map(sum, zip(*turns, strict=True))) for turns in zip(*scaled, strict=True))


def weighted_pending(weighted: Sequence[tuple[float, Score]]) -> tuple[PendingPart, ...]:
    """Returns the pending parts of the scores, with their weights in the combined score."""
    return tuple(replace(part, weight=weight * part.weight) for weight, score in weighted for part in score.pending)


def add_branches(combined: Score, weighted: Sequence[tuple[float, Score]]) -> Score:
    """Adds to a combined score the weighted sums of the scores' values for single trajectories. The weights must sum to 1, and every score
    must have a value."""
    return replace(combined, branches=_weighted_branches(weighted, "branches"), without=_weighted_branches(weighted, "without"))


def _weighted_branches(weighted: Sequence[tuple[float, Score]], name: Literal["branches", "without"]) -> tuple[float | None, ...]:
    """Returns the weighted sum of the scores' values for each trajectory; empty if no score has such values.

    A score that has no value for a trajectory contributes its value for the episode.
    """
    by_score: list[tuple[float | None, ...]] = [getattr(score, name) for _, score in weighted]
    count = max(map(len, by_score), default=0)
    sums: list[float | None] = []
    for column in zip(*(values or (None,) * count for values in by_score), strict=True):
        terms = [
            weight * ((score.value or 0.0) if value is None else value) for (weight, score), value in zip(weighted, column, strict=True)
        ]
        sums.append(None if all(value is None for value in column) else sum(terms))
    return tuple(sums)


def add_audit(score: Score, audits: Mapping[str, Score]) -> Score:
    """Adds the scores of the audit verifiers to the parts and the evidence of a score. `audits` maps a verifier's name to its score."""
    values = {name: audit.value for name, audit in audits.items() if audit.value is not None and math.isfinite(audit.value)}
    parts = {name: value for name, value in score.parts.items() if name != AUDIT_PART and not name.startswith(f"{AUDIT_PART}/")}
    parts |= {f"{AUDIT_PART}/{name}": value for name, value in values.items()}
    if values and len(values) == len(audits):
        parts[AUDIT_PART] = math.fsum(values.values()) / len(values)
    texts = [f"audit {name}: {audit.evidence or audit.reason}" for name, audit in audits.items() if audit.evidence or audit.reason]
    return replace(score, parts=parts, evidence="\n".join(filter(None, [score.evidence, *texts])))


def audit_contradiction(task: Task, scored: ScoredEpisode) -> str:
    """Returns a description of how the audit contradicts the score; empty if there is no contradiction or no audit.

    A score is contradicted if it is positive and reaches the task's threshold, but the audit is less than half of it. If the task has no
    threshold, a positive score is contradicted if the audit is less than half of it.
    """
    threshold = -math.inf if task.pass_threshold is None else task.pass_threshold
    value, audit = scored.score.value, scored.score.parts.get(AUDIT_PART)
    if value is None or audit is None or not is_at_least(value, threshold) or value <= 0 or is_at_least(audit, _CONTRADICTS * value):
        return ""
    evidence = "; ".join(line for line in scored.score.evidence.splitlines() if line.startswith("audit "))
    return user_code.printable(f"the audit is {audit:g}, but the reward is {value:g}{evidence and ': '}{evidence}", _MAX_MESSAGE)
