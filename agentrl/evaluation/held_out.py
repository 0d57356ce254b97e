"""Evaluations of the served version on the held-out tasks: what `evaluations.json` and `episodes/` of a run folder get."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.errors import InfrastructureError
from agentrl.evaluation.evaluate import SplitEvaluation, evaluate_split
from agentrl.failure.digest import write_digest
from agentrl.memory.run_memory import EvaluationNotes, record_answer_leaks
from agentrl.records import ScoredEpisode, Split, Task
from agentrl.session import measure
from agentrl.session.ending import warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import PreflightResult
from agentrl.session.transcript import append_transcripts


async def evaluate_once(run: Run, phase: str, *, step: int) -> dict[str, float]:
    """Evaluates as `evaluate_served`, but reuses a finished evaluation of an earlier driver if weights and settings are the same."""
    rated = measure.recorded_rates(run.folder, phase, of=_of(run), splits=(split for split, count in _counts(run) if count))
    if not rated:  # or nothing is held out, which is recorded as well
        return await evaluate_served(run, phase, step=step)
    run.tracker.evaluated(phase, {str(split): rate for split, rate in rated.items()})
    rates = {str(split): rate.value for split, rate in rated.items()}
    run.registry.set_evals(run.served.version, rates)
    return rates


async def evaluate_served(run: Run, phase: str, *, step: int) -> dict[str, float]:
    """Evaluates the served version on both held-out splits and keeps the result in `evaluations.json` and `episodes/`."""
    run.tracker.stage(f"evaluate {phase}")
    transcripts = run.folder / "episodes" / f"{phase}.jsonl"
    transcripts.unlink(missing_ok=True)  # of an evaluation that a killed run had begun, and that is made again
    sampler = replace(run.groups.runner, sampling=run.recipe.evaluation.sampling)
    runner = replace(run.groups, runner=sampler)
    results: dict[Split, SplitEvaluation] = {}
    bounded: dict[Split, dict[int, SplitEvaluation]] = {}  # by the bound on thinking
    run.capture.reset_phase(phase)
    config = run.recipe.memory

    async def played(
        split: Split, count: int, name: str, on_scored: Callable[[Task, ScoredEpisode], None], most: int | None
    ) -> SplitEvaluation:
        with closing(EvaluationNotes(config)) if config is not None else nullcontext() as notes:
            return await evaluate_split(
                runner,
                run.family,
                split,
                count,
                phase=name,
                step=step,
                attempts=run.recipe.evaluation.attempts,
                on_done=run.tracker.evaluating,
                on_scored=on_scored,
                notes=notes,
                thinking_tokens=most,
            )

    def noted(name: str, task: Task, episode: ScoredEpisode) -> None:
        if told := record_answer_leaks(run.folder, task, [episode], phase=name, step=step):
            run.tracker.alert(told)

    def scored(task: Task, episode: ScoredEpisode) -> None:
        run.capture.capture_episode(task, episode, phase=phase, step=step)
        noted(phase, task, episode)

    for split, count in _counts(run):
        if count:
            results[split] = await played(split, count, phase, scored, None)
            append_transcripts(transcripts, results[split].transcripts)
            for most in run.recipe.evaluation.thinking_tokens:
                named = f"{phase}_think{most}"
                bounded.setdefault(split, {})[most] = await played(split, count, named, partial(noted, named), most)
    measure.save_evaluation(run.folder, phase, results, bounded, of=_of(run))
    rated = {str(split): result.rate for split, result in results.items() if result.rate is not None}
    run.tracker.evaluated(phase, rated)
    told = measure.excluded_alerts(phase, results)
    for line in told:
        run.tracker.alert(line)
    if len(rated) < len(results) and phase in ("before", "eval"):  # later ones are no reason to throw away what was learned
        raise InfrastructureError(f"no rate without a score: {'; '.join(told)}")
    rates = {split: rate.value for split, rate in rated.items()}
    run.registry.set_evals(run.served.version, rates)
    return rates


def _counts(run: Run) -> tuple[tuple[Split, int], ...]:
    return (Split.HELDOUT, run.recipe.evaluation.heldout), (Split.HELDOUT_REAL, run.recipe.evaluation.heldout_real)


def _of(run: Run) -> str:
    """A hash of the served weights and of the recipe's settings for evaluations."""
    settings = run.recipe.evaluation.model_dump_json(exclude={"every"})
    return hashlib.sha256(f"{run.served.sha256} {settings}".encode()).hexdigest()


async def evaluate_held_out(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool = True
) -> dict[str, dict[str, Any]]:
    """Serves the recipe's model and evaluates it on the held-out splits: split -> what `measure.read_evaluation` gives. For callers: see
    `agentrl.run.loop.train`."""
    async with open_run(recipe, start, checked, root=root, console=console) as run:
        run.tracker.stage("start", "server and sandbox image")
        base = run.registry.get(0)
        assert base is not None, "version 0 was registered"
        await run.start_serving(base)
        async with asyncio.TaskGroup() as parts:
            watcher = parts.create_task(run.served.watch(on_loss=run.learner.kill))
            await evaluate_served(run, "eval", step=0)
            watcher.cancel()
    with warn_on_error(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return measure.read_evaluation(start.folder, "eval")
