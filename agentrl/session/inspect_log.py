"""Writes `.eval` logs for the viewer of inspect_ai: one file for each learner step or evaluation, with one sample for each attempt.

A log is a zip file of JSON (`inspect_ai.log`, version 2 of its schema): `header.json`, `summaries.json`, `_journal/start.json`, and
`samples/ID_epoch_N.json`. The id of a sample identifies its group, and its epoch is the number of the attempt. The metadata of a sample
contains, under `agentrl`, the data for which inspect_ai has no field: versions, parts of the score, and, for each turn, the exact token
ids, logprobs and version spans.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl.base.files import replace_file
from agentrl.base.numbers import finite
from agentrl.experience.episode_index import EpisodeRecord
from agentrl.observe.stats import Rate
from agentrl.records import Message, ToolCall, Trajectory, Turn

SCHEMA = 2
"""Version of the log schema."""
METADATA = "agentrl"
"""Key in the metadata of a sample under which data from agentrl is stored."""
SCORER = "reward"
_MOST = 1e100  # maximum absolute value of a score in a mean; with larger scores, sums and squares would overflow
_STOPS = {"stop": "stop", "length": "max_tokens"}  # finish reason of a turn -> finish reason in inspect_ai
_LIMITS = {"turn_limit": "message", "token_limit": "token", "wall_limit": "time"}  # stop reason of an episode -> limit in inspect_ai


@dataclass(slots=True, kw_only=True)
class _Log:
    """The state of a log that is being written."""

    name: str  # name of the task: the run and the step or evaluation
    model: str
    ids: dict[str, None] = field(default_factory=dict)
    epochs: int = 1
    times: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    unscored: int = 0
    summaries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return len(self.summaries)


def write_log(records: Iterable[EpisodeRecord], path: Path, *, run: str, part: str) -> int:
    """Writes the log of a step or an evaluation, and returns its number of samples. Replaces an existing file only when the new file is
    complete.

    Args:
        run: name of the run.
        part: name of the step or evaluation in the run.
    """
    log = _Log(name=f"{run} {part}", model=f"agentrl/{run}")
    with replace_file(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        names = set[tuple[str, int]]()
        for record in records:
            sample = _sample(record)
            if (sample["id"], sample["epoch"]) in names:  # two ids differ only in characters that are not allowed in file names
                sample["id"] = f"{sample['id']}-{record.row.number}"
            names.add((sample["id"], sample["epoch"]))
            _put(archive, f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            _count(log, record, sample)
        start = {"version": SCHEMA, "eval": _spec(log), "plan": {}}
        _put(archive, "_journal/start.json", start)
        _put(archive, "summaries.json", log.summaries)
        times = {"started_at": _time(min(log.times, default=0.0)), "completed_at": _time(max(log.times, default=0.0))}
        _put(archive, "header.json", start | {"status": "success", "results": _results(log), "stats": times})
    return log.samples


def safe_name(text: str) -> str:
    """Converts a string from a run to a safe part of a file name: letters, digits, `-` and `_`, at most 80 characters."""
    return "".join(character if character.isascii() and (character.isalnum() or character in "-_") else "_" for character in text)[:80]


def _put(archive: zipfile.ZipFile, name: str, value: Any) -> None:
    archive.writestr(name, json.dumps(value, ensure_ascii=False, allow_nan=False))


def _count(log: _Log, record: EpisodeRecord, sample: dict[str, Any]) -> None:
    log.ids[sample["id"]] = None
    log.epochs = max(log.epochs, sample["epoch"])
    log.times.append(record.row.sampled_at)
    if record.row.score is None:
        log.unscored += 1
    else:
        log.scores.append(record.row.score)
    fields = ("id", "epoch", "input", "target", "scores", "started_at", "completed_at", "total_time", "working_time", "uuid")
    metadata = {name: sample["metadata"][name] for name in ("task_id", "kind", "outcome", "step")}
    error = sample.get("error", {}).get("message")
    summary = {name: sample[name] for name in fields} | {"metadata": metadata, "completed": True, "message_count": len(sample["messages"])}
    log.summaries.append(summary | ({"error": error} if error else {}))


def _spec(log: _Log) -> dict[str, Any]:
    return {
        "eval_id": log.name,
        "run_id": log.name,
        "created": _time(max(log.times, default=0.0)),
        "task": log.name,
        "task_id": log.name,
        "dataset": {"name": log.name, "samples": len(log.ids), "sample_ids": list(log.ids)},
        "model": log.model,
        "config": {"epochs": log.epochs},
        "packages": {"agentrl": __version__},
        "scorers": [{"name": SCORER}],
    }


def _results(log: _Log) -> dict[str, Any]:
    metrics = {}
    if log.scores and max(map(abs, log.scores)) < _MOST:
        rate = Rate.from_scores(log.scores)
        values = {"mean": rate.value, "ci_low": rate.ci_low, "ci_high": rate.ci_high}
        metrics = {name: {"name": name, "value": value} for name, value in values.items()}
    score = {"name": SCORER, "scorer": SCORER, "scored_samples": len(log.scores), "unscored_samples": log.unscored, "metrics": metrics}
    return {"total_samples": log.samples, "completed_samples": log.samples, "scores": [score]}


def _sample(record: EpisodeRecord) -> dict[str, Any]:
    row, episode, score = record.row, record.scored.episode, record.scored.score
    main, *others = episode.trajectories or (Trajectory(agent="main", turns=()),)
    messages = _messages(main.prompt or record.group.prompt, main)
    parts = {name: value for name, value in score.parts.items() if math.isfinite(value)}
    scores = {SCORER: {"value": row.score, "answer": episode.answer, "explanation": score.evidence, "metadata": {"parts": parts}}}
    ended, started = _time(row.sampled_at), _time(row.sampled_at - row.seconds)
    limit = _LIMITS.get(row.stop_reason)
    sample: dict[str, Any] = {
        "id": safe_name(row.id) if row.group is None else f"g{row.group:06d}",
        "epoch": 1 if row.group is None else row.attempt + 1,
        "input": _messages(record.group.prompt, None),
        "target": "",
        "messages": messages,
        "output": _output(main, f"agentrl@{row.newest_version}"),
        "scores": scores if row.score is not None else {},
        "metadata": {
            **{"task_id": row.task_id, "kind": row.kind, "split": row.split, "outcome": row.outcome, "step": row.step},
            METADATA: _exact(record, [_messages(trajectory.prompt, trajectory) for trajectory in others]),
        },
        "started_at": started,
        "completed_at": ended,
        "total_time": row.seconds,
        "working_time": row.seconds,
        "uuid": f"{row.phase}-{row.id}",
        "turn_count": row.turns,
    }
    if row.outcome == "excluded":
        why = f"{row.blame} {row.exclusion}: {score.reason}".strip()
        sample["error"] = {"message": why, "traceback": why, "traceback_ansi": why}
    return sample | ({"limit": {"type": limit, "limit": 0}} if limit else {})


def _exact(record: EpisodeRecord, others: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the data for which inspect_ai has no field.

    The tokens of a trajectory are in order: prompt, completion, prompt, completion, and so on.
    """
    row, trajectories = record.row, record.scored.episode.trajectories
    exact = [
        {
            "agent": one.agent,
            "parent": None if one.parent is None else asdict(one.parent),
            "stop_reason": one.stop_reason,
            "inherited": list(one.inherited),
            "turns": [_tokens(turn) for turn in one.turns],
            "messages": [] if number == 0 else others[number - 1],
        }
        for number, one in enumerate(trajectories)
    ]
    names = ("phase", "state", "unused", "exclusion", "blame", "oldest_version", "newest_version", "tokens")
    return {"episode": row.id, **{name: getattr(row, name) for name in names}, "trajectories": exact}


