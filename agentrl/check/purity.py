"""Opens task families, and checks that the same seed, split and index give the same task if the task is drawn again, in a different order,
or in a different process.

`python -m agentrl.check.purity` draws the tasks that are listed on standard input, in an order that differs from the list. The caller sets
a different hash seed for this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.error_text import one_line_error
from agentrl.base.numbers import plural
from agentrl.base.processes import die_with_parent, import_environment
from agentrl.check.report import Finding, Proof, join_examples, shorten_difference
from agentrl.config.recipe import MCPConfig, TasksConfig, ToolConfig
from agentrl.plugins.references import add_project_root
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task
from agentrl.task import make_task, open_family

Draw = tuple[Split, int]  # a task by split and index
_PARTED = ("data", "files", "binary_files")  # fields that are compared entry by entry
NAME = "the same seed, split and index give the same task"
_FAR = tuple(10_007 * number for number in range(1, 9))  # additional indices drawn from an endless split
_SEED_TASKS = 8
TIMEOUT_S = 600.0

Drawn = Mapping[str, tuple[str, str]] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySource:
    """Opens a family from a recipe, or from a folder of task folders (whose path is `tasks.family`)."""

    tasks: TasksConfig
    root: Path
    seed: int = 0
    mcp: Mapping[str, MCPConfig] = field(default_factory=dict)
    tools: Mapping[str, ToolConfig] = field(default_factory=dict)

    def open(self, *, seed: int | None = None) -> TaskFamily:
        """Opens the family. Raises the same errors as `open_family`."""
        return open_family(self.tasks, seed=self.seed if seed is None else seed, root=self.root)


def draw_name(draw: Draw) -> str:
    """Returns the draw as text, such as "train 3"."""
    return f"{draw[0]} {draw[1]}"


def split_sizes(family: TaskFamily, count: int | None) -> dict[Split, int]:
    """Returns the number of tasks to examine in each split, at most `count`. Raises `ValueError` if a split is endless and `count` is
    None."""
    number: dict[Split, int] = {}
    for split in Split:
        size = family.size(split)
        if size is None and count is None:
            raise ValueError(f"{family.name} has infinitely many tasks")
        number[split] = min(limit for limit in (size, count) if limit is not None)
    return number


def prove_purity(source: FamilySource, sizes: Mapping[Split, int]) -> Proof:
    """Draws the tasks three times (in order, in reverse order from the same family, and in another process with a different hash seed), and
    reports the tasks that differ or cannot be created, and an empty training split. Raises the errors of `FamilySource.open`."""
    family = source.open()
    draws = [(split, index) for split, size in sizes.items() for index in range(size)]
    draws += [(split, index) for split in Split if family.size(split) is None for index in _FAR]
    first = {draw: _draw(family, draw) for draw in draws}
    again = {draw: _draw(family, draw) for draw in reversed(draws)}
    try:
        other = dict(zip(draws, _draw_in_subprocess(source, draws), strict=True))
    except RuntimeError as error:
        findings = [Finding(severity="failure", what=f"the family cannot be opened in another process: {error}")]
    else:
        findings = _differences(first, other, "in another process with a different hash seed")
    cannot = [draw for draw, drawn in first.items() if isinstance(drawn, str)]
    if cannot:
        text = f"{plural(len(cannot), 'task')} cannot be created: {first[cannot[0]]}"
        findings.insert(0, Finding(severity="failure", what=text, tasks=tuple(map(draw_name, cannot))))
    if family.size(Split.TRAIN) == 0:
        findings.append(Finding(severity="failure", what="split train has no tasks, so no policy can be trained"))
    findings += _differences(first, again, "when drawn again in a different order")
    return Proof(
        name=NAME,
        looked_at=f"{plural(len(draws), 'task')}, each drawn three times, once in another process",
        findings=(*findings, *_by_seed(source, sizes)),
    )


def digests(task: Task) -> dict[str, tuple[str, str]]:
    """Returns, for each field of a task, the hash of its text and the start of the text for display. A field has a name, such as
    `data.answer`. Raises `ValueError` with the field's name if a field cannot be written as JSON."""
    fields: dict[str, tuple[str, str]] = {}
    for name, value in asdict(task).items():
        parts = {f"{name}.{key}": part for key, part in value.items()} if name in _PARTED else {name: value}
        for label, part in parts.items():
            try:
                text = json.dumps(part, sort_keys=True, ensure_ascii=False)
                fields[label] = hashlib.sha256(text.encode()).hexdigest(), text[:4000]
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{label} cannot be written as JSON: {type(error).__name__}: {error}") from None
    return fields


