"""Which task each group of a run gets: a pure function of the seed and the group's index.

Because nothing is drawn from a moving state, the group index is the whole cursor: a run that resumes knows which groups it
still owes, and neither skips nor doubles a prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import PluginError, RecipeError, TaskError, UserError
from agentrl.plugins import resolve
from agentrl.protocols import TaskFamily
from agentrl.recipe import TasksConfig
from agentrl.records import SandboxSpec, Split, Task
from agentrl.task.folders import TaskFolders


def open_family(config: TasksConfig, *, seed: int, root: Path | None = None) -> TaskFamily:
    """The task family a recipe names: a plugin reference, or a folder of task folders relative to `root`.

    Raises `PluginError` when it does not resolve or refuses its options, and `TaskError` for task folders with mistakes.
    """
    root = root or Path.cwd()
    if ":" not in config.family and ("/" in config.family or (root / config.family).is_dir()):
        known = {"heldout"}
        if unknown := sorted(set(config.options) - known):
            raise RecipeError(f"tasks.options.{unknown[0]}: unknown for a family of task folders; known here: {', '.join(known)}")
        return TaskFolders(root / config.family, root=root, seed=seed, heldout=_share(config.options.get("heldout", 0.25)))
    factory = resolve(config.family)
    try:
        family = factory(seed=seed, **config.options)
    except TypeError as error:
        raise PluginError(
            f"tasks.family {config.family!r}: {error}", fix="it must be callable as family(seed=0, **tasks.options)"
        ) from error
    for name in ("task", "size", "gold"):
        if not callable(getattr(family, name, None)):
            raise PluginError(
                f"tasks.family {config.family!r} has no method {name!r}", fix="it has task(split, index), size(split), gold(task)"
            )
    opened: TaskFamily = family
    return opened


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"tasks.options.heldout must be a number, got {value!r}", fix='write tasks.options={"heldout": 0.25}')
    return float(value)


def sandbox_specs(family: TaskFamily) -> list[SandboxSpec]:
    """What to make ready before a run: one spec for each image of a family's tasks; of one without end, the first task's."""
    if family.size(Split.TRAIN) is None:
        return [family.task(Split.TRAIN, 0).sandbox]
    tasks = (family.task(split, index) for split in Split for index in range(family.size(split) or 0))
    return list({(task.sandbox.image, task.sandbox.runtime): task.sandbox for task in tasks}.values())


def make_task(family: TaskFamily, split: Split, index: int) -> Task:
    """One task of a family.

    Raises:
        TaskError: what the family gives is no task, or it raised SystemExit.
        Exception: whatever else the family raises.
    """
    fix = "mend the family's task()"
    try:
        task: object = family.task(split, index)
    except UserError:
        raise
    except (ValueError, SystemExit) as error:  # of a ValueError: what the family says of it is no task; see agentrl.records
        told = error if isinstance(error, ValueError) else f"SystemExit: {error}"
        raise TaskError(f"{_named(family)}: {split} task {index} cannot be made: {told}", fix=fix) from error
    if not isinstance(task, Task):
        raise TaskError(f"{_named(family)}: {split} task {index} is no Task, but of type {type(task).__name__}", fix=fix)
    return task


def _named(family: TaskFamily) -> str:
    return str(getattr(family, "name", type(family).__name__))


@dataclass(frozen=True)
class GroupSchedule:
    """Group index -> training task. Finite splits are walked in a new seeded order each epoch; endless ones in order.

    `task` raises `TaskError` for one that the family cannot make.
    """

    family: TaskFamily
    seed: int
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def task(self, group_index: int) -> Task:
        size = self.family.size(Split.TRAIN)
        if size is None:
            return self._made(group_index)
        if size == 0:
            raise RecipeError(f"task family {_named(self.family)!r} has no training tasks")
        epoch, position = divmod(group_index, size)
        return self._made(self._order(epoch, size)[position])

    def _made(self, index: int) -> Task:
        return make_task(self.family, Split.TRAIN, index)

    def _order(self, epoch: int, size: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]
