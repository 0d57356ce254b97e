"""Checks that every held-out task differs from all training tasks in something that the agent sees."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from agentrl.base.numbers import plural
from agentrl.check.purity import FamilySource, draw_name
from agentrl.check.report import Finding, Proof, join_examples, shorten
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task
from agentrl.task import make_task

NAME = "no held-out task is a training task"
SAMPLE = 2000  # minimum number of tasks that are compared in each endless split
DRAW_S = 30.0  # time limit for drawing the tasks of one split, in seconds; fewer tasks are compared if a family is slow
GUESSED = 0.2  # a correct answer is reported if at least this fraction of the tasks share it


def prove_splits(source: FamilySource, sizes: Mapping[Split, int]) -> Proof:
    """Compares the prompts, files, tools, outputs and images of tasks: all tasks of a finite split, and at least `SAMPLE` tasks of an
    endless split, but only the tasks that can be drawn within `DRAW_S` seconds."""
    family = source.open()
    created: dict[Split, dict[int, Task]] = {}
    cut: list[str] = []
    for split in Split:
        size = family.size(split)
        wanted = max(SAMPLE, sizes[split]) if size is None else size
        created[split] = _draw(family, split, wanted)
        if len(created[split]) < wanted or size is None:
            cut.append(f"{plural(len(created[split]), 'task')} of {split}{' of infinitely many' if size is None else f' of {size:,}'}")
    drawn = {split: list(tasks.values()) for split, tasks in created.items()}
    seen = {split: [_agent_view_hash(task, source.root) for task in tasks] for split, tasks in drawn.items()}
    findings = [finding for split in (Split.HELDOUT, Split.HELDOUT_REAL) for finding in _equal(drawn, seen, split)]
    for split, tasks in drawn.items():
        findings += [*_misplaced(split, created[split]), *_repeats(split, seen[split]), *_guesses(split, tasks)]
    findings += _same_names([task for tasks in drawn.values() for task in tasks], [key for keys in seen.values() for key in keys])
    return Proof(
        name=NAME,
        looked_at=", ".join(f"{len(tasks):,} {split}" for split, tasks in drawn.items()) + " tasks",
        findings=tuple(findings),
        unproven=(f"that the splits differ beyond the tasks compared ({', '.join(cut)})",) if cut else (),
    )


def _draw(family: TaskFamily, split: Split, count: int) -> dict[int, Task]:
    """Returns index -> task for the tasks that can be created within `DRAW_S`. The proof of purity reports tasks that cannot be created."""
    tasks: dict[int, Task] = {}
    started = time.monotonic()
    for index in range(count):
        if time.monotonic() - started > DRAW_S:
            break
        try:
            task = make_task(family, split, index)
            json.dumps(asdict(task))
        except Exception:  # a family is user code
            continue
        tasks[index] = task
    return tasks


def _agent_view_hash(task: Task, root: Path) -> str:
    """Returns the hash of everything that the agent sees in a task."""
    prompt = [asdict(message) for message in task.prompt]
    name = task.sandbox.image if task.sandbox is not None else ""
    image = task.data.get("build_context") or _recipe(root / name / "image.toml") or name
    parts = [prompt, dict(task.files), dict(task.binary_files), sorted(task.tools), sorted(task.outputs), image]
    parts += [] if task.environment is None else [asdict(task.environment), task.data.get("sha256")]  # digest of a hosted sample
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _recipe(path: Path) -> str:
    """Returns the image recipe's text, so that two folders with the same recipe count as one image; empty if there is no recipe."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _equal(drawn: Mapping[Split, list[Task]], seen: Mapping[Split, list[str]], split: Split) -> list[Finding]:
    training = dict(zip(seen[Split.TRAIN], drawn[Split.TRAIN], strict=True))
    pairs = [(task, training[key]) for task, key in zip(drawn[split], seen[split], strict=True) if key in training]
    if not pairs:
        return []
    shown = join_examples([f"{task.id} is {other.id}" for task, other in pairs])
    text = f"{len(pairs):,} of {len(drawn[split]):,} tasks in {split} show the agent the same content as a training task: {shown}"
    return [Finding(severity="failure", what=text, tasks=tuple(task.id for task, _ in pairs))]


def _misplaced(split: Split, tasks: Mapping[int, Task]) -> list[Finding]:
    wrong = [(draw_name((split, index)), task) for index, task in tasks.items() if task.split is not split]
    if not wrong:
        return []
    text = f"{plural(len(wrong), 'task')} drawn from {split} have split {wrong[0][1].split}"
    return [Finding(severity="failure", what=text, tasks=tuple(name for name, _ in wrong))]


def _repeats(split: Split, seen: list[str]) -> list[Finding]:
    repeats = len(seen) - len(set(seen))
    if not repeats:
        return []
    effect = (
        "confidence intervals of evaluations are too narrow" if split is not Split.TRAIN else "the policy is trained on them more often"
    )
    return [Finding(severity="note", what=f"{repeats:,} of {len(seen):,} tasks in {split} repeat another task: {effect}")]


def _guesses(split: Split, tasks: list[Task]) -> list[Finding]:
    answers = [str(task.data["answer"]) for task in tasks if isinstance(task.data.get("answer"), str | int | float)]
    if len(answers) < 10:
        return []
    answer, times = Counter(answers).most_common(1)[0]
    if times < GUESSED * len(answers):
        return []
    share = times / len(answers)
    return [Finding(severity="note", what=f"the answer {shorten(answer)!r} is correct in {share:.0%} of the tasks in {split}")]


def _same_names(tasks: list[Task], seen: list[str]) -> list[Finding]:
    contents: dict[str, set[str]] = {}
    for task, key in zip(tasks, seen, strict=True):
        contents.setdefault(task.id, set()).add(f"{task.split} {key}")
    twice = [name for name, keys in contents.items() if len(keys) > 1]
    if not twice:
        return []
    text = f"different tasks have the same id, which identifies them in transcripts: {join_examples(twice)}"
    return [Finding(severity="warning", what=text, tasks=tuple(twice))]
