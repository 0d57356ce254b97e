"""The whole pipeline on one page: rollouts, learner and server, meeting only in the store, the registry and at the server.

    groups --(store)--> learner --(registry)--> swap --(server)--> newer groups ...

The group's index says which learner step it belongs to, and it may start once the server answers with version
`step - max_staleness` or a newer one. That bound is the whole synchronization.
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
    """Runs a recipe from evaluation to evaluation and returns its summary; goes on where the run in `start.folder` ended, if one did.

    The caller holds the run folder (`agentrl.session.folder.claim_run_folder`) and has looked at everything that is cheap to look at
    (`agentrl.session.preflight.run_preflight`). Raises `UserError` before anything is started when the recipe cannot run here,
    and `InfrastructureError` when a part fails for good; whatever was finished until then is kept.
    """
    starts = len(sessions.read_sessions(start.folder))
    run = None
    try:
        async with open_run(recipe, start, checked, root=root, console=console) as run:
            try:
                with measure.handle_interrupts(run.stop_after_step):
                    await _pipeline(run)
            finally:
                with warn_on_error(run.folder, "counting what was begun"):
                    run.unfinished_groups = _begun(run)
            run.tracker.stage("close", "learner, server and sandboxes")
    except BaseException as error:
        if run is not None:
            with warn_on_error(run.folder, "the summary and the report"):
                _report(run, error)
        if len(sessions.read_sessions(start.folder)) > starts:  # else an earlier driver's is the last
            _ended(start.folder, error)
        raise
    return _report(run)  # last, so that its times are all there is


async def _pipeline(run: Run) -> None:
    run.tracker.stage("start", "server, learner and sandbox image")
    newest = first_version_to_serve(run)
    async with asyncio.TaskGroup() as parts:
        needed = newest.number < run.recipe.steps and not is_concluded(run)
        learning = parts.create_task(watch_learner(run)) if needed else None  # from here on: what it refuses ends the start
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
            measure.remove_evaluation(run.folder, "after")  # of this run, when it had fewer steps
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
        return  # a model that is version 0 under another name would look like a result; the summary says why there is none
    base, sampling = run.folder / "versions" / "000000", run.recipe.evaluation.sampling
    export_model(run.folder / best.folder, run.folder / "model", base=base, sampling=sampling)


async def _learn(run: Run, learning: asyncio.Task[None] | None) -> None:
    """Rollouts, swaps and the learner, which `learning` watches if one is needed, side by side until version `stop_at` serves."""
    run.tracker.stage("train", f"{run.stop_at} steps")
    run.last_step_at, run.learning = time.monotonic(), True
    async with asyncio.TaskGroup() as parts:
        rollouts = parts.create_task(_roll_out(run))
        await _swap_versions(run)
        rollouts.cancel()
    run.learning = False
    if learning is None:  # resumed when all steps were made
        return
    learning.cancel()
    if run.served.version >= run.recipe.steps:
        with suppress(TimeoutError):  # it has made its last step and is about to end by itself
            await run.learner.wait(timeout_s=20.0)
    await run.learner.stop()


async def _roll_out(run: Run) -> None:
    """Starts the groups of each step as soon as it may be sampled; one that a resumed run already has is not made again."""
    async with asyncio.TaskGroup() as running:
        for step in range(run.served.version, run.recipe.steps):
            await run.served.wait_version(step - run.recipe.max_staleness)
            if step >= run.stop_at:
                return
            running.create_task(roll_out_step(run, step))


async def _swap_versions(run: Run) -> None:
    """Takes each version the learner publishes into the server, in order, but for those it has rolled back, and has the gate judge them."""
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
                    continue  # it was retracted or rolled back meanwhile, which is why it could not be loaded
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
    with warn_on_error(run.folder, f"the report (agentrl report {run.folder} writes it again)"):
        write_report(run.folder)
    return summary


def _ended(
    folder: Path, error: BaseException | None, *, interrupted: bool = False, figures: Mapping[str, float] = MappingProxyType({})
) -> sessions.Ended:
    """Records how the driver ended, unless it is already recorded."""
    fault = main_error(error) if error is not None and not ended_by_user(error) else None
    how: sessions.Ended = "failed" if fault is not None else "interrupted" if interrupted or error is not None else "finished"
    with warn_on_error(folder, sessions.FILE):
        sessions.record_end(folder, how, why="" if fault is None else one_line_error(fault), figures=figures)
    return how


def _begun(run: Run) -> tuple[Group, ...]:
    """The stored groups of steps that are not done."""
    known = measure.recorded_steps(run.folder)
    return run.store.groups(index for index in run.store.indices() if run.step_groups.step_of(index) + 1 not in known)
