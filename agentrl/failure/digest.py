"""`failures/failures.json`: the failures of a run in one small file, which the report and the summary read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.errors import StoreError
from agentrl.failure.collection import FILE, Collection
from agentrl.failure.listing import TraceFilter
from agentrl.failure.render import deciding_tag
from agentrl.failure.timeline import Timeline, timeline_of, truncate_middle
from agentrl.failure.trace import Trace
from agentrl.failure.triage import deciding_tag_name

DIGEST = "failures/failures.json"
_TAGS = 12  # told apart
_EXAMPLES = 5
_OTHERS = "others"


def write_digest(run_dir: Path) -> dict[str, Any] | None:
    """Writes what there is of failures in a run folder; None, and no file, where nothing was captured."""
    if not (run_dir / FILE).is_file():
        return None
    with Collection(run_dir) as collection:
        digest = build_digest(collection)
    write_atomically(run_dir / DIGEST, json.dumps(digest, ensure_ascii=False) + "\n")
    return digest


def failures_by_tag(run_dir: Path) -> dict[str, int]:
    """Tag -> failures, as the digest has them; empty without one."""
    try:
        tags = json.loads((run_dir / DIGEST).read_bytes())["tags"]
        return {str(tag): int(times) for tag, times in tags.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def build_digest(collection: Collection) -> dict[str, Any]:
    """Failures by tag, over phases, and over the steps and versions of training, with how many episodes there were; and some to read."""
    tags = Counter[str]()
    for (tag,), times in collection.counts("tag").items():
        tags[str(tag)] += times
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
    """A line for each value of a field, in its order: how many episodes, and how many of each tag."""
    found: dict[Any, Counter[str]] = {}
    for (value, of_phase, tag), times in collection.counts(by, "phase", "tag").items():
        if phase in ("", of_phase):
            found.setdefault(value, Counter())[tag] += times
    lines = []
    for value, counts in sorted(found.items(), key=lambda item: _order(item[0])):
        named = {tag: counts[tag] for tag in names if counts[tag]}
        rest = sum(times for tag, times in counts.items() if tag and tag not in named)
        lines.append({by: value, "episodes": counts.total(), "tags": named | ({_OTHERS: rest} if rest else {})})
    return lines


def _order(value: Any) -> tuple[int, int, str]:
    """Numbers by size; phases as they are in a run: before, train, step4, step8, after."""
    if isinstance(value, int):
        return (0, value, "")
    places = {"before": 0, "train": 1, "after": 3}
    name = str(value)
    step = int(name[4:]) if name.startswith("step") and name[4:].isascii() and name[4:].isdigit() and len(name) < 16 else 0
    return (places.get(name, 2), step, name)


def _examples(collection: Collection, names: list[str]) -> list[dict[str, Any]]:
    """The newest failure of each of the most frequent tags."""
    found = []
    for name in names[:_EXAMPLES]:
        for row in collection.rows(TraceFilter(tag=name), most=1, newest=True):
            try:
                trace = collection.get(row.id)
            except StoreError:
                continue  # the list names what is damaged
            if trace is not None:
                found.append(example_of(trace))
    return found


def example_of(trace: Trace) -> dict[str, Any]:
    """A trace as the report shows an episode, with its tag."""
    seen, first = timeline_of(trace), deciding_tag(trace.tags)
    return {
        "trace": trace.id,
        "tag": deciding_tag_name(trace.tags),
        "turn": None if first is None else first.turn,
        "note": "" if first is None else first.note,
        "why": str(trace.why),
        "phase": trace.phase,
        "step": trace.step,
        "task_id": "" if trace.task is None else trace.task.id,
        "split": "" if trace.task is None else str(trace.task.split),
        "kind": "" if trace.task is None else trace.task.kind,
        "question": seen.question,
        "answer": seen.answer,
        "truth": seen.truth,
        "score": None if trace.score is None else trace.score.value,
        "stop_reason": seen.stop_reason,
        "versions": list(trace.versions),
        "left_out": trace.episode is not None and trace.episode.left_out,
        "messages": _messages(seen),
    }


def _messages(seen: Timeline) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "user", "content": seen.question, "tool_calls": []}]
    if seen.instructions.strip():
        said.insert(0, {"role": "system", "content": seen.instructions, "tool_calls": []})
    for step in seen.steps[:40]:
        calls = [{"name": call.tool, "arguments": _shown(call.arguments, call.arguments_text)} for call in step.calls]
        said.append({"role": "assistant", "content": truncate_middle(step.text, 4000), "tool_calls": calls})
        outputs = [*(call.output for call in step.calls if call.ok is not None or call.output), *step.malformed]
        said += [{"role": "tool", "content": truncate_middle(output, 4000), "tool_calls": []} for output in outputs]
    return said


def _shown(arguments: Any, shown: str) -> Any:
    """Arguments as they are where they are short, else as text that was cut."""
    return dict(arguments) if len(shown) < 8000 else {"arguments": truncate_middle(shown, 8000)}
