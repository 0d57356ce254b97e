"""The schedule of tasks: a pure function of the seed and the group's index.

There is no random state to advance, so a resumed run can compute which groups are missing, and it neither skips nor repeats a task.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from agentrl.base import secrets
from agentrl.base.error_text import one_line_error, raise_location
from agentrl.base.user_code import describe_error, error_text, fault_boundary, raising_as
from agentrl.config.recipe import TasksConfig
from agentrl.errors import AgentRLError, PluginError, RecipeError, TaskError, UserError
from agentrl.plugins.parts import ENVIRONMENT_FAMILY, environment_kind
from agentrl.plugins.protocol_checks import option_type_error
from agentrl.plugins.references import resolve
from agentrl.protocols import GoldFamily, TaskFamily, VariedFamily
from agentrl.records import SandboxSpec, Split, Task
from agentrl.task.changes import TaskChanges
from agentrl.task.folders import TaskFolders
from agentrl.task.weighting import Weights


def open_family(config: TasksConfig, *, seed: int, root: Path | None = None) -> TaskFamily:
    """Opens the recipe's task family, which is given as a plug-in reference, or as the path, relative to `root`, of a folder of task
    folders.

    If the recipe lists verifiers, they replace the verifiers of every task.

    Raises `PluginError` if the reference does not resolve, if an option has the wrong type, or if the family lacks a method or fails with
    an error other than `AgentRLError`; `TaskError` if task folders contain mistakes; and `UserError` if there is no such folder or an
    option of it is invalid.
    """

    def not_opened(error: BaseException) -> PluginError:
        return PluginError(
            f"tasks.family {config.family.ref!r} cannot be opened: {one_line_error(error)} ({raise_location(error)})",
            fix="correct tasks.family.options, or the code at this location; the family is called as family(seed=0, **options)",
        )

    with raising_as(not_opened, but=(AgentRLError,)):
        family = _open(config, seed=seed, root=root or Path.cwd())
        if config.verifiers:
            judged = _VariedWithVerifiers if callable(getattr(family, "variants", None)) else _WithVerifiers
            family = judged(family, config.verifiers)
    return family


def _open(config: TasksConfig, *, seed: int, root: Path) -> TaskFamily:
    reference, options = config.family.ref, config.family.options
    if ":" not in reference and ("/" in reference or (root / reference).is_dir()):
        if unknown := sorted(set(options) - {"heldout"}):
            raise RecipeError(f"tasks.family.options.{unknown[0]}: unknown option of task folders; the only option is heldout")
        return TaskFolders(root / reference, root=root, seed=seed, heldout=_share(options.get("heldout", 0.25)))
    kind = environment_kind(reference)
    factory = resolve(reference if kind is None else kind.family)
    recorded = config.family.options  # with references to secrets, because the errors must not contain their values
    problem = ""
    if kind is not None:
        factory = partial(factory, reference)
    elif inspect.isclass(factory) and callable(getattr(factory, "reset", None)):  # an environment; each of its seeds is a task
        environment, factory = factory, partial(resolve(ENVIRONMENT_FAMILY), reference)
        taken = inspect.signature(factory).parameters  # options of the family, which the environment does not receive
        problem = option_type_error(environment, {name: value for name, value in recorded.items() if name not in taken})
    else:
        options = secrets.resolve_options(options)
    if problem := problem or option_type_error(factory, recorded):
        raise PluginError(f"tasks.family.options.{problem}", fix="correct the value, or remove it to use the default")
    family = factory(seed=seed, **options)
    for name in ("task", "size"):
        if not callable(getattr(family, name, None)):
            raise PluginError(f"tasks.family {reference!r} has no method {name!r}", fix="define task(split, index) and size(split)")
    opened: TaskFamily = family
    return opened


class _WithVerifiers:
    """A family whose tasks use the recipe's verifiers."""

    def __init__(self, family: TaskFamily, verifiers: tuple[str, ...]) -> None:
        self.name = _family_name(family)
        self._family, self._verifiers = family, verifiers

    def size(self, split: Split) -> int | None:
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        return replace(make_task(self._family, split, index), verifiers=self._verifiers)

    def gold(self, task: Task) -> str:
        return gold_of(self._family, task)


class _VariedWithVerifiers(_WithVerifiers):
    """A family with variants, whose tasks use the recipe's verifiers."""

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        for kind, variant in cast(VariedFamily, self._family).variants(task, seed=seed):
            yield kind, replace(variant, verifiers=self._verifiers)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"tasks.family.options.heldout must be a number, got {value!r}", fix="write tasks.family.options.heldout=0.25")
    return float(value)


def sandbox_specs(family: TaskFamily) -> list[SandboxSpec]:
    """Returns the specs to prepare before a run: one for each image that the family's tasks use. For an endless family, returns only the
    spec of the first task."""
    if family.size(Split.TRAIN) is None:
        tasks = iter([family.task(Split.TRAIN, 0)])
    else:
        tasks = (family.task(split, index) for split in Split for index in range(family.size(split) or 0))
    specs = (task.sandbox for task in tasks)
    return list({(spec.image, spec.runtime): spec for spec in specs if spec is not None}.values())


