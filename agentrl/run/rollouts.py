"""One group of a run, from its task to the store. Whatever goes wrong with it is in the group; only a store that fails ends the run."""

from __future__ import annotations

import asyncio
from itertools import islice

from agentrl.base import user_code
from agentrl.errors import StoreError, UserError
from agentrl.memory.run_memory import record_answer_leaks
from agentrl.records import Group, Task
from agentrl.rollout import excluded_group, failure_from_error, task_fault
from agentrl.session.opening import Run
from agentrl.session.transcript import append_transcripts, transcript


async def roll_out_step(run: Run, step: int) -> None:
    """Makes the groups of a step that are not stored yet; for each that has no preference another one, as far as the recipe allows."""
    if run.memory is not None:
        await run.memory.prepare_step(step)
    await run.group_tasks.prepare_step(step)
    block = run.step_groups.indices(step)
    waiting = iter(block)

    async def one(index: int) -> None:
        group = run.store.groups([index])[0] if run.store.has(index) else await roll_out_group(run, index)
        if not run.step_groups.preference(group) and (another := next(waiting, None)) is not None:
            running.create_task(one(another))

    async with asyncio.TaskGroup() as running:
        for index in islice(waiting, run.recipe.rollout.groups_per_step):
            running.create_task(one(index))


async def roll_out_group(run: Run, index: int) -> Group:
    """Samples and scores the attempts of group `index`, stores them, and tells the tracker."""
    step = run.step_groups.step_of(index)
    group, task = await _sampled(run, index, step)
    group = _stored(run, group)
    run.running.remove_group(index)
    run.capture.capture_group(task, group, step=step)
    run.tracker.progress(index, group)
    run.quarantine.add(group)
    if task is not None:
        _note(run, task, group, step=step)
    return group


def _note(run: Run, task: Task, group: Group, *, step: int) -> None:
    """What is written down of a stored group beside the store: what it taught, answers that notes gave away, an episode to read."""
    run.group_tasks.record(task, group)
    if told := record_answer_leaks(run.folder, task, group.episodes, phase="train", step=step):
        run.tracker.alert(told)
    if group.index == run.step_groups.indices(step)[0]:
        append_transcripts(run.folder / "episodes" / "train.jsonl", [transcript(task, group.episodes[0], phase="train", step=step)])


def _stored(run: Run, group: Group) -> Group:
    """Stores the group, or what can be said of one that cannot be written down. `StoreError`, as of a full disk, ends the run."""
    try:
        run.store.put(group)
        return group
    except StoreError:
        raise
    except Exception as error:
        size = run.recipe.rollout.group_size
        left_out = excluded_group(group.index, f"group {group.index}", group.task_key, failure_from_error(error, stage="store"), size=size)
        run.store.put(left_out)
        return left_out


async def _sampled(run: Run, index: int, step: int) -> tuple[Group, Task | None]:
    """The group of a task; without a single attempt when the task is broken, known to be or not even made (then it is None)."""
    size = run.recipe.rollout.group_size
    try:
        task = run.group_tasks.task(index)
    except Exception as error:  # a family may raise anything (see make_task); the task is a pure function of the index, so it always will
        if not isinstance(error, UserError):
            user_code.log_unexpected(f"task of group {index}", error)
        return excluded_group(index, f"task of group {index}", f"group {index}", task_fault(error), size=size), None
    if (fault := run.quarantine.known_fault(task.key)) is not None:
        return excluded_group(index, task.id, task.key, fault, size=size), task
    return await run.groups.run_group(index, task, oldest_version=step - run.recipe.max_staleness), task
