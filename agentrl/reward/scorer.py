"""Runs verifiers with a deadline. What a verifier breaks is never the policy's fault: no value, and the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.plugins import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, Score, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScorer:
    """Scores an episode with every verifier its task names; the value is their mean, each verifier a named part."""

    timeout_s: float = 30.0
    sandboxes: SandboxBackend | None = None  # for verifiers that judge in sandboxes of their own
    sandbox_timeout_s: float = 9000.0  # of such a verifier, which bounds by itself what it runs
    max_retries: int = 2  # after faults of the infrastructure
    _verifiers: dict[str, Verifier | SandboxVerifier] = field(default_factory=dict, repr=False)

    def load(self, references: Sequence[str]) -> None:
        """Resolves verifiers ahead of need. Raises `PluginError` for one that does not resolve or cannot be called."""
        for reference in references:
            if reference in self._verifiers:
                continue
            verifier = resolve(reference)
            if not callable(verifier):
                raise PluginError(f"verifier {reference!r} is not callable", fix="write async def score(task, episode) -> Score")
            self._verifiers[reference] = verifier

    async def __call__(self, task: Task, episode: Episode) -> Score:
        self.load(task.verifiers)
        if self.sandboxes is None and (lacking := [name for name in task.verifiers if _needs_sandboxes(self._verifiers[name])]):
            raise PluginError(f"verifier {lacking[0]!r} judges in sandboxes", fix="give them to TaskScorer(sandboxes=...)")
        scores = {reference: await self._judge(reference, task, episode) for reference in task.verifiers}
        unscored = [f"{name}: {score.reason}" for name, score in scores.items() if score.value is None]
        if unscored or not scores:
            blames = [score.blame for score in scores.values() if score.blame is not None]
            return Score(value=None, reason="; ".join(unscored) or "the task names no verifier", blame=next(iter(blames), None))
        parts = {name: score.value for name, score in scores.items() if score.value is not None}
        for name, score in scores.items():
            parts |= {f"{name}/{part}": value for part, value in score.parts.items()}
        total = sum(score.value for score in scores.values() if score.value is not None)
        evidence = "\n".join(score.evidence for score in scores.values() if score.evidence)
        return Score(value=total / len(scores), parts=parts, evidence=evidence, turn_rewards=_mean_turns(list(scores.values())))

    async def _judge(self, reference: str, task: Task, episode: Episode) -> Score:
        for attempt in range(self.max_retries + 1):
            try:
                return await self._judge_once(reference, task, episode)
            except InfrastructureError as error:
                log.warning("verifier %s on %s: %s", reference, episode.id, error)
                reason = f"verifier: {type(error).__name__}: {error}"[:2000]
            if attempt < self.max_retries:
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))  # a restarting part gets a moment
        return Score(value=None, reason=reason, blame=Blame.INFRASTRUCTURE)

    async def _judge_once(self, reference: str, task: Task, episode: Episode) -> Score:
        verifier = self._verifiers[reference]
        limit = self.sandbox_timeout_s if _needs_sandboxes(verifier) else self.timeout_s
        try:
            async with asyncio.timeout(limit):
                score = await self._ask(verifier, task, episode)
        except InfrastructureError:
            raise
        except TimeoutError:
            return Score(value=None, reason=f"verifier gave no score within {limit:g} s")
        except TaskError as error:
            log.warning("verifier %s: %s", reference, error)
            return Score(value=None, reason=str(error)[:2000], blame=Blame.TASK)
        except Exception as error:  # user code may raise anything; it becomes "unscored", never a value
            log.warning("verifier %s raised on %s", reference, episode.id, exc_info=True)
            return Score(value=None, reason=f"verifier raised {type(error).__name__}: {error}"[:2000])
        if not isinstance(score, Score):
            return Score(value=None, reason=f"verifier gave {type(score).__name__}, not a Score")
        turns = [len(trajectory.turns) for trajectory in episode.trajectories]
        if score.turn_rewards and [len(rewards) for rewards in score.turn_rewards] != turns:
            return Score(value=None, reason=f"verifier's turn rewards do not fit the episode's turns {turns}")
        return score

    async def _ask(self, verifier: Any, task: Task, episode: Episode) -> Any:
        if not _needs_sandboxes(verifier):
            return await verifier(task, episode)
        assert self.sandboxes is not None, "__call__ has looked"
        return await verifier(task, episode, self.sandboxes)


def _needs_sandboxes(verifier: object) -> bool:
    return bool(getattr(verifier, "needs_sandboxes", False))


def _mean_turns(scores: Sequence[Score]) -> tuple[tuple[float, ...], ...]:
    """The mean over verifiers, as for values; a verifier that rewards no turn counts as zeros. Empty when none does."""
    given = [score.turn_rewards for score in scores if score.turn_rewards]
    return tuple(tuple(sum(turn) / len(scores) for turn in zip(*lines, strict=True)) for lines in zip(*given, strict=True))
