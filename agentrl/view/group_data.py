"""The JSON for a learner step and for a group: attempts side by side, scores, advantages, and why a group gives no learning signal."""

from __future__ import annotations

import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from agentrl.base.numbers import finite
from agentrl.errors import StoreError
from agentrl.experience.episode_rows import outcome
from agentrl.records import Group, LedgerEntry, ScoredEpisode
from agentrl.view.source import Missing, RunSource
from agentrl.view.training import GroupTraining, explain, train_group

MAX_GROUPS = 64
"""Maximum number of groups in one response."""
_MAX_CHARS = 400  # maximum number of characters in a string in a table
_MAX_FAILURES = 12
_CACHED = 4096

Data = dict[str, Any]


# Cached table rows for the groups of all runs. The key contains the ledger entry, so the row of a changed entry is computed again.
_rows: OrderedDict[tuple[Path, LedgerEntry], Data] = OrderedDict()
_rows_lock = Lock()


def step_data(source: RunSource, step: int, *, offset: int = 0) -> Data:
    """Returns a learner step (steps are counted from 1): its metrics, its groups, and the mean scores by kind of task compared with the
    previous step.

    Contains at most `MAX_GROUPS` groups, starting at number `offset`. Raises `Missing` if the run was removed, or if the step has neither
    metrics nor groups.
    """
    notes = source.refresh()
    metrics = source.metrics.row(step)
    entries: tuple[LedgerEntry, ...] = ()
    is_unreadable = False
    try:
        entries = source.store().entries(step=step - 1)
    except StoreError as error:
        notes.append(str(error)[:600])
        is_unreadable = True
    if not metrics and not entries:
        raise Missing(f"step {step} has no metrics and no groups yet", fix="choose a step in the curves on the run's page")
    page = entries[offset : offset + MAX_GROUPS]
    numbers = source.metrics.steps
    position = numbers.index(step) if step in numbers else None
    earlier = numbers[position - 1] if position else None
    return {
        "run": source.id,
        "step": step,
        "previous": earlier,
        "next": numbers[position + 1] if position is not None and position + 1 < len(numbers) else None,
        "metrics": metrics,
        "before": source.metrics.row(earlier) if earlier is not None else {},
        "groups": [group_line(source, entry) for entry in page],
        "offset": offset,
        "total": len(entries),
        "kinds": _kinds(source, entries, step),
        "is_unreadable": is_unreadable,
        "notes": notes,
    }


def newest_groups(source: RunSource, *, before: int | None) -> Data:
    """Returns the `MAX_GROUPS` newest groups, in any state, with an index below `before`; None means no bound. If the store cannot be read,
    a note gives the reason. Raises `Missing` if the run was removed."""
    notes = source.refresh()
    try:
        entries = source.store().newest_entries(before=before, limit=MAX_GROUPS)
    except StoreError as error:
        return {"run": source.id, "groups": [], "next": None, "is_unreadable": True, "notes": [*notes, str(error)[:600]]}
    more = entries[-1].index if len(entries) == MAX_GROUPS else None
    return {
        "run": source.id,
        "groups": [group_line(source, entry) for entry in entries],
        "next": more,
        "is_unreadable": False,
        "notes": notes,
    }


def group_data(source: RunSource, index: int) -> Data:
    """Returns a group with its attempts. Raises `Missing` if the run or the group does not exist, and `StoreError` if the store cannot be
    read."""
    notes = source.refresh()
    group = source.group(index)
    entry = source.store().entry(index)
    assert entry is not None, "the group was read"
    training = train_group(source, entry, group)
    vocabulary, why = source.vocabulary()
    question = question_of(source, group)
    attempts = [
        _attempt(number, scored, training.advantages[number], trained=scored.episode.id in training.samples, threshold=group.pass_threshold)
        for number, scored in enumerate(group.episodes)
    ]
    return {
        **_line(source, entry, group, training),
        "run": source.id,
        "question": question[:20_000],
        "attempts": attempts,
        "cancelled": [
            {
                "episode": attempt.episode_id,
                "reason": attempt.reason,
                "begun": attempt.begun,
                "turns": attempt.turns,
                "tokens": attempt.tokens,
            }
            for attempt in group.cancelled
        ],
        "neighbours": _neighbours(source, entry),
        "notes": [*notes, *training.notes, *([why] if vocabulary is None else [])],
    }


