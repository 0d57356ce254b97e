"""The whole pipeline on one page: rollouts, learner and server, meeting only in the store, the registry and at the server.

    groups --(store)--> learner --(registry)--> swap --(server)--> newer groups ...

Group `g` belongs to learner step `g // groups_per_step` and may start once the server answers with version
`step - max_staleness` or a newer one. That bound is the whole synchronization.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl import measure, usercode
from agentrl.ending import closing_in_turn, kept_going
from agentrl.errors import LearnerError, LearnerHalted, StoreError, SwapError, UserError, VerifierError
from agentrl.evaluate import Evaluation, evaluate
from agentrl.experience import RunningEpisodes, SqliteStore
from agentrl.failure import FaultRate, Quarantine
from agentrl.learner.process import LearnerProcess
from agentrl.observe import RunTracker, Summary, write_report
from agentrl.preflight import Checked, export_model, open_chat, place_base_version
from agentrl.protocols import Policy, SandboxBackend, TaskFamily
from agentrl.recipe import Recipe
from agentrl.records import Group, PolicyVersion, Split, SwapReport, Task, VersionState
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner, fault, left_out_group, task_fault
from agentrl.rollout.chat import ChatFormat
from agentrl.runfolder import Start, write_start
from agentrl.sandbox import open_sandboxes
from agentrl.served import ServedPolicy, to_serve
from agentrl.task import GroupSchedule, sandbox_specs
from agentrl.transcript import append, transcript
from agentrl.version import FolderRegistry, sha256_file

log = logging.getLogger(__name__)

_POLL_S = 0.05
_LEARNER_RESTARTS = 3


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one running pipeline, opened in `train` and closed with it."""

    recipe: Recipe
    folder: Path
    tracker: RunTracker
    store: SqliteStore
    running: RunningEpisodes
    quarantine: Quarantine
    faults: FaultRate
    registry: FolderRegistry
    family: TaskFamily
    sandboxes: SandboxBackend
    served: ServedPolicy
    groups: GroupRunner
    schedule: GroupSchedule
    learner: LearnerProcess
    stop_at: int  # learner step after which the run ends; lowered by a first ctrl-C
    learning: bool = False
    interrupted: bool = False
    last_step_at: float = 0.0

    def stop_after_step(self) -> None:
        """Finish the step in hand, if there is one; save, report."""
        self.interrupted = True
        self.stop_at = min(self.stop_at, self.served.version + 1 if self.learning else max(self.served.version, 0))


async def train(recipe: Recipe, start: Start, checked: Checked, *, root: Path, console: bool = True) -> Summary:
    """Runs a recipe from evaluation to evaluation and returns its summary; goes on where the run in `start.folder` ended, if one did.

    The caller holds the run folder (`agentrl.runfolder.claimed`) and has looked at everything that is cheap to look at
    (`agentrl.preflight.check`). Raises `UserError` before anything is started when the recipe cannot run here,
    and `InfrastructureError` when a part fails for good; whatever was finished until then is kept.
    """
    async with _opened(recipe, start, checked, root=root, console=console) as run:
        with measure.interrupts(run.stop_after_step):
            try:
                await _pipeline(run)
            except BaseException:
                with kept_going(run.folder, "the summary and the report"):
                    _report(run)
                raise
            return _report(run)


def _report(run: Run) -> Summary:
    backend, stages = run.sandboxes.name, run.tracker.wall_s
    summary = measure.summarize(run.folder, run.recipe, stages, backend=backend, interrupted=run.interrupted)
    summary.write(run.folder)
    write_report(run.folder)
    return summary


@asynccontextmanager
async def _opened(recipe: Recipe, start: Start, checked: Checked, *, root: Path, console: bool) -> AsyncIterator[Run]:
    """Checks what takes long to check, then opens the parts; closes them in reverse order, whatever happens."""
    run_dir = start.folder
    faults = FaultRate(recipe.rollout.max_fault_rate, concurrency=recipe.rollout.concurrency)
    async with closing_in_turn(run_dir) as stack:
        sandboxes = await open_sandboxes(recipe.sandbox, run_label=run_dir.name, root=root)
        stack.push_async_callback(sandboxes.close)
        chat = open_chat(checked.model)
        write_start(run_dir, recipe, start)
        place_base_version(checked.model, run_dir / "versions" / "000000")
        tracker = RunTracker(run_dir, console=console, steps=recipe.steps)
        stack.callback(tracker.close)
        store = SqliteStore(run_dir / "experience.sqlite")
        stack.callback(store.close)
        running = RunningEpisodes(run_dir / "running")
        for index in running.groups():
            if store.has(index):  # stored, and then the driver died
                running.forget(index)
        registry = FolderRegistry(run_dir / "versions")
        stack.callback(registry.close)
        if registry.get(0) is None:
            weights = run_dir / "versions" / "000000" / "model.safetensors"
            registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256=sha256_file(weights)))
        served = ServedPolicy(recipe, run_dir, registry, gpus=checked.gpus.server)
        stack.push_async_callback(served.close)
        learner = LearnerProcess(run_dir, recipe, gpus=checked.gpus.learner)
        stack.push_async_callback(learner.kill)
        yield Run(
            recipe=recipe,
            folder=run_dir,
            tracker=tracker,
            store=store,
            running=running,
            quarantine=Quarantine(run_dir, limit=recipe.rollout.max_quarantined),
            faults=faults,
            registry=registry,
            family=checked.family,
            sandboxes=sandboxes,
            served=served,
            groups=_group_runner(recipe, served, sandboxes, chat, replace(checked.scorer, sandboxes=sandboxes), running, faults),
            schedule=GroupSchedule(checked.family, recipe.seed),
            learner=learner,
            stop_at=recipe.steps,
        )


