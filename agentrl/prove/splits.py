"""No held-out task is a training task under another name, judged by all that the agent sees of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from agentrl.protocols import TaskFamily
from agentrl.prove.findings import Finding, Proof, clipped, examples, plural
from agentrl.prove.source import FamilySource, place_name
from agentrl.records import Split, Task
from agentrl.task import make_task

NAME = "no held-out task is a training task"
SAMPLE = 2000
"""Tasks of each split without end that are compared."""
DRAW_S = 30.0
"""Seconds for drawing the tasks of one split; a family that makes them slowly is compared by fewer."""
GUESSED = 0.2
"""Share of tasks from which it is told that one and the same answer is right."""


def prove_splits(source: FamilySource, sizes: Mapping[Split, int]) -> Proof:
    """Compares prompt, files, tools, outputs and image of all tasks of a finite split, and of `SAMPLE` or more of an endless one."""
    family = source.open()
    drawn: dict[Split, list[Task]] = {}
    cut: list[str] = []
    for split in Split:
        size = family.size(split)
        wanted = max(SAMPLE, sizes[split]) if size is None else size
        drawn[split] = _draw(family, split, wanted)
        if len(drawn[split]) < wanted or size is None:
            cut.append(f"{plural(len(drawn[split]), 'task')} of {split}{' of endless many' if size is None else f' of {size:,}'}")
    seen = {split: [_seen(task, source.root) for task in tasks] for split, tasks in drawn.items()}
    found = [finding for split in (Split.HELDOUT, Split.HELDOUT_REAL) for finding in _equal(drawn, seen, split)]
    for split, tasks in drawn.items():
        found += [*_misplaced(split, tasks), *_repeats(split, seen[split]), *_guesses(split, tasks)]
    found += _same_names([task for tasks in drawn.values() for task in tasks], [key for keys in seen.values() for key in keys])
    return Proof(
        name=NAME,
        looked_at=", ".join(f"{len(tasks):,} {split}" for split, tasks in drawn.items()) + " tasks",
        findings=tuple(found),
        unproven=(f"that tasks beyond those compared are apart as well ({', '.join(cut)})",) if cut else (),
    )


def _draw(family: TaskFamily, split: Split, count: int) -> list[Task]:
    """Tasks that can be made; the others are told by the proof of purity."""
    tasks: list[Task] = []
    started = time.monotonic()
    for index in range(count):
        if time.monotonic() - started > DRAW_S:
            break
        try:
            task = make_task(family, split, index)
            json.dumps(asdict(task))
        except Exception:  # a family is anybody's code
            continue
        tasks.append(task)
    return tasks


def _seen(task: Task, root: Path) -> str:
    """Hash of what the agent can tell a task by."""
    prompt = [asdict(message) for message in task.prompt]
    image = task.data.get("build_context") or _recipe(root / task.sandbox.image / "image.toml") or task.sandbox.image
    parts = [prompt, dict(task.files), dict(task.binary_files), sorted(task.tools), sorted(task.outputs), image]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _recipe(path: Path) -> str:
    """Two folders with the same image recipe are one image."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _equal(drawn: Mapping[Split, list[Task]], seen: Mapping[Split, list[str]], split: Split) -> list[Finding]:
    training = dict(zip(seen[Split.TRAIN], drawn[Split.TRAIN], strict=True))
    pairs = [(task, training[key]) for task, key in zip(drawn[split], seen[split], strict=True) if key in training]
    if not pairs:
        return []
    shown = examples([f"{task.id} is {other.id}" for task, other in pairs])
    what = f"{len(pairs):,} of {len(drawn[split]):,} tasks in {split} show the agent just what a training task shows it: {shown}"
    return [Finding(severity="failure", what=what, tasks=tuple(task.id for task, _ in pairs))]


def _misplaced(split: Split, tasks: list[Task]) -> list[Finding]:
    wrong = [(place_name((split, index)), task) for index, task in enumerate(tasks) if task.split is not split]
    if not wrong:
        return []
    what = f"{plural(len(wrong), 'task')} asked for as {split} say that they are of split {wrong[0][1].split}"
    return [Finding(severity="failure", what=what, tasks=tuple(name for name, _ in wrong))]


def _repeats(split: Split, seen: list[str]) -> list[Finding]:
    repeats = len(seen) - len(set(seen))
    if not repeats:
        return []
    effect = "an interval of an evaluation is narrower than it should be" if split is not Split.TRAIN else "they are trained on more often"
    return [Finding(severity="note", what=f"{repeats:,} of {len(seen):,} tasks in {split} repeat another one of it: {effect}")]


def _guesses(split: Split, tasks: list[Task]) -> list[Finding]:
    answers = [str(task.data["answer"]) for task in tasks if isinstance(task.data.get("answer"), str | int | float)]
    if len(answers) < 10:
        return []
    answer, times = Counter(answers).most_common(1)[0]
    if times < GUESSED * len(answers):
        return []
    share = times / len(answers)
    return [Finding(severity="note", what=f"answering {clipped(answer)!r} to everything is right in {share:.0%} of the tasks in {split}")]


def _same_names(tasks: list[Task], seen: list[str]) -> list[Finding]:
    contents: dict[str, set[str]] = {}
    for task, key in zip(tasks, seen, strict=True):
        contents.setdefault(task.id, set()).add(f"{task.split} {key}")
    twice = [name for name, keys in contents.items() if len(keys) > 1]
    if not twice:
        return []
    what = f"different tasks have the same id, and transcripts are found by it: {examples(twice)}"
    return [Finding(severity="warning", what=what, tasks=tuple(twice))]
