"""Evaluates the served version on the held-out tasks. Writes `evaluations.json` and `episodes/` into the run folder."""

from __future__ import annotations

import asyncio
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.recipe import EvalConfig, Recipe
from agentrl.config.tools import MemoryConfig
from agentrl.errors import InfrastructureError
from agentrl.evaluation.engine import StoredEpisodes, evaluation_runner
from agentrl.evaluation.splits import SplitEvaluation, evaluate_split
from agentrl.failure import Capture
from agentrl.failure.digest import write_digest
from agentrl.memory.run_memory import EvaluationNotes, record_answer_leaks
from agentrl.protocols import PolicyServer, TaskFamily, Tracker, VersionRegistry
from agentrl.records import PolicyVersion, ScoredEpisode, Split, Task
from agentrl.rollout import GroupRunner
from agentrl.session import measure
from agentrl.session.ending import warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.opening import open_run
from agentrl.session.preflight import PreflightResult
from agentrl.session.transcript import append_transcripts

if TYPE_CHECKING:
    from agentrl.session.opening import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """Evaluates the version that a run serves on the run's held-out tasks."""

    config: EvalConfig
    memory: MemoryConfig | None
    folder: Path
    family: TaskFamily
    groups: GroupRunner
    registry: VersionRegistry
    served: PolicyServer
    capture: Capture
    stored: StoredEpisodes
    tracker: Tracker

    @classmethod
    def of(cls, run: Run) -> HeldOutEvaluation:
        """Returns the `HeldOutEvaluation` for an open run."""
        return cls(
            config=run.recipe.evaluation,
            memory=run.recipe.memory,
            folder=run.folder,
            family=run.family,
            groups=run.groups,
            registry=run.registry,
            served=run.served,
            capture=run.capture,
            stored=StoredEpisodes(run.store),
            tracker=run.tracker,
        )

    async def evaluate_once(self, phase: str, *, step: int) -> dict[str, float]:
        """Calls `evaluate`, or reuses an evaluation that an earlier driver finished with the same weights and settings.

        Returns a mapping split -> mean score.
        """
        rates = measure.recorded_rates(self.folder, phase, of=self._key(), splits=self._counts())
        if not rates:  # also if no tasks are held out, so that this is recorded
            return await self.evaluate(phase, step=step)
        self.tracker.evaluated(phase, {str(split): rate for split, rate in rates.items()})
        return await self._register({str(split): rate.value for split, rate in rates.items()})

    async def evaluate(self, phase: str, *, step: int) -> dict[str, float]:
        """Evaluates the served version on the nonempty held-out splits, and stores the result. Returns a mapping split -> mean score.

        If no episode of a split was scored, raises `InfrastructureError` in the phases `before` and `eval`. In a later phase, in which an
        error would discard the training, the split is missing from the result.
        """
        self.tracker.stage(f"evaluate {phase}")
        transcripts = self.folder / "episodes" / f"{phase}.jsonl"
        transcripts.unlink(missing_ok=True)  # from an interrupted evaluation
        await asyncio.to_thread(self.capture.reset_phase, phase)
        evaluations: dict[Split, SplitEvaluation] = {}
        bounded: dict[Split, dict[int, SplitEvaluation]] = {}  # split -> thinking bound -> evaluation
        for split, count in self._counts().items():
            evaluations[split] = await self._evaluate(split, count, phase, step=step)
            await asyncio.to_thread(append_transcripts, transcripts, evaluations[split].transcripts)
            bounded[split] = {
                bound: await self._evaluate(split, count, f"{phase}_think{bound}", step=step, thinking_tokens=bound)
                for bound in self.config.thinking_tokens
            }
        await asyncio.to_thread(measure.save_evaluation, self.folder, phase, evaluations, bounded, of=self._key())
        rates = {str(split): one.rate for split, one in evaluations.items() if one.rate is not None}
        self.tracker.evaluated(phase, rates)
        alerts = measure.excluded_alerts(phase, evaluations)
        for alert in alerts:
            self.tracker.alert(alert)
        if len(rates) < len(evaluations) and phase in ("before", "eval"):
            raise InfrastructureError(f"the evaluation has no rate, because no episode was scored: {'; '.join(alerts)}")
        return await self._register({split: rate.value for split, rate in rates.items()})

    async def continue_after(self, version: PolicyVersion) -> None:
        """Renames the evaluation `after` of a session that stopped at `version` to `stepN`, or removes it if none is due then."""
        due = self.config.every and version.number and version.number % self.config.every == 0
        key = measure.evaluation_key(self.config, version.sha256)
        await asyncio.to_thread(measure.rename_evaluation, self.folder, "after", f"step{version.number}" if due else None, of=key)

    async def _evaluate(self, split: Split, count: int, phase: str, *, step: int, thinking_tokens: int | None = None) -> SplitEvaluation:
        if split == next(iter(self._counts())):
            await self.stored.begin(phase)
        recording = asyncio.Lock()  # only one task may append to the file at a time

        def record(task: Task, scored: ScoredEpisode) -> str:
            if thinking_tokens is None:
                self.capture.capture_episode(task, scored, phase=phase, step=step)
            return record_answer_leaks(self.folder, task, [scored], phase=phase, step=step)

        async def on_scored(task: Task, scored: ScoredEpisode) -> None:
            async with recording:
                alert = await asyncio.to_thread(record, task, scored)
            await self.stored.add(phase, step, task, scored)
            if alert:
                self.tracker.alert(alert)

        opened = None if self.memory is None else await asyncio.to_thread(EvaluationNotes, self.memory)
        with closing(opened) if opened is not None else nullcontext() as notes:
            return await evaluate_split(
                evaluation_runner(self.groups, self.config.distribution),
                self.family,
                split,
                count,
                phase=phase,
                step=step,
                attempts=self.config.attempts,
                on_done=self.tracker.evaluating,
                on_scored=on_scored,
                notes=notes,
                thinking_tokens=thinking_tokens,
            )

    async def _register(self, rates: dict[str, float]) -> dict[str, float]:
        await asyncio.to_thread(self.registry.set_evals, self.served.version, rates)
        return rates

    def _counts(self) -> dict[Split, int]:
        counts = {Split.HELDOUT: self.config.heldout, Split.HELDOUT_REAL: self.config.heldout_real}
        return {split: count for split, count in counts.items() if count}

    def _key(self) -> str:
        return measure.evaluation_key(self.config, self.served.sha256)


async def evaluate_held_out(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool = True
) -> dict[str, dict[str, Any]]:
    """Serves the recipe's model and evaluates it on the held-out splits.

    Returns a mapping split -> stored evaluation (see `measure.read_evaluation`). The caller makes the same preparations as for
    `agentrl.run.loop.train`.
    """
    async with open_run(recipe, start, checked, root=root, console=console) as run:
        run.tracker.stage("start", "server and sandbox image")
        await run.start_serving(await run.base_version())
        async with asyncio.TaskGroup() as parts:
            watcher = parts.create_task(run.served.watch(on_loss=run.learner.kill))
            await HeldOutEvaluation.of(run).evaluate("eval", step=0)
            watcher.cancel()
    with warn_on_error(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return measure.read_evaluation(start.folder, "eval")