def _draw(family: TaskFamily, draw: Draw) -> Drawn:
    try:
        return digests(make_task(family, *draw))
    except Exception as error:  # a family is user code
        return one_line_error(error)


def _differences(first: Mapping[Draw, Drawn], second: Mapping[Draw, Drawn], how: str) -> list[Finding]:
    """Returns one finding for all tasks that differ, with the fields and the first difference; empty if no task differs."""
    differing: dict[Draw, list[str]] = {}
    for draw, drawn in first.items():
        other = second[draw]
        if isinstance(drawn, str):
            continue
        names = ["the whole task"] if isinstance(other, str) else [n for n in {**drawn, **other} if drawn.get(n, "") != other.get(n, "")]
        if names:
            differing[draw] = names
    if not differing:
        return []
    draw, names = next(iter(differing.items()))
    drawn, other = first[draw], second[draw]
    was, now = "a task", str(other)
    if not isinstance(drawn, str) and not isinstance(other, str):
        was, now = (values[names[0]][1] if names[0] in values else "absent" for values in (drawn, other))
    was, now = shorten_difference(was, now)
    fields = list(dict.fromkeys(name for differences in differing.values() for name in differences))
    text = (
        f"{plural(len(differing), 'task')} of {len(first):,} differ {how}, in {join_examples(fields)};"
        f" {draw_name(draw)}: {names[0]} was {was} and is {now}"
    )
    return [Finding(severity="failure", what=text, tasks=tuple(map(draw_name, differing)))]


def _by_seed(source: FamilySource, sizes: Mapping[Split, int]) -> list[Finding]:
    """Returns a note if a different seed gives the same training tasks."""
    family, other = source.open(), source.open(seed=source.seed + 1)
    known = [size for size in (sizes[Split.TRAIN], other.size(Split.TRAIN), _SEED_TASKS) if size is not None]
    pairs = [(_draw(family, (Split.TRAIN, index)), _draw(other, (Split.TRAIN, index))) for index in range(min(known))]
    drawn = [pair for pair in pairs if not isinstance(pair[0], str)]  # without tasks that cannot be created
    if not drawn or any(_without_id(first) != _without_id(second) for first, second in drawn):
        return []
    return [Finding(severity="note", what="a different seed gives the same training tasks: the family does not use its seed")]


def _without_id(drawn: Drawn) -> Drawn:
    return drawn if isinstance(drawn, str) else {name: pair for name, pair in drawn.items() if name != "id"}


def _draw_in_subprocess(source: FamilySource, draws: Sequence[Draw]) -> list[dict[str, tuple[str, str]] | str]:
    """Returns the digests of these tasks, computed in another process. For a task that cannot be created, the entry states the reason.

    Raises `RuntimeError` with the end of the process's error output if the process cannot open the family, or if it does not finish in
    time.
    """
    with tempfile.NamedTemporaryFile(prefix="agentrl-check-") as answer:  # standard output belongs to the family
        question = {
            "tasks": source.tasks.model_dump(mode="json"),
            "seed": source.seed,
            "root": str(source.root),
            "draws": draws,
            "answer": answer.name,
            "parent": os.getpid(),
        }
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        environment = import_environment(Path(__file__).resolve().parents[2]) | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "agentrl.check.purity"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(question),
                env=environment,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # the output belongs to the family
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the process did not finish within {TIMEOUT_S:g} s") from None
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-600:] or f"exit code {done.returncode}")
        drawn: list[Any] = json.loads(answer.read())
    return [entry if isinstance(entry, str) else {name: (pair[0], pair[1]) for name, pair in entry.items()} for entry in drawn]


def main() -> None:
    """Draws the requested tasks and writes their digests to the answer file."""
    question = json.load(sys.stdin)
    die_with_parent(question["parent"])
    root = Path(question["root"])
    add_project_root(root)
    source = FamilySource(tasks=TasksConfig.model_validate(question["tasks"]), seed=question["seed"], root=root)
    family = source.open()
    draws = [(Split(split), int(index)) for split, index in question["draws"]]
    drawn: dict[Draw, Any] = {}
    for split, index in sorted(draws, key=lambda draw: (-draw[1], draw[0])):
        drawn[split, index] = _draw(family, (split, index))
    Path(question["answer"]).write_text(json.dumps([drawn[draw] for draw in draws]), encoding="utf-8")


if __name__ == "__main__":
    main()