def _tokens(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_ids": list(turn.prompt_ids),
        "completion_ids": list(turn.completion_ids),
        "logprobs": [finite(value) for value in turn.logprobs],
        "versions": [[span.version, span.start, span.end] for span in turn.versions],
        "forced": list(turn.forced),
        "finish_reason": turn.finish_reason,
        "generate_s": finite(turn.generate_s),
        "tool_s": finite(turn.tool_s),
    }


def _messages(prompt: Sequence[Message], trajectory: Trajectory | None) -> list[dict[str, Any]]:
    """Returns the prompt of a trajectory, then its turns and tool results, as chat messages."""
    messages = [_message(message, f"p{number}") for number, message in enumerate(prompt)]
    for number, turn in enumerate(trajectory.turns if trajectory is not None else ()):
        messages.append(_message(turn.message, f"t{number}"))
        for index, result in enumerate(turn.tool_results):
            error = {} if result.ok else {"error": {"type": "unknown", "message": "the call failed"}}
            answers = {"role": "tool", "content": result.output, "function": result.name, "tool_call_id": f"t{number}c{index}"}
            messages.append(answers | error)
    return messages


def _message(message: Message, name: str) -> dict[str, Any]:
    role = message.role if message.role in ("system", "user", "assistant", "tool") else "user"
    calls = [_call(call, f"{name}c{number}") for number, call in enumerate(message.tool_calls)]
    return {"role": role, "content": message.content} | ({"tool_calls": calls} if calls and role == "assistant" else {})


def _call(call: ToolCall, name: str) -> dict[str, Any]:
    return {"id": name, "function": call.name, "arguments": dict(call.arguments), "type": "function"}


def _output(main: Trajectory, model: str) -> dict[str, Any]:
    if not main.turns:
        return {"model": model}
    last = main.turns[-1]
    message = _message(last.message, f"t{len(main.turns) - 1}") | {"role": "assistant"}
    return {"model": model, "choices": [{"message": message, "stop_reason": _STOPS.get(last.finish_reason, "unknown")}]}


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(max(seconds, 0.0), UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # a run from a third party may contain any number
        return datetime.fromtimestamp(0, UTC).isoformat()
