"""Lists and changes the tasks of a run, whether it is running or stopped. `agentrl.task.changes` describes the files. A driver applies new
changes by calling `start_changes`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.base.error_text import did_you_mean
from agentrl.base.files import complete_lines
from agentrl.config.recipe import Recipe
from agentrl.errors import InfrastructureError, UserError
from agentrl.experience import GroupOrder
from agentrl.failure.faults import Quarantine
from agentrl.plugins.references import project_root
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task
from agentrl.run.late import check_late
from agentrl.session.preflight import open_tasks
from agentrl.session.version_changes import run_recipe
from agentrl.task import GroupOutcome, sandbox_specs
from agentrl.task.changes import LoggedChange, TaskChange, TaskChanges, TaskMix, changing, check_same_family, read_changes
from agentrl.task.group_tasks import TASKS_FILE
from agentrl.task.schedule import ReservedGroups

if TYPE_CHECKING:
    from agentrl.session.opening import Run

_SEARCHED = 10_000  # maximum number of tasks of a family among which a name is looked up
_TRIED = 256  # maximum number of tasks of a family that are checked; one of them must remain


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A training task that the run has used."""

    task: str
    kind: str
    weight: float  # weight within the family, after all changes
    state: str  # in use, removed, or broken
    groups: int  # number of scored groups
    success: float | None  # mean score of these groups; None if there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """A task family of a run."""

    name: str
    ref: str
    weight: float  # 0 for a removed family
    share: float  # share of the groups that have tasks from the family


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    """The tasks of a run after all changes, and the changes."""

    families: tuple[FamilyRow, ...]
    tasks: tuple[TaskRow, ...]
    changes: tuple[LoggedChange, ...]


def family_label(ref: str) -> str:
    """Returns the name of a family in a run: the last part of its plug-in reference or of its folder."""
    return ref.rpartition(":")[2].rstrip("/").rpartition("/")[2]


def _base(recipe: Recipe) -> TaskChange:
    """Returns the recipe's family as a change that would add it."""
    part = recipe.tasks.family
    return TaskChange(action="add", target="family", name=family_label(part.ref), at="", family=part.ref, options=part.options)


def open_added_family(change: TaskChange, recipe: Recipe, root: Path, folder: Path) -> TaskFamily:
    """Opens the family of a change and checks its first training task, with its verifiers and tools. Raises `UserError` if one of them is
    unusable. Also raises `UserError` if the scores of a verifier are late and the run accepts no late scores, because the first group would
    stop the run, and again after each resumption.
    """
    part: dict[str, Any] = {"ref": change.family, "options": dict(change.options)}
    changed = recipe.but({"tasks.family": part, "seed": recipe.seed if change.seed is None else change.seed})
    family, scorer = open_tasks(changed, root=root, folder=folder, held_out=False)
    order = GroupOrder.from_recipe(recipe)
    check_late(order, [f"verifier {name}" for name in scorer.late], [f"verifier {name}" for name in scorer.residual])
    return family


def open_changes(recipe: Recipe, folder: Path, family: TaskFamily, root: Path, practice: ReservedGroups | None = None) -> TaskChanges:
    """Returns the changes to the tasks of a run. Raises `StoreError` if their files are damaged, and `UserError` if an added family cannot
    be opened."""
    opened = partial(open_added_family, recipe=recipe, root=root, folder=folder)
    return TaskChanges(
        folder, (_base(recipe), family), opened, lambda group: group - (practice.practice_groups_before(group) if practice else 0)
    )


def planned_mix(recipe: Recipe, logged: Iterable[LoggedChange]) -> TaskMix:
    """Returns the tasks in use after all changes have started.

    Excludes changes that were rejected or will be rejected because an earlier change was rejected.
    """
    mix = TaskMix.of_family(family_label(recipe.tasks.family.ref))
    for entry in logged:
        with suppress(UserError):
            mix = mix if entry.start is not None and entry.start.rejected else mix.after(entry.change)
    return mix


def list_tasks(run_dir: Path) -> RunTasks:
    """Returns the tasks that a run has used, its task families and the changes. Raises `UserError` if the folder contains no run, and
    `StoreError` if a file is damaged."""
    recipe = run_recipe(run_dir)
    logged = read_changes(run_dir)
    mix, base = planned_mix(recipe, logged), family_label(recipe.tasks.family.ref)
    refs = {base: recipe.tasks.family.ref} | {entry.change.name: entry.change.family for entry in logged if entry.change.action == "add"}
    total = sum(mix.families.values())
    families = (
        FamilyRow(name=name, ref=ref, weight=float(mix.families.get(name, 0)), share=float(mix.families.get(name, 0) / total))
        for name, ref in refs.items()
    )
    return RunTasks(families=tuple(families), tasks=tuple(_rows(run_dir, mix)), changes=tuple(logged))