def _group_runner(
    recipe: Recipe,
    policy: Policy,
    sandboxes: SandboxBackend,
    chat: ChatFormat,
    scorer: TaskScorer,
    running: RunningEpisodes,
    faults: FaultRate,
) -> GroupRunner:
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=sandboxes,
        chat=chat,
        temperature=recipe.rollout.temperature,
        max_model_len=recipe.policy.max_model_len,
        request_timeout_s=recipe.serving.request_timeout_s,
        open_timeout_s=recipe.sandbox.open_timeout_s,
    )
    return GroupRunner(
        runner=runner,
        score=scorer,
        slots=asyncio.Semaphore(recipe.rollout.concurrency),
        group_size=recipe.rollout.group_size,
        max_retries=recipe.rollout.max_retries,
        branching=recipe.rollout.branching,
        keeper=running if recipe.rollout.checkpoint_turns else None,
        on_attempt=faults.attempt,
    )


async def _pipeline(run: Run) -> None:
    run.tracker.stage("start", "server, learner and sandbox image")
    newest = to_serve(run.registry)
    assert newest is not None, "version 0 was registered"
    async with asyncio.TaskGroup() as parts:
        needed = newest.number < run.recipe.steps
        learning = parts.create_task(_watch_learner(run)) if needed else None  # from here on: what it refuses ends the start
        async with asyncio.TaskGroup() as starting:
            for spec in sandbox_specs(run.family):
                starting.create_task(run.sandboxes.prepare(spec))
            starting.create_task(run.served.start(newest))
        if newest.state is VersionState.CANDIDATE:
            run.registry.set_state(newest.number, VersionState.SERVING)
        watchers = [parts.create_task(run.served.watch(on_loss=run.learner.kill)), parts.create_task(run.faults.watch())]
        if newest.number == 0:
            await _evaluate(run, "before", step=0)
        await _learn(run, learning)
        if run.served.version >= run.recipe.steps:
            await _evaluate(run, "after", step=run.served.version)
            run.registry.set_state(run.served.version, VersionState.PROMOTED)
        for watcher in watchers:
            watcher.cancel()
    if not measure.learned(run.folder):
        return  # a model that is version 0 under another name would look like a result; the summary says why there is none
    versions = run.folder / "versions"
    export_model(versions / f"{run.served.version:06d}", run.folder / "model", base=versions / "000000")


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
    """Starts each group as soon as its step may be sampled; a group that a resumed run already has is not made again."""
    per_step = run.recipe.rollout.groups_per_step
    async with asyncio.TaskGroup() as running:
        for index in range(run.served.version * per_step, run.recipe.steps * per_step):
            step = index // per_step
            await run.served.wait_version(step - run.recipe.max_staleness)
            if step >= run.stop_at:
                return
            if not run.store.has(index):
                running.create_task(_one_group(run, index))


async def _one_group(run: Run, index: int) -> None:
    step = index // run.recipe.rollout.groups_per_step
    group, task = await _sampled(run, index, step)
    group = _stored(run, group)
    run.running.forget(index)
    run.tracker.progress(index, group)
    run.quarantine.add(group)
    if task is not None and index % run.recipe.rollout.groups_per_step == 0:
        append(run.folder / "episodes" / "train.jsonl", [transcript(task, group.episodes[0], phase="train", step=step)])


def _stored(run: Run, group: Group) -> Group:
    """Stores the group, or what can be said of one that cannot be written down. `StoreError`, as of a full disk, ends the run."""
    try:
        run.store.put(group)
        return group
    except StoreError:
        raise
    except Exception as error:
        size = run.recipe.rollout.group_size
        left_out = left_out_group(group.index, f"group {group.index}", group.task_key, fault(error, stage="store"), size=size)
        run.store.put(left_out)
        return left_out


async def _sampled(run: Run, index: int, step: int) -> tuple[Group, Task | None]:
    """The group of a task; without a single attempt when the task is broken, known to be or not even made (then it is None)."""
    size = run.recipe.rollout.group_size
    try:
        task = run.schedule.task(index)
    except Exception as error:  # a family may raise anything (see make_task); the task is a pure function of the index, so it always will
        if not isinstance(error, UserError):
            usercode.report(f"task of group {index}", error)
        return left_out_group(index, f"task of group {index}", f"group {index}", task_fault(error), size=size), None
    if (fault := run.quarantine.known(task.key)) is not None:
        return left_out_group(index, task.id, task.key, fault, size=size), task
    return await run.groups.group(index, task, oldest_version=step - run.recipe.max_staleness), task