def make_task(family: TaskFamily, split: Split, index: int) -> Task:
    """Creates one task of a family.

    Raises:
        TaskError: the family returned something other than a valid task, or tried to terminate the run.
        Exception: the family raised any other exception.
    """
    fix = "repair the family's task()"
    task: object = None
    with fault_boundary() as fault:
        task = family.task(split, index)
    if (error := fault.error) is not None:
        invalid = isinstance(error, ValueError)  # agentrl.records raised it
        if isinstance(error, UserError) or (isinstance(error, Exception) and not invalid):
            raise error
        why = error_text(error) if invalid else describe_error(error)
        raise TaskError(f"{_family_name(family)}: {split} task {index} cannot be created: {why}", fix=fix) from error
    if not isinstance(task, Task):
        raise TaskError(f"{_family_name(family)}: {split} task {index} is a {type(task).__name__}, not a Task", fix=fix)
    return task


def gold_of(family: TaskFamily, task: Task) -> str:
    """Returns the gold solution of a task. Raises `TaskError` if its family has none."""
    if not callable(getattr(family, "gold", None)):
        raise TaskError(f"the family {_family_name(family)!r} has no gold solutions", fix="define gold(task)")
    return cast(GoldFamily, family).gold(task)


def _family_name(family: TaskFamily) -> str:
    return str(getattr(family, "name", type(family).__name__))


_STRIDE = 1_000_003  # distance between substitutes in an endless split; large, so that it leads far from the tasks of neighbouring groups
_SUBSTITUTES = 256
_ORDERS = 16  # maximum number of shuffled epochs in memory


class ReservedGroups(Protocol):
    """Reserves groups for practice tasks. Whether a group is reserved depends only on the group's index."""

    def task_of_group(self, group_index: int) -> Task | None:
        """Returns the practice task of a group; None if the group is not reserved."""
        ...

    def practice_groups_before(self, group_index: int) -> int:
        """Returns the number of reserved groups before this one."""
        ...


@dataclass(frozen=True)
class GroupSchedule:
    """Maps each group index to a training task. A finite split is shuffled in each epoch; an endless split is used in order.

    A task in `withheld` is replaced by a task at some distance in the order. In a finite split, the distance differs between groups; if
    every group used the next task, neighbouring groups would have the same task. Groups that `practice` reserves use its tasks. The other
    groups use the family's tasks as if the reserved groups did not exist. `changes` may add families, and may remove or reweight tasks.
    Each change applies from a certain group on.

    `task` raises the errors of `make_task` if the family cannot create the task, and `RecipeError` if no task may be trained on.
    """

    family: TaskFamily
    seed: int
    withheld: Container[Task] = ()
    practice: ReservedGroups | None = None
    changes: TaskChanges | None = None
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)

    def task(self, group_index: int, weights: Weights | None = None, *, slot: int | None = None) -> Task:
        """Returns the task of a group. A task that `weights` rejects is replaced by a task at some distance in the order. After 256
        rejected candidates, the first that may be trained on is used.

        Args:
            group_index: position of the group in the schedule.
            slot: the group's number, which is passed to `changes`; None means `group_index`.
        """
        slot = group_index if slot is None else slot
        if self.practice is not None:
            if (set_aside := self.practice.task_of_group(group_index)) is not None:
                return set_aside
            group_index -= self.practice.practice_groups_before(group_index)
        family, position, mix = (self.family, group_index, None) if self.changes is None else self.changes.draw(group_index, slot)
        size = family.size(Split.TRAIN)
        if size == 0:
            raise RecipeError(f"task family {_family_name(family)!r} has no training tasks")
        first = None
        candidates = _SUBSTITUTES if size is None else size
        for turn in range(candidates):
            if first is not None and turn >= _SUBSTITUTES:
                break
            try:
                task = make_task(family, Split.TRAIN, self._index(position, turn, size))
            except Exception:
                if turn == 0:
                    raise
                continue  # a broken substitute does not fail this group
            if task not in self.withheld and (mix is None or mix.weight_of(task) > 0):
                draws = [chooser for chooser in (weights, mix) if chooser is not None]
                if all(chooser.accepts(task, seed=self.seed, group=group_index, turn=turn) for chooser in draws):
                    return task
                first = first or task
        if first is not None:
            return first
        raise RecipeError(
            f"task family {_family_name(family)!r}: all {candidates} candidates for group {group_index} are withheld, removed or broken",
            fix="remove the suite from tasks.withhold, add tasks to the family, or see agentrl tasks list RUN",
        )

    def is_practice(self, group_index: int) -> bool:
        """Whether the group's task comes from `practice`."""
        return self.practice is not None and self.practice.task_of_group(group_index) is not None

    def _index(self, group_index: int, turn: int, size: int | None) -> int:
        """Returns the index of a group's task if `turn` is 0; otherwise the index of its substitute number `turn`."""
        if size is None:
            return group_index + turn * _STRIDE
        epoch, position = divmod(group_index, size)
        return self._order(epoch, size)[(position + turn * self._stride(group_index, size)) % size]

    def _stride(self, group_index: int, size: int) -> int:
        """Returns the distance between a group's substitutes in an epoch's order. It is coprime to `size`, so the substitutes include every
        task."""
        draw = random.Random(f"{self.seed}/{group_index}/stride")
        return next(stride for stride in iter(lambda: draw.randrange(1, size + 1), 0) if math.gcd(stride, size) == 1)

    def _order(self, epoch: int, size: int) -> list[int]:
        if (epoch, size) not in self._orders:
            order = list(range(size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            while len(self._orders) >= _ORDERS:
                self._orders.pop(next(iter(self._orders)), None)
            self._orders[epoch, size] = order
        return self._orders[epoch, size]