def question_of(source: RunSource, group: Group) -> str:
    """Returns the prompt of a group's task or, if it is unknown, the context of the first turn; empty if neither is known."""
    if group.prompt:
        return "\n\n".join(message.content for message in group.prompt)
    vocabulary, _ = source.vocabulary()
    for scored in group.episodes:
        for trajectory in scored.episode.trajectories[:1]:
            for turn in trajectory.turns[:1]:
                messages = "\n\n".join(message.content for message in trajectory.prompt)
                return messages or ("" if vocabulary is None else vocabulary.decode(turn.prompt_ids[:20_000]))
    return ""


def group_line(source: RunSource, entry: LedgerEntry) -> Data:
    """Returns a group as a row of a table. For a group that cannot be read, the row contains a `problem`."""
    key = (source.path, entry)
    with _rows_lock:
        if (known := _rows.get(key)) is not None:
            return known
    try:
        group = source.group(entry.index)
    except (StoreError, Missing) as error:
        return {**_entry_data(source, entry), "problem": str(error)[:400], "scores": [], "advantages": [], "attempts_text": []}
    line = _line(source, entry, group, train_group(source, entry, group))
    with _rows_lock:
        _rows[key] = line
        while len(_rows) > _CACHED:
            _rows.popitem(last=False)
    return line


def _line(source: RunSource, entry: LedgerEntry, group: Group, training: GroupTraining) -> Data:
    scores = [_score(scored, group.pass_threshold) for scored in group.episodes]
    counted = [scored.score.value for scored in group.scored if scored.score.value is not None]
    reason = training.reason if entry.use is None else entry.use.reason
    return {
        **_entry_data(source, entry),
        "problem": None,
        "scores": scores,
        "advantages": list(training.advantages),
        "mean": finite(sum(counted) / len(counted)) if counted else None,
        "stops": dict(Counter(scored.episode.stop_reason for scored in group.episodes).most_common(6)),
        "tokens": [scored.episode.completion_tokens for scored in group.episodes],
        "reason": reason[:_MAX_CHARS],
        "explanation": explain(reason)[:_MAX_CHARS] if reason else "",
        "fault": None if group.fault is None else f"{group.fault.kind}: {group.fault.message}"[:_MAX_CHARS],
    }


def _entry_data(source: RunSource, entry: LedgerEntry) -> Data:
    use = entry.use
    return {
        "group": entry.index,
        "task": entry.task_id[:_MAX_CHARS],
        "kind": source.tasks.kind(max(entry.index, -1 - entry.index)),
        "state": entry.state,
        "step": None if entry.step is None else entry.step + 1,
        "counted": entry.counted,
        "attempts_count": entry.attempts,
        "has_spread": entry.has_spread,
        "oldest_version": entry.oldest_version,
        "tokens_sampled": entry.tokens_sampled,
        "tokens_trained": None if use is None else use.tokens_trained,
        "pending": entry.pending,
        "residual": entry.is_residual,
    }


def _score(scored: ScoredEpisode, threshold: float | None) -> Data:
    score, episode = scored.score, scored.episode
    shown = {"value": finite(score.value), "outcome": outcome(scored, threshold)}
    return {**shown, "excluded": episode.left_out, "pending": bool(score.pending), "episode": episode.id[:200]}


