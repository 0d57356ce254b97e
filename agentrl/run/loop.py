"""The pipeline of a run on one page. The rollouts, the learner and the server exchange data only through the store, the registry and the
server.

    groups --(store)--> learner --(registry)--> swap --(server)--> newer groups ...

`agentrl.experience.blocks` limits the number of groups in flight, and thus determines when a group may start. The learner's next step
starts when enough groups are stored and scored (`agentrl.experience.ledger`). There is no other synchronization. Neither the rollouts nor
the learner wait for late scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

from agentrl.base.error_text import main_error, one_line_error
from agentrl.config.recipe import Recipe
from agentrl.errors import SwapError
from agentrl.evaluation.held_out import HeldOutEvaluation
from agentrl.experience.audit import LedgerCounts, count
from agentrl.failure.digest import write_digest
from agentrl.gate.gate import Gate, first_version_to_serve, promoted_result, serve_result
from agentrl.gate.schedule import schedule_gate
from agentrl.observe import Summary, write_report
from agentrl.observe.summary import SESSIONS_FILE, Ended, read_sessions, record_end
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, VersionState
from agentrl.run.rollouts import Rollouts, RunningGroups
from agentrl.run.supervise import watch_external_servers, watch_learner, watch_run
from agentrl.run.utilization import watch_parts
from agentrl.run.versions import StepRecords, fall_back, is_retracted
from agentrl.session import measure
from agentrl.session.ending import ended_by_user, handle_interrupts, warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.models import export_model
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import PreflightResult
from agentrl.session.task_changes import start_changes

_POLL_S = 0.05


async def train(recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool = True) -> Summary:
    """Runs a recipe from the first evaluation to the last, and returns the summary of the run. If `start.folder` contains a run, continues
    that run.

    The caller must lock the run folder (`claim_run_folder`) and run the cheap checks (`run_preflight`) first. Raises `UserError` before
    anything starts if the recipe cannot run here, and `InfrastructureError` if a part fails permanently. The first ctrl-C or SIGTERM ends
    the run after the step in progress, and the second cancels the call. Finished work is kept.
    """
    starts = len(read_sessions(start.folder))
    run, ledger, unfinished = None, None, tuple[Group, ...]()
    try:
        async with open_run(recipe, start, checked, root=root, console=console) as run:
            try:
                with handle_interrupts(run.stop_after_step):
                    await _pipeline(run)
            finally:
                with warn_on_error(run.folder, "counting the groups of the ledger"):
                    unfinished = await StepRecords.of(run).unfinished_groups()
                    ledger = count(await run.store.entries())
            run.tracker.stage("close", "learner, server and sandboxes")
    except BaseException as error:
        if run is not None:
            with warn_on_error(run.folder, "the summary and the report"):
                _report(run, unfinished, ledger, error)
        if len(read_sessions(start.folder)) > starts:  # otherwise the last session belongs to an earlier driver
            _ended(start.folder, error)
        raise
    return _report(run, unfinished, ledger)  # called last, so that the summary includes the times of all stages


async def _pipeline(run: Run) -> None:
    run.tracker.stage("start", "server, learner and sandbox image")
    gate, evaluation, records = Gate.of(run), HeldOutEvaluation.of(run), StepRecords.of(run)
    concluded = gate is not None and await asyncio.to_thread(gate.is_concluded)
    newest = await asyncio.to_thread(first_version_to_serve, run.registry, gate)
    async with asyncio.TaskGroup() as parts:
        needed = newest.number < run.progress.end and not concluded
        learning = None
        if needed:  # started early, so that an error in the learner stops the start of the run
            learning = parts.create_task(watch_learner(run.learner, run.registry, run.tracker.alert))
        await run.start_serving(newest, gating=not concluded, learning=needed)
        await asyncio.to_thread(run.registry.set_state, newest.number, VersionState.SERVING)
        watching = [*watch_run(run), run.late.watch(), watch_external_servers(run.tracker.alert), watch_parts(run)]
        watching += [server.policy.watch(on_loss=run.learner.kill) for server in run.version_servers]
        watchers = [parts.create_task(coroutine) for coroutine in watching]
        if not concluded:
            await records.finish_serving()
        await records.record_missing()
        if newest.number == 0 and not concluded:
            await evaluation.evaluate_once("before", step=0)
        if needed:
            await evaluation.continue_after(newest)
        if not concluded:
            await _learn(run, learning)
        if gate is not None and await asyncio.to_thread(gate.is_concluded):
            await serve_result(run.registry, run.served, run.tracker.alert)
            await evaluation.evaluate_once("after", step=run.served.version)
        elif gate is None and run.served.version >= run.progress.end:
            await evaluation.evaluate_once("after", step=run.served.version)
            await asyncio.to_thread(run.registry.set_state, run.served.version, VersionState.PROMOTED)
        for watcher in watchers:
            watcher.cancel()
    await asyncio.to_thread(_export_result, run)


def _export_result(run: Run) -> None:
    """Exports the result to `model/`. Version 0 is not exported, because a copy of it would look like a result.

    If there is no result, the summary states why.
    """
    result = run.registry.get(run.served.version) if run.recipe.gate is None else promoted_result(run.registry, run.folder)
    if result is not None and measure.weights_changed(run.folder):
        base, sampling = run.folder / "versions" / "000000", run.recipe.evaluation.sampling
        export_model(run.folder / result.folder, run.folder / "model", base=base, sampling=sampling)


async def _learn(run: Run, learning: asyncio.Task[None] | None) -> None:
    """Runs the rollouts, the swaps and the learner until version `stop_at` is served.

    `learning` is the task that watches the learner, if the run needs a learner.
    """
    run.tracker.stage("train", run.progress.plan)
    run.progress.timeline.restart()
    run.progress.learning = True
    async with asyncio.TaskGroup() as parts:
        rollouts = parts.create_task(_roll_out(run))
        await _swap_versions(run)
        rollouts.cancel()
    run.progress.learning = False
    if learning is None:  # resumed after the last step
        return
    learning.cancel()
    if run.served.version >= run.recipe.step_limit:
        with suppress(TimeoutError):  # the learner finished its last step and is about to exit
            await run.learner.wait(timeout_s=20.0)
    await run.learner.stop()


async def _roll_out(run: Run) -> None:
    """Starts groups as soon as they may be sampled. In a resumed run, groups that are already stored are skipped.

    Returns when the steps have enough groups and no running group can still be parked, because a parked group would have to be replaced.
    """
    rollouts, per_step = Rollouts.of(run), run.order.per_step
    await run.late.resume()
    entries = await run.store.entries()
    slot = per_step * run.order.first_incomplete_block(entries)
    started = [run.order.slot(index) for index in (*(entry.index for entry in entries), *run.checkpoints.groups())]
    unstarted = max(started, default=-1) + 1  # the first group that no driver has started
    async with asyncio.TaskGroup() as running:
        groups = RunningGroups(rollouts, running)
        while True:
            run.late.changed.clear()
            wanted = run.progress.stop_at * per_step + run.late.count
            if slot < wanted and run.starts.admit(slot, version=run.served.version, parked=run.late.count):
                for block, version in run.starts.take_unsaved():
                    await run.store.call(partial(_start_block, block=block, version=version))
                await start_changes(run, max(slot, unstarted))
                await groups.start(slot)
                slot += 1
            elif slot < wanted:
                await _wait_for_change(run, version=run.served.version + 1)
            elif groups.tasks:
                await run.late.changed.wait()
            else:
                return


def _start_block(store: ExperienceStore, *, block: int, version: int) -> None:
    store.start_block(block, version)


async def _wait_for_change(run: Run, *, version: int) -> None:
    """Returns when `version` is served, a group ends, or the number of parked groups changes."""
    changes = (run.served.wait_version(version), run.late.changed.wait())
    waiting: list[asyncio.Task[object]] = [asyncio.create_task(change) for change in changes]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in waiting:
            one.cancel()


async def _swap_versions(run: Run) -> None:
    """Loads into the server, in order, each version that the learner publishes, except rolled-back versions, and lets the gate evaluate
    it."""
    registry, served, records = run.registry, run.served, StepRecords.of(run)
    async with schedule_gate(Gate.of(run), run.progress) as gate:
        await gate.evaluate_due()
        number = served.version + 1
        while served.version < run.progress.stop_at:
            if await asyncio.to_thread(is_retracted, registry, served):
                await fall_back(registry, served, run.tracker.alert)
                number = served.version + 1
            version = await asyncio.to_thread(registry.get, number)
            if version is None:
                await asyncio.sleep(_POLL_S)
                continue
            report = None
            if version.state is not VersionState.ROLLED_BACK:
                try:
                    report = await served.swap(version)
                except SwapError:
                    if await asyncio.to_thread(registry.get, number) == version:
                        raise
                    continue  # the version was retracted or rolled back in the meantime, so its files may be gone
            if report is not None:
                run.tracker.swapped(report)
            await records.finish(version, report)
            if report is not None:
                await gate.evaluate_due()
            number += 1


def _report(run: Run, unfinished: tuple[Group, ...], ledger: LedgerCounts | None, error: BaseException | None = None) -> Summary:
    how = _ended(run.folder, error, interrupted=run.progress.interrupted, figures=run.fault_rate.attempt_metrics())
    with warn_on_error(run.folder, "the digest of failures"):
        write_digest(run.folder)
    backend, stages = run.sandboxes.name, run.clock.wall_s
    interrupted = how == "interrupted"
    summary = measure.summarize(run.folder, run.recipe, stages, backend=backend, interrupted=interrupted, begun=unfinished, ledger=ledger)
    summary.write(run.folder)
    with warn_on_error(run.folder, f"the report (recreate it with: agentrl report {run.folder})"):
        write_report(run.folder)
    return summary


def _ended(
    folder: Path, error: BaseException | None, *, interrupted: bool = False, figures: Mapping[str, float] = MappingProxyType({})
) -> Ended:
    """Records and returns how the session ended. An existing record is not replaced."""
    fault = main_error(error) if error is not None and not ended_by_user(error) else None
    how: Ended = "failed" if fault is not None else "interrupted" if interrupted or error is not None else "finished"
    with warn_on_error(folder, SESSIONS_FILE):
        record_end(folder, how, why="" if fault is None else one_line_error(fault), figures=figures)
    return how
