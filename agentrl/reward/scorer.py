"""Runs verifiers with a deadline. A verifier's failure is never blamed on the policy: there is no value, but a reason.

A verifier is user code that reads an agent's words, so whatever it does, its episode gets a score or a reason for having none,
and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl import usercode
from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.plugins import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, Score, Task

log = logging.getLogger(__name__)

MAX_EVIDENCE = 20_000
"""Characters kept of a verifier's evidence."""
MAX_PARTS = 1000
_CLOSING_S = 30.0  # for a verifier to close its sandboxes at its deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScorer:
    """Scores an episode with every verifier of its task; the value is their mean, and each verifier is a named part."""

    timeout_s: float = 30.0
    sandboxes: SandboxBackend | None = None  # for verifiers that judge in sandboxes
    sandbox_timeout_s: float = 9000.0  # of such a verifier, which sets its own deadlines for what it runs
    max_retries: int = 2  # after infrastructure failures
    root: Path = Path()  # the project, and the run folder where there is a run: for verifiers that are prepared
    folder: Path | None = None
    _verifiers: dict[str, Verifier | SandboxVerifier] = field(default_factory=dict, repr=False)

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
            if (prepare := getattr(verifier, "prepare", None)) is not None:
                prepare(root=self.root, folder=self.folder)
            self._verifiers[reference] = verifier

    async def __call__(self, task: Task, episode: Episode) -> Score:
        self.load(task.verifiers)
        if self.sandboxes is None and (waiting := [name for name in task.verifiers if _needs_sandboxes(self._verifiers[name])]):
            raise PluginError(f"verifier {waiting[0]!r} judges in sandboxes", fix="pass them as TaskScorer(sandboxes=...)")
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
        return Score(value=total / len(scores), parts=parts, evidence=evidence, turn_rewards=_mean_turns(list(scores.values())))

    async def _judge(self, reference: str, task: Task, episode: Episode) -> Score:
        for attempt in range(self.max_retries + 1):
            try:
                return await self._judge_once(reference, task, episode)
            except InfrastructureError as error:
                log.warning("verifier %s on %s: %s", reference, episode.id, usercode.describe(error))
                reason = f"verifier: {usercode.describe(error, 2000)}"
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # time for a part to restart
        return Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)

    async def _judge_once(self, reference: str, task: Task, episode: Episode) -> Score:
        verifier, what = self._verifiers[reference], f"verifier {reference}"
        in_sandboxes = _needs_sandboxes(verifier)
        limit, grace_s = (self.sandbox_timeout_s, _CLOSING_S) if in_sandboxes else (self._limit(verifier), usercode.GRACE_S)
        since = usercode.cancellations()
        try:
            given = await usercode.call(lambda: self._ask(verifier, task, episode), what=what, timeout_s=limit, grace_s=grace_s)
            return _checked(given, [len(trajectory.turns) for trajectory in episode.trajectories])
        except usercode.Overdue as error:
            usercode.report(what, error, trace=False)
            return Score(value=None, reason=f"verifier gave no score within {limit:g} s")
        except NotAScore as error:
            usercode.report(what, error, trace=False)
            return Score(value=None, reason=f"verifier gave {usercode.text_of(error, 500)}")
        except BaseException as error:  # user code may raise anything; the episode is then unscored
            if isinstance(error, KeyboardInterrupt | GeneratorExit) or usercode.cancellations() > since:
                raise
            if (fault := usercode.cause(error, InfrastructureError)) is not None:
                raise fault from None
            if (broken := usercode.cause(error, TaskError)) is not None:
                log.warning("%s: %s", what, broken)
                return Score(value=None, reason=usercode.text_of(broken), blame=Blame.TASK)
            usercode.report(what, error)
            return Score(value=None, reason=f"verifier raised {usercode.describe(error, 2000)}")

    def _limit(self, verifier: object) -> float:
        """Seconds that a verifier may take: what it says itself, as one does that waits for a server."""
        said = getattr(verifier, "timeout_s", None)
        return float(said) if isinstance(said, int | float) and 0 < said <= self.sandbox_timeout_s else self.timeout_s

    async def _ask(self, verifier: Any, task: Task, episode: Episode) -> Any:
        if not _needs_sandboxes(verifier):
            return await verifier(task, episode)
        assert self.sandboxes is not None, "checked by __call__"
        return await verifier(task, episode, self.sandboxes)


class NotAScore(Exception):
    """A verifier returned something that is not a valid score."""


def _checked(given: object, turns: Sequence[int]) -> Score:
    """The score, cut to its bounds. Raises `NotAScore`.

    Args:
        turns: number of turns of each trajectory.
    """
    if not isinstance(given, Score):
        raise NotAScore(f"{type(given).__name__}, not a Score")
    numbers = (given.value or 0.0, *given.parts.values(), *(turn for line in given.turn_rewards for turn in line))
    if (odd := next((number for number in numbers if not math.isfinite(number)), None)) is not None:
        raise NotAScore(f"{odd} for a number")
    if len(given.parts) > MAX_PARTS:
        raise NotAScore(f"{len(given.parts)} parts, at most {MAX_PARTS} are kept")
    if given.turn_rewards and [len(line) for line in given.turn_rewards] != list(turns):
        raise NotAScore(f"turn rewards that do not fit the episode's turns {list(turns)}")
    return replace(given, evidence=given.evidence[:MAX_EVIDENCE], reason=given.reason[:2000])


def _needs_sandboxes(verifier: object) -> bool:
    return bool(getattr(verifier, "needs_sandboxes", False))


def _mean_turns(scores: Sequence[Score]) -> tuple[tuple[float, ...], ...]:
    """The mean over verifiers, as for values; one without turn rewards counts as zeros. Empty when none has any."""
    given = [score.turn_rewards for score in scores if score.turn_rewards]
    return tuple(tuple(sum(turn) / len(scores) for turn in zip(*lines, strict=True)) for lines in zip(*given, strict=True))
