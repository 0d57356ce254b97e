"""Handles new versions in the driver: records the step that produced each version, and returns to an older version if the learner retracts
one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.activity import ACTIVITY, GROUPS
from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.config.recipe import Recipe
from agentrl.evaluation.held_out import HeldOutEvaluation
from agentrl.experience import DriverStore, GroupOrder
from agentrl.failure import FaultRate
from agentrl.memory.run_memory import memory_metrics
from agentrl.observe.timeline import WALL
from agentrl.protocols import PolicyServer, Tracker, VersionRegistry
from agentrl.records import Group, PolicyVersion, SwapReport
from agentrl.rollout import Pace
from agentrl.serving.supervisor import version_to_serve
from agentrl.session import measure
from agentrl.session.pace import save_pace

if TYPE_CHECKING:
    from agentrl.run.worker_pool import WorkerPool
    from agentrl.session.opening import Progress, Run

_OPEN_BLOCKS = 64


def is_retracted(registry: VersionRegistry, served: PolicyServer) -> bool:
    """Whether the learner retracted the serving version, because it returned to an older checkpoint when the newest was damaged.

    Blocks the thread.
    """
    version = registry.get(served.version)
    return version is None or version.sha256 != served.sha256


async def fall_back(registry: VersionRegistry, served: PolicyServer, alert: Callable[[str], None]) -> None:
    """Serves the newest remaining version instead of the retracted version."""
    version = await asyncio.to_thread(version_to_serve, registry)
    assert version is not None, "version 0 is never retracted"
    alert(f"version {served.version} was retracted by the learner; serving version {version.number}")
    await served.fall_back(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """Records the learner steps of one run, with one line in `metrics.jsonl` for each step."""

    recipe: Recipe
    folder: Path
    progress: Progress
    order: GroupOrder
    store: DriverStore
    registry: VersionRegistry
    served: PolicyServer
    pace: Pace
    fault_rate: FaultRate
    evaluation: HeldOutEvaluation
    tracker: Tracker
    workers: WorkerPool | None = None

    @classmethod
    def of(cls, run: Run) -> StepRecords:
        """Returns the object that records the steps of an open run."""
        return cls(
            recipe=run.recipe,
            folder=run.folder,
            progress=run.progress,
            order=run.order,
            store=run.store,
            registry=run.registry,
            served=run.served,
            pace=run.groups.runner.pace,
            fault_rate=run.fault_rate,
            evaluation=HeldOutEvaluation.of(run),
            tracker=run.tracker,
            workers=run.workers,
        )

    async def finish(self, version: PolicyVersion, report: SwapReport | None) -> None:
        """Records the step that produced `version`, evaluates the version if the recipe requires it, and prunes old versions."""
        metrics = await self._metrics(version, report)
        every = self.recipe.evaluation.every
        if every and version.number % every == 0 and version.number < self.progress.end:
            metrics |= await self.evaluation.evaluate_once(f"step{version.number}", step=version.number)
            self.tracker.stage("train", self.progress.plan)
            if self.progress.timeline.running:
                self.progress.timeline.restart()
        await self._record(version, metrics)
        await asyncio.to_thread(self.registry.prune, self.recipe.learner.keep_versions)

    async def finish_serving(self) -> None:
        """Finishes the step that produced the serving version if an earlier driver died before it finished that step."""
        version = await asyncio.to_thread(self.registry.get, self.served.version)
        if version is not None and version.number and version.number not in await asyncio.to_thread(measure.recorded_steps, self.folder):
            await self.finish(version, None)

    async def record_missing(self) -> None:
        """Records the steps up to the serving version that are not recorded because a driver died."""
        known = await asyncio.to_thread(measure.recorded_steps, self.folder)
        for number in range(1, self.served.version + 1):
            if number not in known and (version := await asyncio.to_thread(self.registry.get, number)) is not None:
                await self._record(version, await self._metrics(version, None))

    async def unfinished_groups(self) -> tuple[Group, ...]:
        """Returns the scored groups of steps that are not recorded, and the scored groups that no step has consumed."""
        known, entries = await asyncio.to_thread(measure.recorded_steps, self.folder), await self.store.entries()
        unfinished = (entry for entry in entries if entry.step is None or entry.step + 1 not in known)
        return await self.store.groups(entry.index for entry in unfinished if not entry.pending and not entry.is_residual)

    async def _metrics(self, version: PolicyVersion, report: SwapReport | None) -> dict[str, float]:
        step, timeline = version.number - 1, self.progress.timeline.take()
        timeline |= await asyncio.to_thread(self.progress.timeline.take_counts)
        entries = await self.store.entries(step=step)
        groups = await self.store.groups(entry.index for entry in entries if not entry.is_residual)
        wall_s = timeline.pop(WALL, None)
        metrics = await asyncio.to_thread(self._group_metrics, version, groups, report, wall_s)
        if self.order.extra:
            metrics["groups_extra"] = len(groups) - self.order.per_step
        oldest_versions = [entry.oldest_version for entry in entries if entry.oldest_version is not None and not entry.is_residual]
        metrics["groups_late"] = sum(step - oldest > self.recipe.max_staleness for oldest in oldest_versions)
        parked = await self.store.call(lambda store: store.parked())
        counts = {"groups_parked": sum(index >= 0 for index in parked), "residuals": len(entries) - len(groups)}
        metrics |= {name: number for name, number in counts.items() if number}
        if residuals := [entry for entry in entries if entry.is_residual]:
            metrics["tokens_residual"] = sum(entry.use.tokens_trained for entry in residuals if entry.use is not None)
        if wall_s is not None:
            metrics |= timeline | DRIVER_LAG.metrics() | await self._queues()
        workers = {} if self.workers is None else self.workers.figures()
        return metrics | self.fault_rate.attempt_metrics() | self.served.figures() | workers

    async def _queues(self) -> dict[str, float]:
        """Returns metrics with the numbers of groups that are running, ready, or assigned to an incomplete step.

        Only recent blocks are counted, because earlier blocks have no open groups.
        """
        first = self.order.block(max(0, self.served.version - _OPEN_BLOCKS)).start
        open_ = Counter(entry.state for entry in await self.store.entries(first=first) if not entry.is_residual)
        return {"groups_running": ACTIVITY.count(GROUPS), "groups_ready": open_["ready"], "groups_assigned": open_["assigned"]}

    def _group_metrics(
        self, version: PolicyVersion, groups: tuple[Group, ...], report: SwapReport | None, wall_s: float | None
    ) -> dict[str, float]:
        """Returns the metrics of a step's groups, and records the excluded episodes. Runs in a thread, because a step may have 100 MB of
        groups."""
        measure.record_excluded(self.folder, version.number, groups)
        metrics = measure.step_metrics(groups, self.folder / version.folder, report, step=version.number - 1, wall_s=wall_s)
        return metrics | memory_metrics(groups)

    async def _record(self, version: PolicyVersion, metrics: dict[str, float]) -> None:
        self.tracker.log(version.number, metrics)
        await asyncio.to_thread(save_pace, self.pace, self.recipe, self.folder)
        step_alerts = await asyncio.to_thread(measure.step_alerts, self.folder, version.number - 1, self.recipe.learner.limits)
        alerts = (*step_alerts, self.fault_rate.suspect_alert(), self.pace.slow_start_alert())
        for alert in filter(None, alerts):
            self.tracker.alert(alert)
