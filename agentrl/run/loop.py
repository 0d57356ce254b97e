"""The pipeline of a run on one page. Rollouts, learner and server meet only in the store, the registry and at the server.

    groups --(store)--> learner --(registry)--> swap --(server)--> newer groups ...

A group's index determines its learner step. It may start once the server answers with version `step - max_staleness` or a newer one. This
bound is the only synchronization.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from agentrl.base.error_text import main_error, one_line_error
from agentrl.config.recipe import Recipe
from agentrl.errors import SwapError
from agentrl.evaluation.held_out import evaluate_once
from agentrl.failure.digest import write_digest
from agentrl.gate.judgement import first_version_to_serve, is_concluded, result_version, serve_result
from agentrl.gate.schedule import schedule_gate
from agentrl.observe import Summary, sessions, write_report
from agentrl.records import Group, VersionState
from agentrl.run.rollouts import roll_out_step
from agentrl.run.supervise import watch_daemon, watch_external_servers, watch_learner
from agentrl.run.versions import fall_back, finish_serving_step, finish_step, is_retracted, record_missing_steps
from agentrl.session import measure
from agentrl.session.ending import ended_by_user, warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.models import export_model
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import PreflightResult

_POLL_S = 0.05


async def train(recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool = True) -> Summary:
    """Runs a recipe, from the first evaluation to the last, and returns its summary. Continues the run in `start.folder`, if there is one.

    The caller holds the run folder (`claim_run_folder`) and has run the cheap checks (`run_preflight`). Raises `UserError` before anything
    starts if the recipe cannot run here, and `InfrastructureError` if a part fails for good; finished work is kept.
    """
    starts = len(sessions.read_sessions(start.folder))
    run = None
    try:
        async with open_run(recipe, start, checked, root=root, console=console) as run:
            try:
                with measure.handle_interrupts(run.stop_after_step):
                    await _pipeline(run)
            finally:
                with warn_on_error(run.folder, "counting unfinished groups"):
                    run.unfinished_groups = _begun(run)
            run.tracker.stage("close", "learner, server and sandboxes")
    except BaseException as error:
        if run is not None:
            with warn_on_error(run.folder, "the summary and the report"):
                _report(run, error)
        if len(sessions.read_sessions(start.folder)) > starts:  # otherwise the last session belongs to an earlier driver
            _ended(start.folder, error)
        raise
    return _report(run)  # last, so that it includes all stage times


async def _pipeline(run: Run) -> None:
    run.tracker.stage("start", "server, learner and sandbox image")
    newest = first_version_to_serve(run)
    async with asyncio.TaskGroup() as parts:
        needed = newest.number < run.recipe.steps and not is_concluded(run)
        learning = parts.create_task(watch_learner(run)) if needed else None  # early, so that an error of the learner ends the start
        await run.start_serving(newest, judging=not is_concluded(run), learning=needed)
        run.registry.set_state(newest.number, VersionState.SERVING)
        watching = [run.served.watch(on_loss=run.learner.kill), run.fault_rate.watch(), watch_external_servers(run.tracker.alert)]
        if run.sandboxes.name == "docker":
            watching.append(watch_daemon(run.tracker.alert))
        if run.gate_server is not None:
            watching.append(run.gate_server.watch(on_loss=run.learner.kill))
        watchers = [parts.create_task(one) for one in watching]
        if not is_concluded(run):
            await finish_serving_step(run)
        record_missing_steps(run)
        if newest.number == 0 and not is_concluded(run):
            await evaluate_once(run, "before", step=0)
        if needed:
            measure.remove_evaluation(run.folder, "after")  # from an earlier session with fewer steps
        if not is_concluded(run):
            await _learn(run, learning)
        if is_concluded(run):
            await serve_result(run)
            await evaluate_once(run, "after", step=run.served.version)
        elif run.recipe.gate is None and run.served.version >= run.recipe.steps:
            await evaluate_once(run, "after", step=run.served.version)
            run.registry.set_state(run.served.version, VersionState.PROMOTED)
        for watcher in watchers:
            watcher.cancel()
    best = result_version(run)
    if best is None or not measure.weights_changed(run.folder):
        return  # a copy of version 0 would look like a result; the summary says why there is none
    base, sampling = run.folder / "versions" / "000000", run.recipe.evaluation.sampling
    export_model(run.folder / best.folder, run.folder / "model", base=base, sampling=sampling)


async def _learn(run: Run, learning: asyncio.Task[None] | None) -> None:
    """Runs rollouts, swaps and the learner until version `stop_at` serves. `learning` watches the learner, if one is needed."""
    run.tracker.stage("train", f"{run.stop_at} steps")
    run.last_step_at, run.learning = time.monotonic(), True
    async with asyncio.TaskGroup() as parts:
        rollouts = parts.create_task(_roll_out(run))
        await _swap_versions(run)
        rollouts.cancel()
    run.learning = False
    if learning is None:  # resumed after the last step
        return
    learning.cancel()
    if run.served.version >= run.recipe.steps:
        with suppress(TimeoutError):  # it has finished its last step and is about to exit
            await run.learner.wait(timeout_s=20.0)
    await run.learner.stop()


async def _roll_out(run: Run) -> None:
    """Starts the groups of each step as soon as they may be sampled. Groups that a resumed run already has are skipped."""
    async with asyncio.TaskGroup() as running:
        for step in range(run.served.version, run.recipe.steps):
            await run.served.wait_version(step - run.recipe.max_staleness)
            if step >= run.stop_at:
                return
            running.create_task(roll_out_step(run, step))


async def _swap_versions(run: Run) -> None:
    """Loads each version that the learner publishes into the server, in order, except rolled-back ones, and lets the gate evaluate it."""
    async with schedule_gate(run) as gate:
        await gate.evaluate_due()
        number = run.served.version + 1
        while run.served.version < run.stop_at:
            if is_retracted(run):
                await fall_back(run)
                number = run.served.version + 1
            version = run.registry.get(number)
            if version is None:
                await asyncio.sleep(_POLL_S)
                continue
            report = None
            if version.state is not VersionState.ROLLED_BACK:
                try:
                    report = await run.served.swap(version)
                except SwapError:
                    if run.registry.get(number) == version:
                        raise
                    continue  # it was retracted or rolled back meanwhile, so its files may be gone
            await finish_step(run, version, report)
            if report is not None:
                await gate.evaluate_due()
            number += 1


def _report(run: Run, error: BaseException | None = None) -> Summary:
    how = _ended(run.folder, error, interrupted=run.interrupted, figures=run.fault_rate.attempt_metrics())
    with warn_on_error(run.folder, "the digest of failures"):
        write_digest(run.folder)
    backend, stages = run.sandboxes.name, run.clock.wall_s
    interrupted = how == "interrupted"
    summary = measure.summarize(run.folder, run.recipe, stages, backend=backend, interrupted=interrupted, begun=run.unfinished_groups)
    summary.write(run.folder)
    with warn_on_error(run.folder, f"the report (write it again with: agentrl report {run.folder})"):
        write_report(run.folder)
    return summary


def _ended(
    folder: Path, error: BaseException | None, *, interrupted: bool = False, figures: Mapping[str, float] = MappingProxyType({})
) -> sessions.Ended:
    """Records how the driver ended, unless that is already recorded."""
    fault = main_error(error) if error is not None and not ended_by_user(error) else None
    how: sessions.Ended = "failed" if fault is not None else "interrupted" if interrupted or error is not None else "finished"
    with warn_on_error(folder, sessions.FILE):
        sessions.record_end(folder, how, why="" if fault is None else one_line_error(fault), figures=figures)
    return how


def _begun(run: Run) -> tuple[Group, ...]:
    """The stored groups of unfinished steps."""
    known = measure.recorded_steps(run.folder)
    return run.store.groups(index for index in run.store.indices() if run.step_groups.step_of(index) + 1 not in known)