def _attempt(number: int, scored: ScoredEpisode, advantage: float | None, *, trained: bool, threshold: float | None) -> Data:
    episode = scored.episode
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.own_turns]
    tools = Counter(call.name[:60] for turn in turns for call in turn.message.tool_calls)
    return {
        "attempt": number,
        "episode": episode.id[:200],
        "score": score_data(scored),
        "outcome": outcome(scored, threshold),
        "advantage": finite(advantage),
        "trained": trained,
        "excluded": episode.left_out,
        "stop": episode.stop_reason,
        "answer": None if episode.answer is None else episode.answer[:_MAX_CHARS],
        "turns": len(turns),
        "trajectories": len(episode.trajectories),
        "tokens": episode.completion_tokens,
        "tools": dict(tools.most_common(8)),
        "failed_calls": sum(not result.ok for turn in turns for result in turn.tool_results),
        "wall_s": finite(episode.wall_s),
        "versions": sorted({span.version for turn in turns for span in turn.versions})[:20],
        "failures": failures_data(scored),
        "retries": episode.attempt,
    }


def score_data(scored: ScoredEpisode, *, chars: int = _MAX_CHARS) -> Data:
    """Returns a score: value, parts, reason, evidence, and the parts that have not arrived yet."""
    score = scored.score
    return {
        "value": finite(score.value),
        "parts": {name[:100]: finite(value) for name, value in list(score.parts.items())[:100]},
        "reason": score.reason[:chars],
        "evidence": score.evidence[:chars],
        "evidence_cut": max(0, len(score.evidence) - chars),
        "pending": [{"name": part.name, "low": part.low, "high": part.high} for part in score.pending[:50]],
    }


def failures_data(scored: ScoredEpisode, *, chars: int = _MAX_CHARS) -> list[Data]:
    """Returns the first 12 failures of an episode, with messages of at most `chars` characters."""
    return [
        {
            "stage": failure.stage[:60],
            "blame": str(failure.blame),
            "kind": failure.kind[:100],
            "message": failure.message[:chars],
            "turn": failure.turn,
        }
        for failure in scored.episode.failures[:_MAX_FAILURES]
    ]


def _neighbours(source: RunSource, entry: LedgerEntry) -> Data:
    """Returns the indices of the groups before and after a group: in its step, or of all groups if it does not belong to a step yet."""
    if entry.step is None:
        indices = [other.index for other in source.store().newest_entries(before=entry.index + 2, limit=3)][::-1]
    else:
        indices = [other.index for other in source.store().entries(step=entry.step)]
    if entry.index not in indices:
        return {"previous": None, "next": None}
    position = indices.index(entry.index)
    return {"previous": indices[position - 1] if position else None, "next": indices[position + 1] if position + 1 < len(indices) else None}


def _kinds(source: RunSource, entries: Sequence[LedgerEntry], step: int) -> list[Data]:
    """Returns the mean score by kind of task in a step and in the previous step. The kind with the largest decrease is first."""
    now = _kind_means(source, [entry.index for entry in entries])
    try:
        earlier = _kind_means(source, [entry.index for entry in source.store().entries(step=step - 2)] if step > 1 else [])
    except StoreError:
        earlier = {}
    rows = [
        {"kind": kind, "now": now.get(kind, (None, 0))[0], "groups": now.get(kind, (None, 0))[1], "before": earlier.get(kind, (None, 0))[0]}
        for kind in sorted({*now, *earlier})
    ]
    return sorted(rows, key=lambda row: _fall(row["now"], row["before"]))


def _fall(now: float | None, before: float | None) -> float:
    return math.inf if now is None or before is None else now - before


def _kind_means(source: RunSource, indices: Sequence[int]) -> dict[str, tuple[float, int]]:
    scores: dict[str, list[float]] = {}
    for index in indices:
        kind, mean = source.tasks.kind(index), source.tasks.mean(index)
        if kind and mean is not None:
            scores.setdefault(kind, []).append(mean)
    return {kind: (statistics.fmean(values), len(values)) for kind, values in scores.items()}