def _rows(run_dir: Path, mix: TaskMix) -> Iterator[TaskRow]:
    groups, quarantine = defaultdict[tuple[str, str], dict[int, GroupOutcome]](dict), Quarantine(run_dir)
    for outcome in _outcomes(run_dir):
        groups[outcome.task, outcome.kind][outcome.group] = outcome  # the last line for a group includes its late scores
    for (task, kind), outcomes in groups.items():
        scored = [outcome.mean for outcome in outcomes.values() if outcome.counted]
        weight = mix.kinds.get(kind, 1.0) * mix.tasks.get(task, 1.0)
        broken = any(quarantine.known_fault(outcome.key) is not None for outcome in outcomes.values())
        state = "removed" if not weight else "broken" if broken else "in use"
        yield TaskRow(task=task, kind=kind, weight=weight, state=state, groups=len(scored), success=fmean(scored) if scored else None)


def _outcomes(run_dir: Path) -> Iterator[GroupOutcome]:
    return (outcome for outcome in map(GroupOutcome.from_line, complete_lines(run_dir / TASKS_FILE)) if outcome is not None)


def request_change(run_dir: Path, change: TaskChange) -> TaskChange:
    """Logs a change, which applies from the next group that is started. Returns the change with its target: family, kind or task.

    For remove and reweight, `change.name` is the name of a family, a kind or a task. Raises `UserError` if the name is unknown, if the
    family is already used or cannot be opened, or if no task would remain.
    """
    recipe, root = run_recipe(run_dir), project_root(Path.cwd() / "recipe")
    with changing(run_dir) as append:
        logged = read_changes(run_dir)
        mix = planned_mix(recipe, logged)
        families = {family.name: family for family in (_base(recipe), *(entry.change for entry in logged if entry.change.action == "add"))}

        def opened(name: str) -> TaskFamily:
            return open_added_family(families[name], recipe, root, run_dir)

        if change.action != "add" and change.name not in mix.families:
            change = replace(change, target=_target(change.name, mix, run_dir, opened))
        after = mix.after(change)
        if change.action == "add":
            check_same_family(families.get(change.name, change), change)
            open_added_family(change, recipe, root, run_dir)
        elif change.target != "family" and change.action == "remove":
            _check_remaining(change, after, opened)
        append(change)
    return change


def _tasks(family: TaskFamily, most: int) -> Iterator[Task]:
    size = family.size(Split.TRAIN)
    return (family.task(Split.TRAIN, index) for index in range(most if size is None else min(size, most)))


def _target(name: str, mix: TaskMix, run_dir: Path, opened: Callable[[str], TaskFamily]) -> str:
    """Returns `kind` or `task`, depending on what a name refers to. The run need not have used that kind or task yet.

    Raises `UserError` if the name is unknown.
    """
    kinds, tasks = set(mix.kinds), set(mix.tasks)
    for outcome in _outcomes(run_dir):
        kinds.add(outcome.kind)
        tasks.add(outcome.task)
    if name not in kinds | tasks:
        for family in mix.families:
            for task in _tasks(opened(family), _SEARCHED):
                kinds.add(task.kind)
                tasks.add(task.id)
    if name in kinds:
        return "kind"
    if name in tasks:
        return "task"
    names = [*mix.families, *sorted(kinds), *sorted(tasks)]
    near = did_you_mean(name, names, "; {}?")
    raise UserError(f"{run_dir} has no task family, kind or task {name!r}{near}", fix=f"list its tasks: agentrl tasks list {run_dir}")


def _check_remaining(change: TaskChange, after: TaskMix, opened: Callable[[str], TaskFamily]) -> None:
    for name in after.families:
        if not any(after.weight_of(task) for task in _tasks(opened(name), _TRIED)):
            raise UserError(
                f"removing {change.target} {change.name} would leave task family {name} without tasks",
                fix=f"add another family, then remove this one instead: agentrl tasks remove RUN {name}",
            )


async def start_changes(run: Run, group: int) -> None:
    """Applies the logged changes to all groups from `group` on, and reports them. Group `group` must not have started."""
    changes = run.task_changes
    for logged in await asyncio.to_thread(changes.pending):
        start, change = await asyncio.to_thread(changes.start, logged, group), logged.change
        if start.rejected:
            run.tracker.alert(f"a task change was rejected ({change.text}): {start.rejected}")
            continue
        run.tracker.alert(f"{change.text}, from group {start.first} on")
        if change.action == "add":
            try:
                for spec in sandbox_specs(changes.family(change.name)):
                    await run.sandboxes.prepare(spec)
            except (UserError, InfrastructureError) as error:  # the groups of the family also report the error
                run.tracker.alert(f"task family {change.name}: {error}")