async def _swap_versions(run: Run) -> None:
    """Takes each version the learner publishes into the server, in order, but for those it has rolled back."""
    number = run.served.version + 1
    while run.served.version < run.stop_at:
        if _taken_back(run):
            await _go_back(run)
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
                continue  # it was taken back or rolled back meanwhile, which is why it could not be loaded
        await _finished_step(run, version, report)
        number += 1


def _taken_back(run: Run) -> bool:
    """Whether the learner has gone back to an older checkpoint, because the newest was damaged, and forgotten the version that serves."""
    found = run.registry.get(run.served.version)
    return found is None or found.sha256 != run.served.sha256


async def _go_back(run: Run) -> None:
    version = to_serve(run.registry)
    assert version is not None, "version 0 is never forgotten"
    run.tracker.alert(f"version {run.served.version} was taken back by the learner; serving version {version.number}")
    await run.served.go_back(version)


async def _finished_step(run: Run, version: PolicyVersion, report: SwapReport | None) -> None:
    per_step = run.recipe.rollout.groups_per_step
    step = version.number - 1
    groups: tuple[Group, ...] = run.store.groups(range(step * per_step, (step + 1) * per_step))
    now = time.monotonic()
    metrics = measure.step_metrics(groups, run.folder / version.folder, report, step=step, wall_s=now - run.last_step_at)
    metrics |= run.faults.figures()
    measure.keep_left_out(run.folder, version.number, groups)
    run.last_step_at = now
    every = run.recipe.evaluation.every
    if every and version.number % every == 0 and version.number < run.recipe.steps:
        metrics |= await _evaluate(run, f"step{version.number}", step=version.number)
        run.tracker.stage("train", f"{run.stop_at} steps")
        run.last_step_at = time.monotonic()
    run.tracker.log(version.number, metrics)
    for line in measure.alerts(run.folder, step):
        run.tracker.alert(line)
    run.registry.prune(run.recipe.learner.keep_versions)


async def _watch_learner(run: Run) -> None:
    """Starts the learner, and again when it dies; it goes on from its newest checkpoint. What it refuses is final."""
    for restart in range(_LEARNER_RESTARTS + 1):
        await run.learner.start()
        try:
            await run.learner.wait()
            return
        except LearnerHalted as error:
            run.tracker.alert(f"halted: {error}")
            raise
        except LearnerError as error:
            if restart == _LEARNER_RESTARTS:
                raise
            log.warning("%s", error)


async def _evaluate(run: Run, phase: str, *, step: int) -> dict[str, float]:
    """Evaluates the served version on both held-out splits and keeps the result in `evaluations.json` and `episodes/`."""
    run.tracker.stage(f"evaluate {phase}")
    sampler = replace(run.groups.runner, temperature=run.recipe.evaluation.temperature)
    runner = replace(run.groups, runner=sampler)
    results: dict[Split, Evaluation] = {}
    for split, count in (
        (Split.HELDOUT, run.recipe.evaluation.heldout),
        (Split.HELDOUT_REAL, run.recipe.evaluation.heldout_real),
    ):
        if count:
            results[split] = await evaluate(runner, run.family, split, count, phase=phase, step=step, on_done=run.tracker.evaluating)
            append(run.folder / "episodes" / f"{phase}.jsonl", results[split].transcripts)
    measure.save_evaluation(run.folder, phase, results)
    scored = {str(split): result.rate for split, result in results.items() if result.rate is not None}
    run.tracker.evaluated(phase, scored)
    told = measure.unscored(phase, results)
    for line in told:
        run.tracker.alert(line)
    if len(scored) < len(results) and phase in ("before", "eval"):  # later ones are no reason to throw away what was learned
        raise VerifierError(f"no rate without a score: {'; '.join(told)}")
    rates = {split: rate.value for split, rate in scored.items()}
    run.registry.set_evals(run.served.version, rates)
    return rates


async def evaluate_only(recipe: Recipe, start: Start, checked: Checked, *, root: Path, console: bool = True) -> dict[str, dict[str, float]]:
    """Serves the recipe's model and evaluates it on the held-out splits: split -> value, ci_low, ci_high, n. For callers: see `train`."""
    async with _opened(recipe, start, checked, root=root, console=console) as run:
        run.tracker.stage("start", "server and sandbox image")
        base = run.registry.get(0)
        assert base is not None, "version 0 was registered"
        async with asyncio.TaskGroup() as starting:
            for spec in sandbox_specs(run.family):
                starting.create_task(run.sandboxes.prepare(spec))
            starting.create_task(run.served.start(base))
        await _evaluate(run, "eval", step=0)
    return measure.read_evaluation(start.folder, "eval")
