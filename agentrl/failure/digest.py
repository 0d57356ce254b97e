"""Writes `failures/failures.json`, a summary of a run's failures that the report and `summary.json` use."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.errors import StoreError
from agentrl.failure.collection import FILE, Collection, TraceFilter
from agentrl.failure.timeline import Timeline, timeline_of, truncate_middle
from agentrl.failure.trace import Trace, deciding_tag, deciding_tag_name

DIGEST = "failures/failures.json"
_TAGS = 12  # maximum number of tags that are counted separately; all other tags are counted together
_EXAMPLES = 5
_OTHERS = "others"


def write_digest(run_dir: Path) -> dict[str, Any] | None:
    """Writes the digest of a run to its folder and returns it. If the run has no collection of traces, writes nothing and returns None."""
    if not (run_dir / FILE).is_file():
        return None
    with Collection(run_dir) as collection:
        digest = build_digest(collection)
    write_atomically(run_dir / DIGEST, json.dumps(digest, ensure_ascii=False) + "\n")
    return digest


def failures_by_tag(run_dir: Path) -> dict[str, int]:
    """Returns a mapping tag -> number of failures, read from the digest; empty if the digest is missing or invalid."""
    try:
        tags = json.loads((run_dir / DIGEST).read_bytes())["tags"]
        return {str(tag): int(times) for tag, times in tags.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def build_digest(collection: Collection) -> dict[str, Any]:
    """Returns the number of failures by tag (in total, by phase, by training step, and by version), and example traces."""
    tags = Counter({str(tag): times for (tag,), times in collection.counts("tag").items()})
    passed = tags.pop("", 0)
    names = [tag for tag, _ in tags.most_common(_TAGS)]
    return {
        "episodes": tags.total() + passed,
        "failures": tags.total(),
        "kept": len(collection),
        "dropped": sum(collection.dropped().values()),
        "tags": {tag: tags[tag] for tag in names} | ({_OTHERS: rest} if (rest := tags.total() - sum(tags[n] for n in names)) else {}),
        "why": {str(why): times for (why,), times in collection.counts("why").items() if why},
        "phases": _grouped(collection, "phase", names),
        "steps": _grouped(collection, "step", names, phase="train"),
        "versions": _grouped(collection, "version", names, phase="train"),
        "examples": _examples(collection, names),
    }


def _grouped(collection: Collection, by: str, names: list[str], *, phase: str = "") -> list[dict[str, Any]]:
    """Returns one entry for each value of the field `by`, in order, with the number of episodes and the number of failures by tag."""
    groups: dict[Any, Counter[str]] = {}
    for (value, of_phase, tag), times in collection.counts(by, "phase", "tag").items():
        if phase in ("", of_phase):
            groups.setdefault(value, Counter())[tag] += times
    entries = []
    for value, counts in sorted(groups.items(), key=lambda item: _order(item[0])):
        tags = {tag: counts[tag] for tag in names if counts[tag]}
        rest = sum(times for tag, times in counts.items() if tag and tag not in tags)
        entries.append({by: value, "episodes": counts.total(), "tags": tags | ({_OTHERS: rest} if rest else {})})
    return entries


def _order(value: Any) -> tuple[int, int, str]:
    """Returns a sort key that orders numbers by value, and phases as in a run: before, train, step4, step8, after."""
    if isinstance(value, int):
        return (0, value, "")
    name = str(value)
    step = int(name[4:]) if name.startswith("step") and name[4:].isascii() and name[4:].isdigit() and len(name) < 16 else 0
    return ({"before": 0, "train": 1, "after": 3}.get(name, 2), step, name)


def _examples(collection: Collection, names: list[str]) -> list[dict[str, Any]]:
    """Returns an example for each of the most frequent tags: the newest failure with that tag."""
    examples = []
    for name in names[:_EXAMPLES]:
        for row in collection.rows(TraceFilter(tag=name), most=1, newest=True):
            try:
                trace = collection.get(row.id)
            except StoreError:  # `agentrl failures list` reports damaged traces
                continue
            if trace is not None:
                examples.append(example_of(trace))
    return examples


def example_of(trace: Trace) -> dict[str, Any]:
    """Returns a trace and its tag in the form in which the report shows episodes."""
    timeline, tag, task = timeline_of(trace), deciding_tag(trace.tags), trace.task
    return {
        "trace": trace.id,
        "tag": deciding_tag_name(trace.tags),
        "turn": None if tag is None else tag.turn,
        "note": "" if tag is None else tag.note,
        "why": str(trace.why),
        "phase": trace.phase,
        "step": trace.step,
        "task_id": "" if task is None else task.id,
        "split": "" if task is None else str(task.split),
        "kind": "" if task is None else task.kind,
        "question": timeline.question,
        "answer": timeline.answer,
        "truth": timeline.truth,
        "score": None if trace.score is None else trace.score.value,
        "stop_reason": timeline.stop_reason,
        "versions": list(trace.versions),
        "left_out": trace.episode is not None and trace.episode.left_out,
        "messages": _messages(timeline),
    }


def _messages(timeline: Timeline) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": timeline.question, "tool_calls": []}]
    if timeline.instructions.strip():
        messages.insert(0, {"role": "system", "content": timeline.instructions, "tool_calls": []})
    for step in timeline.steps[:40]:
        calls = [{"name": call.tool, "arguments": _arguments(call.arguments, call.arguments_text)} for call in step.calls]
        messages.append({"role": "assistant", "content": truncate_middle(step.text, 4000), "tool_calls": calls})
        outputs = [*(call.output for call in step.calls if call.ok is not None or call.output), *step.malformed]
        messages += [{"role": "tool", "content": truncate_middle(output, 4000), "tool_calls": []} for output in outputs]
    return messages


def _arguments(arguments: Any, text: str) -> Any:
    """Returns short arguments unchanged, and long arguments as truncated text."""
    return dict(arguments) if len(text) < 8000 else {"arguments": truncate_middle(text, 8000)}
