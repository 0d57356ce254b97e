"""The JSON for captured failures: counts by tag, traces, clusters, and the outcomes of the same task before and after training."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.numbers import finite
from agentrl.errors import StoreError, UserError
from agentrl.failure.collection import FILE, Collection, TraceFilter, TraceRow
from agentrl.failure.digest import build_digest
from agentrl.failure.trace import Trace
from agentrl.observe.rundata import Line, as_list, iter_lines
from agentrl.records import ScoredEpisode
from agentrl.view.episode_data import Budget, episode_tree
from agentrl.view.group_data import failures_data as failures_of
from agentrl.view.group_data import score_data
from agentrl.view.source import Missing, RunSource

if TYPE_CHECKING:
    from agentrl.view.routes import Query

_PAGE = 100
_MAX_BODY = 4 << 20  # maximum compressed size in bytes of a trace that is shown
_MAX_TRANSCRIPTS = 64 << 20
_CLUSTER_S = 45.0
_CLUSTERS = 40
_ELSEWHERE = 12
_PHASES = ("before", "after", "train")


def failures_data(source: RunSource, query: Query) -> dict[str, Any]:
    """Returns the counts of a run's failures, and a page of the traces that match the filters, the newest first.
    Raises `UserError` if the run has no captured failures, `RequestError` for an invalid filter, and `StoreError` as `Collection` does."""
    with _open(source.path) as collection:
        wanted = TraceFilter(
            tag=query.text("tag"),
            kind=query.text("kind"),
            phase=query.text("phase"),
            why=query.text("why"),
            version=query.number("version"),
        )
        offset = query.count("offset")
        rows = collection.rows(wanted, most=offset + _PAGE, newest=True)[offset:]
        digest = {key: value for key, value in build_digest(collection).items() if key != "examples"}
        kinds = {str(kind): times for (kind,), times in collection.counts("kind").items()}
        return {
            "run": source.id,
            "digest": digest,
            "kinds": kinds,
            "matching": collection.count_matching(wanted),
            "rows": [_row(row) for row in rows],
        }


def clusters_data(source: RunSource, query: Query) -> dict[str, Any]:
    """Returns the largest clusters of similar failures. A separate process computes the clusters, so that its memory is freed at the
    end. Raises `StoreError` if the process fails or takes longer than 45 s."""
    filters = [f"--{name}={value}" for name in ("tag", "kind", "phase") if (value := query.text(name))]
    # -P: modules must not be imported from the current folder, which may come from a third party
    command = [sys.executable, "-P", "-m", "agentrl", "failures", "cluster", str(source.path), "--json", *filters]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CLUSTER_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise StoreError(f"clustering took longer than {_CLUSTER_S:g} s\n  fix: filter by tag or phase") from None
    if done.returncode:
        raise StoreError(f"clustering failed: {done.stderr.decode('utf-8', 'replace')[-600:]}")
    clusters = json.loads(done.stdout)
    shown = [{**cluster, "ids": cluster["ids"][:20], "count": len(cluster["ids"])} for cluster in clusters[:_CLUSTERS]]
    return {"run": source.id, "clusters": shown, "total": len(clusters)}


def trace_data(source: RunSource, name: str) -> dict[str, Any]:
    """Returns a trace, and the outcomes of the same task in other phases. Raises `Missing` if there is no such trace,
    `UserError` if the run has no captured failures, and `StoreError` if the trace is too large or cannot be read."""
    with _open(source.path) as collection:
        row = next(iter(collection.rows(TraceFilter(ids=(name,)))), None)
        if row is None:
            raise Missing(f"the run has no trace {name[:100]!r}", fix="return to the list of failures")
        if row.bytes > _MAX_BODY:
            raise StoreError(f"trace {name[:100]} has {row.bytes >> 20} MiB compressed and is not shown\n  fix: agentrl failures export")
        trace = collection.get(row.id)
    if trace is None:
        raise Missing(f"the trace {name[:100]!r} was dropped", fix="return to the list of failures")
    return {
        "run": source.id,
        **_row(row),
        "tags": [asdict(tag) for tag in trace.tags],
        "missing": list(trace.missing[:20]),
        **_content(source, trace),
        "elsewhere": _elsewhere(source.path, row.task_id),
    }


def _content(source: RunSource, trace: Trace) -> dict[str, Any]:
    budget = Budget(1_000_000)
    if trace.episode is None or trace.task is None:
        spoken = [
            {
                "role": utterance.message.role[:40],
                "content": budget.cut(utterance.message.content),
                "calls": [call.name for call in utterance.message.tool_calls],
            }
            for utterance in trace.spoken[:400]
        ]
        return {"spoken": spoken, "trajectories": [], "score": None, "failures": [], "truth": None, "prompt": []}
    vocabulary, _ = source.vocabulary()
    prompt = [{"role": message.role[:40], "content": budget.cut(message.content)} for message in trace.task.prompt[:50]]
    truth = trace.task.data.get("answer")
    scored = None if trace.score is None else ScoredEpisode(episode=trace.episode, score=trace.score)
    return {
        "spoken": [],
        "prompt": prompt,
        "truth": None if truth is None else budget.cut(truth if isinstance(truth, str) else json.dumps(truth)),
        "trajectories": episode_tree(trace.episode, budget, vocabulary),
        "score": None if scored is None else score_data(scored, chars=20_000),
        "failures": [] if scored is None else failures_of(scored, chars=4000),
        "stop": trace.episode.stop_reason,
        "answer": None if trace.episode.answer is None else budget.cut(trace.episode.answer),
    }


def _elsewhere(path: Path, task: str) -> list[dict[str, Any]]:
    """Returns the attempts at a task from the run's transcripts, ordered by phase."""
    shown: list[dict[str, Any]] = []
    for phase in _PHASES if task else ():
        file = path / "episodes" / f"{phase}.jsonl"
        lines = iter_lines(file, {"task_id": str, "messages": list}, [], most=_MAX_TRANSCRIPTS, inside=path)
        shown += [transcript_data(phase, line) for line in islice((line for line in lines if line["task_id"] == task), _ELSEWHERE)]
    return shown[:_ELSEWHERE]


def transcript_data(phase: str, line: Line) -> dict[str, Any]:
    """Returns a transcript from the folder `episodes` or from an evaluation, with its strings clipped."""
    messages = [message for message in line["messages"][:100] if isinstance(message, dict)]
    score = line.get("score")
    return {
        "phase": phase,
        "step": line.get("step") if isinstance(line.get("step"), int) else None,
        "score": finite(score) if isinstance(score, int | float) else None,
        "answer": str(line.get("answer") or "")[:2000],
        "messages": [
            {"role": str(message.get("role"))[:40], "content": str(message.get("content") or "")[:8000], "calls": _calls(message)}
            for message in messages
        ],
    }


def _calls(message: Line) -> list[dict[str, str]]:
    calls = [call for call in as_list(message.get("tool_calls"))[:20] if isinstance(call, dict)]
    return [{"name": str(call.get("name"))[:100], "arguments": json.dumps(call.get("arguments"))[:8000]} for call in calls]


def _row(row: TraceRow) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in ("id", "phase", "step", "version", "why", "tag", "kind", "question", "bytes")}
    step = row.step + 1 if row.phase == "train" else row.step  # during training, steps are counted from 0
    return {**fields, "step": step, "task": row.task_id, "score": finite(row.score)}


def _open(path: Path) -> Collection:
    if not (path / FILE).is_file():
        raise UserError("this run has no captured failures", fix="return after an episode of the run fails")
    return Collection(path)
