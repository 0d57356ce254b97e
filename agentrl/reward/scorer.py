"""Runs verifiers with a deadline. What a verifier breaks is never the policy's fault: no value, and the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.errors import PluginError
from agentrl.plugins import resolve
from agentrl.protocols import Verifier
from agentrl.records import Episode, Score, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScorer:
    """Scores an episode with every verifier its task names; the value is their mean, each verifier a named part."""

    timeout_s: float = 30.0
    _verifiers: dict[str, Verifier] = field(default_factory=dict, repr=False)

    def load(self, references: Sequence[str]) -> None:
        """Resolves verifiers ahead of need. Raises `PluginError` for one that does not resolve or cannot be called."""
        for reference in references:
            if reference in self._verifiers:
                continue
            verifier = resolve(reference)
            if not callable(verifier):
                raise PluginError(f"verifier {reference!r} is not callable", fix="see docs/verifiers.md")
            self._verifiers[reference] = verifier

    async def __call__(self, task: Task, episode: Episode) -> Score:
        self.load(task.verifiers)
        scores = {reference: await self._judge(reference, task, episode) for reference in task.verifiers}
        unscored = [f"{name}: {score.reason}" for name, score in scores.items() if score.value is None]
        if unscored or not scores:
            return Score(value=None, reason="; ".join(unscored) or "the task names no verifier")
        parts = {name: score.value for name, score in scores.items() if score.value is not None}
        for name, score in scores.items():
            parts |= {f"{name}/{part}": value for part, value in score.parts.items()}
        total = sum(score.value for score in scores.values() if score.value is not None)
        evidence = "\n".join(score.evidence for score in scores.values() if score.evidence)
        return Score(value=total / len(scores), parts=parts, evidence=evidence, turn_rewards=_mean_turns(list(scores.values())))

    async def _judge(self, reference: str, task: Task, episode: Episode) -> Score:
        try:
            async with asyncio.timeout(self.timeout_s):
                score = await self._verifiers[reference](task, episode)
        except TimeoutError:
            return Score(value=None, reason=f"verifier gave no score within {self.timeout_s:g} s")
        except Exception as error:  # user code may raise anything; it becomes "unscored", never a value
            log.warning("verifier %s raised on %s", reference, episode.id, exc_info=True)
            return Score(value=None, reason=f"verifier raised {type(error).__name__}: {error}"[:2000])
        if not isinstance(score, Score):
            return Score(value=None, reason=f"verifier gave {type(score).__name__}, not a Score")
        turns = [len(trajectory.turns) for trajectory in episode.trajectories]
        if score.turn_rewards and [len(rewards) for rewards in score.turn_rewards] != turns:
            return Score(value=None, reason=f"verifier's turn rewards do not fit the episode's turns {turns}")
        return score


def _mean_turns(scores: Sequence[Score]) -> tuple[tuple[float, ...], ...]:
    """The mean over verifiers, as for values; a verifier that rewards no turn counts as zeros. Empty when none does."""
    given = [score.turn_rewards for score in scores if score.turn_rewards]
    return tuple(tuple(sum(turn) / len(scores) for turn in zip(*lines, strict=True)) for lines in zip(*given, strict=True))
