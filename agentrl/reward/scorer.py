"""Runs verifiers with a deadline. A verifier that fails gives a reason and no value, unless the policy's text provoked the failure.

A verifier is user code that reads an agent's words, so whatever it does, its episode gets a score or a reason for having none,
and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError
from agentrl.plugins.references import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward.audit import add_audit
from agentrl.reward.branches import add_branches
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


@dataclass(frozen=True, slots=True)
class _Scored:
    """An episode that a verifier gave a value, after some seconds."""

    task: Task
    episode: Episode
    value: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScorer:
    """Scores an episode with every verifier of its task; the value is their mean, and each verifier is a named part.

    What the verifiers in `audit` say comes beside it: see `agentrl.reward.audit`.
    """

    timeout_s: float = 30.0
    sandboxes: SandboxBackend | None = None  # for verifiers that judge in sandboxes
    sandbox_timeout_s: float = 9000.0  # of such a verifier, which sets its own deadlines for what it runs
    max_retries: int = 2  # after infrastructure failures
    controls: bool = True  # whether to call a failing verifier with harmless answers, to find provoked failures; a proof needs all failures
    root: Path = Path()  # the project, and the run folder where there is a run: for verifiers that are prepared
    folder: Path | None = None
    audit: tuple[str, ...] = ()
    _verifiers: dict[str, Verifier | SandboxVerifier] = field(default_factory=dict, repr=False)
    _lowest: dict[str, float] = field(default_factory=dict, repr=False)  # value that each has given
    _best: dict[str, _Scored] = field(default_factory=dict, repr=False)

    def load(self, references: Sequence[str]) -> None:
        """Resolves verifiers in advance, and prepares those that are `PreparedVerifier`.

        Raises `PluginError` for one that does not resolve or is not callable, and `UserError` for one that refuses to be used.
        """
        for reference in references:
            if reference in self._verifiers:
                continue
            verifier = resolve(reference)
            if not callable(verifier):
                raise PluginError(f"verifier {reference!r} is not callable", fix="write async def score(task, episode) -> Score")
            prepare_verifier(verifier, root=self.root, folder=self.folder)
            self._verifiers[reference] = verifier

    async def __call__(self, task: Task, episode: Episode) -> Score:
        named = [*task.verifiers, *self.audit]
        self.load(named)
        if self.sandboxes is None and (waiting := [name for name in named if needs_sandboxes(self._verifiers[name])]):
            raise PluginError(f"verifier {waiting[0]!r} judges in sandboxes", fix="pass them as TaskScorer(sandboxes=...)")
        return await self.audit_score(task, episode, await self._rewarded(task, episode))

    async def audit_score(self, task: Task, episode: Episode, score: Score) -> Score:
        """A score with what the audit says of the episode; as it is where there is none, or no value."""
        if not self.audit or score.value is None:
            return score
        self.load(self.audit)
        return add_audit(score, {reference: await self._judge(reference, task, episode) for reference in self.audit})

    async def _rewarded(self, task: Task, episode: Episode) -> Score:
        scores = {reference: await self._judge(reference, task, episode) for reference in task.verifiers}
        unscored = [f"{name}: {score.reason}" for name, score in scores.items() if score.value is None]
        if unscored or not scores:
            blames = [score.blame for score in scores.values() if score.blame is not None]
            said = "\n".join(score.evidence for score in scores.values() if score.evidence)
            reason = "; ".join(unscored) or "the task names no verifier"
            return Score(value=None, reason=reason, evidence=said, blame=next(iter(blames), None))
        parts = {name: score.value for name, score in scores.items() if score.value is not None}
        for name, score in scores.items():
            parts |= {f"{name}/{part}": value for part, value in score.parts.items()}
        total = sum(score.value for score in scores.values() if score.value is not None)
        evidence = "\n".join(score.evidence for score in scores.values() if score.evidence)
        if not math.isfinite(total):
            return Score(value=None, reason="the verifiers' scores are too large for a mean")
        made = Score(value=total / len(scores), parts=parts, evidence=evidence, turn_rewards=_mean_turns(list(scores.values())))
        return add_branches(made, scores, dict.fromkeys(scores, 1 / len(scores)))

    async def _judge(self, reference: str, task: Task, episode: Episode) -> Score:
        late = True
        for attempt in range(self.max_retries + 1):
            try:
                return await self._judge_provoked(reference, task, episode)
            except InfrastructureError as error:
                late = late and isinstance(error, VerifierTimeout)
                log.warning("verifier %s on %s: %s", reference, episode.id, user_code.describe_error(error))
                reason = f"verifier: {user_code.describe_error(error, 2000)}"
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # time for a part to restart
        if late and self.controls and await self._keeps_busy(reference, task, episode):
            return self._least(reference, f"{reference}: {reason}, at what this episode says; it scores another in time", episode)
        return Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)

    async def _keeps_busy(self, reference: str, task: Task, episode: Episode) -> bool:
        """Whether what the verifier waits for answers in time for the best episode so far, and after that not for this one."""
        if (best := self._best.get(reference)) is None:
            return False
        try:
            if (await self._judge_once(reference, best.task, best.episode)).value is None:
                return False
        except InfrastructureError:
            return False
        try:
            await self._judge_once(reference, task, episode)
        except InfrastructureError as error:
            return isinstance(error, VerifierTimeout)
        return False

    def _least(self, reference: str, told: str, episode: Episode, *values: float) -> Score:
        """The lowest value that the verifier gives: of its bounds, or of those that it has given, `values` and 0."""
        bounds = bounds_of(self._verifiers[reference])
        lowest = min(0.0, *values, self._lowest.get(reference, 0.0)) if bounds is None else bounds[0]
        log.warning("verifier %s on %s: %s", reference, episode.id, told)
        return Score(value=lowest, evidence=told[:2000])

    async def _judge_provoked(self, reference: str, task: Task, episode: Episode) -> Score:
        """The score, also if the episode's text makes the verifier fail.

        If a verifier fails twice on an episode and scores a harmless one, the text is the cause, and the episode gets the lowest value. If
        it fails on harmless answers too, it is broken, and there is no value. If it now fails on the best episode that it has scored so
        far, it has lost something that it does not need for harmless answers, and the infrastructure is to blame.
        """
        started = time.monotonic()
        score = await self._judge_once(reference, task, episode)
        if score.value is not None:
            self._judged(reference, task, episode, score.value, time.monotonic() - started)
        if score.blame is not Blame.POLICY:
            return score
        if not self.controls:
            return replace(score, blame=None)
        again = await self._judge_once(reference, task, episode)
        if again.blame is not Blame.POLICY:
            return again
        controls = {answer: (await self._judge_once(reference, task, control_episode(episode, answer))).value for answer in CONTROL_ANSWERS}
        values = [value for value in controls.values() if value is not None]
        if not values:
            return replace(again, blame=None)
        best = self._best.get(reference)
        if best is not None and (now := await self._judge_once(reference, best.task, best.episode)).blame is Blame.POLICY:
            reason = f"{again.reason}; it has scored {best.episode.id} before, where it fails now: {now.reason}"
            return Score(value=None, reason=reason[:2000], blame=Blame.INFRASTRUCTURE)
        answer = next(answer for answer, value in controls.items() if value is not None)
        evidence = f"{reference}: {again.reason}, on this episode's text; it scores an episode that submits {answer!r}"
        return self._least(reference, evidence, episode, *values)

    def _judged(self, reference: str, task: Task, episode: Episode, value: float, seconds: float) -> None:
        """Keeps the verifier's lowest value, and the episode with its highest one; of several the one that it scored fastest."""
        self._lowest[reference] = min(value, self._lowest.get(reference, value))
        best = self._best.get(reference)
        if best is None or (value, -seconds) > (best.value, -best.seconds):
            self._best[reference] = _Scored(task, episode, value, seconds)

    async def _judge_once(self, reference: str, task: Task, episode: Episode) -> Score:
        verifier, what = self._verifiers[reference], f"verifier {reference}"
        limit = self.sandbox_timeout_s if needs_sandboxes(verifier) else timeout_of(verifier, self.timeout_s)
        return await call_verifier(verifier, what, task, episode, self.sandboxes, timeout_s=limit)


def _mean_turns(scores: Sequence[Score]) -> tuple[tuple[float, ...], ...]:
    """The mean over verifiers, as for values; one without turn rewards counts as zeros. Empty when none has any."""
    given = [score.turn_rewards for score in scores if score.turn_rewards]
    return tuple(tuple(sum(turn) / len(scores) for turn in zip(*lines, strict=True)) for lines in zip(*given, strict=True))
