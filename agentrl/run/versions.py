"""What a version brings with it in the driver: the figures of its step, and a way back when the learner takes it back."""

from __future__ import annotations

import time

from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.evaluation.held_out import evaluate_once
from agentrl.memory import run_memory
from agentrl.records import Group, PolicyVersion, SwapReport
from agentrl.serving.supervisor import version_to_serve
from agentrl.session import measure
from agentrl.session.opening import Run
from agentrl.session.pacing import save_pace


def is_retracted(run: Run) -> bool:
    """Whether the learner has gone back to an older checkpoint, because the newest was damaged, and forgotten the version that serves."""
    found = run.registry.get(run.served.version)
    return found is None or found.sha256 != run.served.sha256


async def fall_back(run: Run) -> None:
    """Serves the newest version that is left, in place of one that was retracted."""
    version = version_to_serve(run.registry)
    assert version is not None, "version 0 is never forgotten"
    run.tracker.alert(f"version {run.served.version} was retracted by the learner; serving version {version.number}")
    await run.served.fall_back(version)


async def finish_step(run: Run, version: PolicyVersion, report: SwapReport | None) -> None:
    """Records the step that made `version`, evaluates it where the recipe says so, and lets go of old versions."""
    metrics = _figures(run, version, report)
    every = run.recipe.evaluation.every
    if every and version.number % every == 0 and version.number < run.recipe.steps:
        metrics |= await evaluate_once(run, f"step{version.number}", step=version.number)
        run.tracker.stage("train", f"{run.stop_at} steps")
        if run.last_step_at is not None:
            run.last_step_at = time.monotonic()
    _record(run, version, metrics)
    run.registry.prune(run.recipe.learner.keep_versions)


async def finish_serving_step(run: Run) -> None:
    """Finishes the step of the serving version where the driver died in it: an evaluation that was due is made."""
    version = run.registry.get(run.served.version)
    if version is not None and version.number and version.number not in measure.recorded_steps(run.folder):
        await finish_step(run, version, None)


def record_missing_steps(run: Run) -> None:
    """Records the steps of versions up to the serving one that have no line: the driver died before it wrote them."""
    known = measure.recorded_steps(run.folder)
    for number in range(1, run.served.version + 1):
        version = run.registry.get(number)
        if version is not None and number not in known:
            _record(run, version, _figures(run, version, None))


def _figures(run: Run, version: PolicyVersion, report: SwapReport | None) -> dict[str, float]:
    step = version.number - 1
    groups: tuple[Group, ...] = run.store.groups(index for index in run.step_groups.indices(step) if run.store.has(index))
    now = time.monotonic()
    wall_s = None if run.last_step_at is None else now - run.last_step_at
    metrics = measure.step_metrics(groups, run.folder / version.folder, report, step=step, wall_s=wall_s)
    if run.step_groups.extra:
        metrics["groups_extra"] = len(groups) - run.step_groups.per_step
    measure.record_excluded(run.folder, version.number, groups)
    if wall_s is not None:
        run.last_step_at = now
        metrics |= DRIVER_LAG.metrics()
    return (
        metrics
        | run_memory.memory_metrics(groups)
        | run.fault_rate.attempt_metrics()
        | run.fault_rate.suspect_metrics()
        | run.served.figures()
    )


def _record(run: Run, version: PolicyVersion, metrics: dict[str, float]) -> None:
    run.tracker.log(version.number, metrics)
    pace = run.groups.runner.pace
    save_pace(pace, run.recipe, run.folder)
    for line in filter(
        None, (*measure.step_alerts(run.folder, version.number - 1), run.fault_rate.suspect_alert(), pace.slow_start_alert())
    ):
        run.tracker.alert(line)
