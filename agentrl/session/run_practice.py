"""The practice tasks of a run. They are opened before the run starts, kept separate from the evaluated tasks, and copied to the run folder.

Cases are often failures from an evaluation, so their tasks may be held-out tasks of the same recipe. Generated practice tasks are not
copies of held-out tasks but resemble them, which can raise the held-out rate. The run prints a note about this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from agentrl.agent import load_tools
from agentrl.agent.run_tools import declared_tools
from agentrl.base.error_text import one_line_error
from agentrl.base.files import write_atomically
from agentrl.base.user_code import raising_as
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError, TaskError
from agentrl.failure.case import Case, load_suite
from agentrl.failure.overlap import WithheldTasks
from agentrl.failure.practice import FILE, PracticeSchedule, open_practice
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task
from agentrl.reward import TaskScorer
from agentrl.task import make_task

PRACTICE_FOLDER = "practice"
"""Folder in a run folder that contains the practice files on which the run trains."""


def open_run_practice(
    recipe: Recipe, family: TaskFamily, scorer: TaskScorer, kept_away: WithheldTasks, *, root: Path, folder: Path
) -> tuple[PracticeSchedule | None, tuple[str, ...]]:
    """Opens the recipe's practice, with the verifiers and tools of its tasks. Returns the practice (None if there is none) and notes for
    the user.

    A resumed run uses the files with which it started. Raises `UserError` if practice files, verifiers or tools are missing, if a held-out
    task cannot be created, or if a task equals or nearly equals a task on which the run is evaluated.
    """
    config = recipe.tasks
    if not config.practice:
        return None, ()
    measured = held_out_cases(recipe, family)
    apart = WithheldTasks([*kept_away.cases, *measured])
    files = {suite: path for number, suite in enumerate(config.practice) if (path := _practice_file(folder, number, suite)).is_file()}
    practice = open_practice(config, seed=recipe.seed, root=root, withheld=apart, files=files)
    every = [task for tasks in practice.tasks for task in tasks]
    scorer.load(sorted({name for task in every for name in task.verifiers}))
    load_tools(sorted({name for task in every for name in task.tools}), None, declared_tools(recipe.mcp, recipe.tools, root))
    heldout = WithheldTasks(measured)
    from_them = sum(heldout.match(case.task) is not None for suite in config.practice for case in load_suite(root / suite).cases)
    return practice, _notes(from_them, len(measured))


def held_out_cases(recipe: Recipe, family: TaskFamily) -> list[Case]:
    """Returns the held-out tasks of the recipe's evaluations as cases. Raises `TaskError` if a task cannot be created."""
    return [Case(id=f"heldout-{number}", task=task) for number, task in enumerate(_held_out_tasks(recipe, family))]


def copy_practice_files(run_dir: Path, recipe: Recipe, *, root: Path) -> None:
    """Copies the practice files into the run folder, once."""
    for number, suite in enumerate(recipe.tasks.practice):
        path = _practice_file(run_dir, number, suite)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (root / suite / FILE).read_bytes(), durable=True)


def _practice_file(run_dir: Path, number: int, suite: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(suite).name).strip(".-")[:60] or "suite"
    return run_dir / PRACTICE_FOLDER / f"{number}-{name}.jsonl"


def _held_out_tasks(recipe: Recipe, family: TaskFamily) -> Iterator[Task]:
    evaluation = recipe.evaluation
    for split, wanted in ((Split.HELDOUT, evaluation.heldout), (Split.HELDOUT_REAL, evaluation.heldout_real)):
        with raising_as(partial(_broken_split, split), but=(AgentRLError,)):
            size = family.size(split) if wanted else 0
            tasks = [make_task(family, split, index) for index in range(wanted if size is None else min(wanted, size))]
        yield from tasks


def _broken_split(split: Split, error: BaseException) -> TaskError:
    return TaskError(f"a task of split {split} cannot be created: {one_line_error(error)}", fix="correct the task family")


def _notes(from_them: int, measured: int) -> tuple[str, ...]:
    if not from_them:
        return ()
    return (
        f"practice is generated from {from_them} cases that are among the {measured} held-out tasks of this run's evaluations. On these"
        " tasks the held-out rate measures practised questions. Set a different seed to evaluate different tasks",
    )
