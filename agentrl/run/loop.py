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

from agentrl.causes import first, short
from agentrl.errors import SwapError
from agentrl.failure.digest import write_digest
from agentrl.observe import Summary, sessions, write_report
from agentrl.recipe import Recipe
from agentrl.records import Group, VersionState
from agentrl.run import measure
from agentrl.run.ending import kept_going, stopped
from agentrl.run.folder import Start
from agentrl.run.gate import concluded, first_to_serve, result, serve_result
from agentrl.run.held_out import evaluated_once
from agentrl.run.judging import judging
from agentrl.run.models import export_model
from agentrl.run.opening import Run, opened
from agentrl.run.preflight import Checked
from agentrl.run.rollouts import make_step
from agentrl.run.supervise import watch_answers, watch_daemon, watch_learner
from agentrl.run.versions import fall_back, finish_serving, finish_step, record_missing, retracted

_POLL_S = 0.05


async def train(recipe: Recipe, start: Start, checked: Checked, *, root: Path, console: bool = True) -> Summary:
    """Runs a recipe, from the first evaluation to the last, and returns its summary. Continues the run in `start.folder`, if there is one.

    The caller holds the run folder (`claim_run_folder`) and has run the cheap checks (`run_preflight`). Raises `UserError` before anything
    starts if the recipe cannot run here, and `InfrastructureError` if a part fails for good; finished work is kept.
    """
    starts = len(sessions.read(start.folder))
    run = None
    try:
        async with opened(recipe, start, checked, root=root, console=console) as run:
            try:
                with measure.interrupts(run.stop_after_step):
                    await _pipeline(run)
            finally:
                with kept_going(run.folder, "counting unfinished groups"):
                    run.begun = _begun(run)
            run.tracker.stage("close", "learner, server and sandboxes")
    except BaseException as error:
        if run is not None:
            with kept_going(run.folder, "the summary and the report"):
                _report(run, error)
        if len(sessions.read(start.folder)) > starts:  # otherwise the last session belongs to an earlier driver
            _ended(start.folder, error)
        raise
    return _report(run)  # last, so that it includes all stage times


async def _pipeline(run: Run) -> None:
    run.tracker.stage("start", "server, learner and sandbox image")
    newest = first_to_serve(run)
    async with asyncio.TaskGroup() as parts:
        needed = newest.number < run.recipe.steps and not concluded(run)
        learning = parts.create_task(watch_learner(run)) if needed else None  # early, so that an error of the learner ends the start
        await run.start_serving(newest, judging=not concluded(run), learning=needed)
        run.registry.set_state(newest.number, VersionState.SERVING)
        watching = [run.served.watch(on_loss=run.learner.kill), run.faults.watch(), watch_answers(run.tracker.alert)]
        if run.sandboxes.name == "docker":
            watching.append(watch_daemon(run.tracker.alert))
        if run.gate_server is not None:
            watching.append(run.gate_server.watch(on_loss=run.learner.kill))
        watchers = [parts.create_task(one) for one in watching]
        if not concluded(run):
            await finish_serving(run)
        record_missing(run)
        if newest.number == 0 and not concluded(run):
            await evaluated_once(run, "before", step=0)
        if needed:
            measure.forget_evaluation(run.folder, "after")  # from an earlier session with fewer steps
        if not concluded(run):
            await _learn(run, learning)
        if concluded(run):
            await serve_result(run)
            await evaluated_once(run, "after", step=run.served.version)
        elif run.recipe.gate is None and run.served.version >= run.recipe.steps:
            await evaluated_once(run, "after", step=run.served.version)
            run.registry.set_state(run.served.version, VersionState.PROMOTED)
        for watcher in watchers:
            watcher.cancel()
    best = result(run)
    if best is None or not measure.learned(run.folder):
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
            running.create_task(make_step(run, step))


async def _swap_versions(run: Run) -> None:
    """Loads each version that the learner publishes into the server, in order, except rolled-back ones, and lets the gate evaluate it."""
    async with judging(run) as gate:
        await gate.look()
        number = run.served.version + 1
        while run.served.version < run.stop_at:
            if retracted(run):
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
                await gate.look()
            number += 1


def _report(run: Run, error: BaseException | None = None) -> Summary:
    how = _ended(run.folder, error, interrupted=run.interrupted, figures=run.faults.figures())
    with kept_going(run.folder, "the digest of failures"):
        write_digest(run.folder)
    backend, stages = run.sandboxes.name, run.clock.wall_s
    interrupted = how == "interrupted"
    summary = measure.summarize(run.folder, run.recipe, stages, backend=backend, interrupted=interrupted, begun=run.begun)
    summary.write(run.folder)
    with kept_going(run.folder, f"the report (write it again with: agentrl report {run.folder})"):
        write_report(run.folder)
    return summary


def _ended(
    folder: Path, error: BaseException | None, *, interrupted: bool = False, figures: Mapping[str, float] = MappingProxyType({})
) -> sessions.Ended:
    """Records how the driver ended, unless that is already recorded."""
    fault = first(error) if error is not None and not stopped(error) else None
    how: sessions.Ended = "failed" if fault is not None else "interrupted" if interrupted or error is not None else "finished"
    with kept_going(folder, sessions.FILE):
        sessions.end(folder, how, why="" if fault is None else short(fault), figures=figures)
    return how


def _begun(run: Run) -> tuple[Group, ...]:
    """The stored groups of unfinished steps."""
    known = measure.recorded(run.folder)
    return run.store.groups(index for index in run.store.indices() if run.step_groups.step_of(index) + 1 not in known)
