"""Creates the events of a run: a tracker creates them in the driver, and a listener in every process that runs episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from agentrl.base import user_code
from agentrl.base.liveness import RestartAlert
from agentrl.observe.events import (
    PREVIEW_CHARS,
    AlertRaised,
    EpisodeEnded,
    EpisodeScored,
    EpisodeStarted,
    EvaluationFinished,
    Event,
    GroupStored,
    PartRestarted,
    StageStarted,
    StepFinished,
    ToolEnded,
    TurnEnded,
    VersionJudged,
    VersionServed,
)
from agentrl.protocols import EpisodeListener, Interval, Tracker
from agentrl.records import Blame, Cancelled, Episode, Group, ScoredEpisode, SwapReport, Task, Turn, sampled_tokens

Record = Callable[[Event], None]
"""A function that receives an event, such as `EventLog.record`. It returns at once and never raises."""


class EventTracker(Tracker):
    """A tracker that records the events that occur in the driver."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        self._record(StepFinished(step=step, metrics={name: float(value) for name, value in metrics.items()}))

    def alert(self, text: str) -> None:
        """Records an alert, or the restart of a part."""
        self._record(PartRestarted(part=text.part, text=str(text)) if isinstance(text, RestartAlert) else AlertRaised(text=text))

    def stage(self, name: str, detail: str = "") -> None:
        """Records the start of a stage."""
        self._record(StageStarted(stage=name, detail=detail))

    def progress(self, index: int, group: Group) -> None:
        """Records that a group was stored with its scores."""
        scores = tuple(None if episode.episode.left_out else episode.score.value for episode in group.episodes)
        tokens, cancelled = sampled_tokens(group.episodes), len(group.cancelled)
        self._record(GroupStored(group=index, task_id=group.task_id, kind=group.kind, scores=scores, tokens=tokens, cancelled=cancelled))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Records the success rates from an evaluation."""
        shown = {split: (rate.value, rate.ci_low, rate.ci_high, rate.n) for split, rate in rates.items()}
        self._record(EvaluationFinished(phase=phase, rates=shown))

    def swapped(self, report: SwapReport) -> None:
        """Records a weight swap."""
        seconds, stall_s = report.total_ms / 1e3, report.stall_ms / 1e3
        self._record(VersionServed(version=report.version, seconds=seconds, stall_s=stall_s, probe_max_abs_diff=report.probe_max_abs_diff))

    def judged(self, version: int, outcome: str, reason: str) -> None:
        """Records a decision of the gate."""
        self._record(VersionJudged(version=version, outcome=outcome, reason=reason))


class EpisodeEvents(EpisodeListener):
    """A listener that records the events of episodes.

    If an event cannot be built, the episode is not affected. Only the first such error is logged.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._failed = False

    def started(self, task: Task, episode_id: str, *, group: int | None, attempt: int, turns: int) -> None:
        """Records the start of an attempt."""
        with self._boundary():
            self._record(
                EpisodeStarted(
                    episode=episode_id,
                    task_id=task.id,
                    kind=task.kind,
                    split=str(task.split),
                    group=group,
                    attempt=attempt,
                    turns=turns,
                )
            )

    def turn_ended(self, episode_id: str, trajectory: int, number: int, agent: str, turn: Turn) -> None:
        """Records a turn."""
        with self._boundary():
            self._record(
                TurnEnded(
                    episode=episode_id,
                    trajectory=trajectory,
                    turn=number,
                    agent=agent,
                    prompt_tokens=len(turn.prompt_ids),
                    sampled_tokens=turn.sampled,
                    version=turn.versions[-1].version if turn.versions else None,
                    seconds=turn.generate_s,
                    finish_reason=turn.finish_reason,
                    text=turn.message.content[:PREVIEW_CHARS],
                    calls=tuple(call.name for call in turn.message.tool_calls),
                )
            )

    def tools_ended(self, episode_id: str, trajectory: int, number: int, turn: Turn) -> None:
        """Records the tool calls of a turn."""
        with self._boundary():
            calls = turn.message.tool_calls
            for index, result in enumerate(turn.tool_results):
                arguments = calls[index].arguments if index < len(calls) else {}
                short = {key: value[:PREVIEW_CHARS] if isinstance(value, str) else value for key, value in arguments.items()}
                self._record(
                    ToolEnded(
                        episode=episode_id,
                        trajectory=trajectory,
                        turn=number,
                        call=index,
                        tool=result.name,
                        ok=result.ok,
                        seconds=result.wall_s,
                        arguments=json.dumps(short, ensure_ascii=False)[:PREVIEW_CHARS],
                        output=result.output[:PREVIEW_CHARS],
                    )
                )

    def ended(self, episode: Episode) -> None:
        """Records the end of an attempt."""
        with self._boundary():
            failure = next((failure for failure in reversed(episode.failures) if failure.blame is not Blame.POLICY), None)
            self._record(
                EpisodeEnded(
                    episode=episode.id,
                    stop_reason=episode.stop_reason,
                    turns=sum(len(trajectory.own_turns) for trajectory in episode.trajectories),
                    tokens=episode.completion_tokens,
                    seconds=episode.wall_s,
                    failure="" if failure is None else failure.kind,
                    blame="" if failure is None else str(failure.blame),
                )
            )

    def cancelled(self, attempt: Cancelled) -> None:
        """Records the end of a cancelled attempt, for which no episode is stored."""
        with self._boundary():
            turns, tokens, seconds = attempt.turns, attempt.tokens, attempt.wall_s
            self._record(EpisodeEnded(episode=attempt.episode_id, stop_reason="cancelled", turns=turns, tokens=tokens, seconds=seconds))

    def scored(self, scored: ScoredEpisode) -> None:
        """Records a score."""
        with self._boundary():
            score = scored.score
            self._record(EpisodeScored(episode=scored.episode.id, score=score.value, pending=bool(score.pending), reason=score.reason))

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._failed:
                self._failed = True
                user_code.log_unexpected("an event of an episode cannot be recorded; this message is logged only once", error)
