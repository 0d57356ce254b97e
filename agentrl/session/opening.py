"""Opens the parts of a run from its recipe, and closes them in reverse order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.agent import ChatFormat
from agentrl.agent.agent_environment import check_environment
from agentrl.agent.mcp.servers import RunTools
from agentrl.agent.run_tools import candidate_tasks, declared_tools, pin_tools, save_tool_offers, with_sub_agent_tools
from agentrl.base.cpu_time import CpuClock
from agentrl.base.files import sha256_file
from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.base.media import MediaFolder
from agentrl.base.processes import raise_file_limit, rare_collections
from agentrl.cluster import ClusterPlan
from agentrl.cluster.process_host import LocalLauncher
from agentrl.config.recipe import Recipe
from agentrl.environment import close_environments
from agentrl.evaluation.replay import check_start_tokens
from agentrl.experience import BlockStarts, DriverStore, FolderCheckpoints, GroupOrder, drop_unused_images, open_store
from agentrl.failure import Capture, FaultRate, Quarantine
from agentrl.failure.case import Suite
from agentrl.failure.overlap import WithholdingLog
from agentrl.gate.schedule import VersionServer
from agentrl.learner.process import LearnerProcess
from agentrl.memory.run_memory import RunMemory, open_memory, placeholder_memory
from agentrl.observe import RunTracker, StageClock, open_trackers
from agentrl.observe.event_log import EventLog
from agentrl.observe.events import RunStarted
from agentrl.observe.run_events import EpisodeEvents, EventTracker, Record
from agentrl.observe.timeline import Timeline
from agentrl.plugins import parts
from agentrl.protocols import Launcher, PolicyServer, SandboxBackend, TaskFamily, Tracker, VersionRegistry
from agentrl.protocols.serving import MAX_CACHE_USE
from agentrl.records import PolicyVersion, Split
from agentrl.reward.scorer import audit_contradiction
from agentrl.rollout import Admission, EpisodeRunner, GroupRunner, Pace
from agentrl.run.late import LateGroups, check_late
from agentrl.sandbox import open_sandboxes
from agentrl.session.builders import build_episode_runner, build_group_runner, fault_rate, open_policy_server
from agentrl.session.ending import closing_stack
from agentrl.session.folder import RunStart, write_start
from agentrl.session.judge_servers import JudgeServers
from agentrl.session.league import RunLeague, open_league
from agentrl.session.models import copy_base_version
from agentrl.session.pace import restore_pace, save_pace
from agentrl.session.preflight import PreflightResult, check_prompt, check_snapshots, check_thinking, open_chat
from agentrl.session.run_practice import copy_practice_files
from agentrl.session.run_services import RunServices, open_services
from agentrl.session.task_changes import open_changes
from agentrl.session.traces import open_traces
from agentrl.task import GroupSchedule, sandbox_specs
from agentrl.task.changes import TaskChanges
from agentrl.task.group_tasks import GroupTasks
from agentrl.version import FolderRegistry

if TYPE_CHECKING:
    from agentrl.run.worker_pool import WorkerPool

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Progress:
    """The progress of a run in the current session."""

    stop_at: float  # learner step after which the session ends; the first ctrl-C lowers it
    end: float = field(init=False)
    """Learner step after which the run is finished: the last step in the recipe, or the step after which an endless run is stopped."""
    learning: bool = False
    interrupted: bool = False
    timeline: Timeline = field(default_factory=Timeline)  # an interval starts when training starts and after each step

    def __post_init__(self) -> None:
        self.end = self.stop_at

    @property
    def plan(self) -> str:
        """A description of when training ends."""
        return f"{self.stop_at:.0f} steps" if math.isfinite(self.stop_at) else "until it is stopped"


@dataclass(slots=True, kw_only=True)
class Run:
    """The open parts of a run. `Rollouts`, `HeldOutEvaluation`, `StepRecords` and `Gate` each receive only the parts that they use."""

    recipe: Recipe
    folder: Path
    progress: Progress
    tracker: Tracker
    clock: StageClock
    store: DriverStore
    checkpoints: FolderCheckpoints
    quarantine: Quarantine
    capture: Capture
    fault_rate: FaultRate
    registry: VersionRegistry
    family: TaskFamily
    sandboxes: SandboxBackend
    served: PolicyServer
    groups: GroupRunner
    group_tasks: GroupTasks
    task_changes: TaskChanges
    order: GroupOrder
    starts: BlockStarts
    late: LateGroups
    learner: LearnerProcess
    judges: JudgeServers
    suite: Suite | None = None  # suite of the gate
    memory: RunMemory | None = None
    gate_server: VersionServer | None = None  # only with gate.server=own
    league: RunLeague | None = None  # only with rollout.agent=players and past versions as opponents
    workers: WorkerPool | None = None  # only with rollout.workers

    @property
    def version_servers(self) -> list[VersionServer]:
        """The running servers that serve versions on request."""
        return [server for server in (self.gate_server, None if self.league is None else self.league.server) if server is not None]

    async def base_version(self) -> PolicyVersion:
        """Returns version 0."""
        base = await asyncio.to_thread(self.registry.get, 0)
        assert base is not None, "version 0 was registered"
        return base

    async def start_serving(self, version: PolicyVersion, *, gating: bool = False, learning: bool = False) -> None:
        """Starts the servers with a version, and builds the sandbox images of the task family at the same time.

        Args:
            gating: whether the gate will run; otherwise its server is not started.
            learning: whether the learner is starting; if so, it writes the probe logprobs of version 0.
        """
        async with asyncio.TaskGroup() as starting:
            for spec in sandbox_specs(self.family):
                starting.create_task(self.sandboxes.prepare(spec))
            starting.create_task(self.served.start(version, await_probe=learning))
            if gating and self.gate_server is not None:
                starting.create_task(self.gate_server.start(version, await_probe=learning))
            if self.league is not None:
                starting.create_task(self.league.start(version))
            starting.create_task(self.judges.ready())
        self.groups.runner.pace.set_idle_token_s(self.served.token_s)

    def stop_after_step(self) -> None:
        """Stops the run after the step in progress, if there is one. A run without a last step is then finished. Any other run, and a run
        that has no step in progress, counts as interrupted."""
        progress, serving = self.progress, self.served.version
        progress.stop_at = min(progress.stop_at, serving + 1 if progress.learning else max(serving, 0))
        if progress.learning and math.isinf(progress.end):
            progress.end = progress.stop_at
        else:
            progress.interrupted = True


@asynccontextmanager
async def open_run(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool, order: GroupOrder | None = None
) -> AsyncIterator[Run]:
    """Runs the slow checks, then opens the parts of a run. When the block ends, closes the parts in reverse order. Raises `UserError` if a
    check fails, and the errors of the parts.

    Args:
        order: the groups that the run samples, and the order in which the learner selects them; None means the order in the recipe.
    """
    order = order or GroupOrder.from_recipe(recipe)
    scorer = checked.scorer
    check_late(order, [f"verifier {name}" for name in scorer.late], [f"verifier {name}" for name in scorer.residual])
    raise_file_limit()
    async with rare_collections(), closing_stack(start.folder) as stack:
        launcher = await open_launcher(checked.plan, start.folder, root=root)
        stack.push_async_callback(launcher.close)
        lazily = checked.family.task(Split.TRAIN, 0).sandbox is None
        sandboxes = await open_sandboxes(recipe.sandbox, run_label=start.folder.name, root=root, lazily=lazily)
        stack.push_async_callback(sandboxes.close)
        stack.push_async_callback(close_environments)
        offered = await _check_slowly(recipe, start.folder, checked, sandboxes, root=root)
        await asyncio.to_thread(_write_folder, recipe, start, checked, offered[1], root=root)
        yield await _open_parts(stack, recipe, start, checked, launcher, sandboxes, offered, root, console, order)


async def open_launcher(plan: ClusterPlan, folder: Path, *, root: Path) -> Launcher:
    """Returns the launcher that starts the parts of a plan.

    Raises `UserError` if the cluster does not respond, has too few resources for the plan, or has a node without agentrl.
    """
    if plan.is_local:
        return LocalLauncher(folder, root=root, devices=plan.devices, wrap=plan.wrap)
    from agentrl.cluster.ray_launcher import RayLauncher  # Ray may not be installed

    return await RayLauncher.open(plan, folder, root=root)


async def _check_slowly(
    recipe: Recipe, folder: Path, checked: PreflightResult, sandboxes: SandboxBackend, *, root: Path
) -> tuple[ChatFormat, RunTools]:
    """Runs the checks that need sandboxes or the tokenizer. Returns the policy's chat format and the pinned tools."""
    await check_snapshots(recipe, checked.family.task(Split.TRAIN, 0), sandboxes)
    base, memory = folder / "versions" / "000000", placeholder_memory(recipe)
    model, template = (base, None) if base.is_dir() else (checked.model, checked.template)  # version 0 of a resumed run has the template
    chat = open_chat(model, template, policy=recipe.policy, media=MediaFolder(folder))
    others = [case.task for case in checked.suite.cases] if checked.suite is not None else []
    if checked.practice is not None:
        others += [task for tasks in checked.practice.tasks for task in tasks]
    tasks = with_sub_agent_tools(candidate_tasks(checked.family, others), recipe.rollout.delegation)
    tools = await pin_tools(declared_tools(recipe.mcp, recipe.tools, root), tasks, sandboxes, folder=folder, chat=chat, memory=memory)
    if checked.suite is not None:
        check_start_tokens([checked.suite], chat, tools, recipe.rollout)
    if recipe.agent.ref in parts.AGENT.shipped:  # a user-supplied agent may use different prompts and no tools
        check_prompt(chat, checked.family, tools, memory, recipe.rollout.instructions)
        await check_environment(checked.family.task(Split.TRAIN, 0), chat, recipe.agent.ref)
    check_thinking(chat, checked.family, recipe.evaluation)
    return chat, tools


def _write_folder(recipe: Recipe, start: RunStart, checked: PreflightResult, tools: RunTools, *, root: Path) -> None:
    """Creates the run folder with the data that the run must keep: how it was started, tool lists, practice files and version 0."""
    write_start(start.folder, recipe, start)
    save_tool_offers(tools, start.folder)
    copy_practice_files(start.folder, recipe, root=root)
    copy_base_version(checked.model, start.folder / "versions" / "000000", template=checked.template)


async def _open_parts(
    stack: AsyncExitStack,
    recipe: Recipe,
    start: RunStart,
    checked: PreflightResult,
    launcher: Launcher,
    sandboxes: SandboxBackend,
    offered: tuple[ChatFormat, RunTools],
    root: Path,
    console: bool,
    order: GroupOrder,
) -> Run:
    folder, clock, faults = start.folder, StageClock(began=start.began), fault_rate(recipe)
    tracker, record = await _open_tracker(stack, recipe, folder, clock, offered[0], checked, console=console)
    store, starts, checkpoints, memory = await _open_experience(stack, recipe, folder, order)
    services = await open_services(stack, recipe, folder, store, launcher, judges=checked.judges, alert=tracker.alert)
    registry, served, league, gate_server, judges = await _open_servers(stack, recipe, folder, checked, launcher, alert=tracker.alert)
    learner, pace = _open_learner(stack, recipe, folder, services, root, launcher, alert=tracker.alert), _open_pace(stack, recipe, folder)
    episodes = build_episode_runner(recipe, served, sandboxes, *offered, league, router=served, pace=pace, listener=EpisodeEvents(record))
    (changes, tasks), capture = _open_tasks(recipe, folder, checked, root, store, order, starts), _open_capture(stack, recipe, folder)
    run = Run(
        recipe=recipe,
        folder=folder,
        progress=Progress(stop_at=recipe.step_limit, timeline=_open_timeline(learner)),
        tracker=tracker,
        clock=clock,
        store=store,
        checkpoints=checkpoints,
        quarantine=Quarantine(folder),
        capture=capture,
        fault_rate=faults,
        registry=registry,
        family=checked.family,
        sandboxes=sandboxes,
        served=served,
        groups=_open_groups(recipe, checked, episodes, served, checkpoints, faults, memory),
        group_tasks=tasks,
        task_changes=changes,
        order=order,
        starts=starts,
        late=LateGroups(folder=folder, order=order, store=store, tasks=tasks, capture=capture, tracker=tracker),
        learner=learner,
        judges=judges,
        suite=checked.suite,
        memory=memory,
        gate_server=gate_server,
        league=league,
    )
    run.workers = _open_workers(run, root, launcher, services, record)
    return run


def _open_tasks(
    recipe: Recipe, folder: Path, checked: PreflightResult, root: Path, store: DriverStore, order: GroupOrder, starts: BlockStarts
) -> tuple[TaskChanges, GroupTasks]:
    changes, withheld = open_changes(recipe, folder, checked.family, root, checked.practice), WithholdingLog(folder, checked.withheld)
    schedule = GroupSchedule(checked.family, recipe.seed, withheld=withheld, practice=checked.practice, changes=changes)
    return changes, GroupTasks(recipe, folder, store, schedule, order, starts)


def _open_timeline(learner: LearnerProcess) -> Timeline:
    return Timeline(counters={"cpu_s": CpuClock().read, "learner_s": learner.liveness.spent_s})


def _open_pace(stack: AsyncExitStack, recipe: Recipe, folder: Path) -> Pace:
    pace = restore_pace(recipe, folder)
    stack.callback(save_pace, pace, recipe, folder)
    return pace


def _open_groups(
    recipe: Recipe,
    checked: PreflightResult,
    episodes: EpisodeRunner,
    served: PolicyServer,
    checkpoints: FolderCheckpoints,
    faults: FaultRate,
    memory: RunMemory | None,
) -> GroupRunner:
    scorer = replace(checked.scorer, sandboxes=episodes.sandboxes)
    slots = Admission(recipe.rollout.concurrency, use=lambda: served.cache_use, full=MAX_CACHE_USE)
    listener, judge = faults.record_attempt, checked.group_judge
    return build_group_runner(recipe, episodes, scorer, checkpoints, listener, slots, group_judge=judge, memory=memory)


def _open_workers(run: Run, root: Path, launcher: Launcher, services: RunServices, record_event: Record) -> WorkerPool | None:
    """Returns the rollout workers of a run, not started yet; None if the driver runs the episodes."""
    if not run.recipe.rollout.workers:
        return None
    from agentrl.run.worker_pool import WorkerPool  # imported late: its worker opens its parts with this package

    return WorkerPool(
        run.recipe,
        run.folder,
        root=root,
        store=run.store,
        served=run.served,
        memory=run.memory,
        checkpoints=run.checkpoints,
        launcher=launcher,
        service=services.service,
        on_attempt=run.fault_rate.record_attempt,
        alert=run.tracker.alert,
        record_event=record_event,
    )


async def _open_tracker(
    stack: AsyncExitStack, recipe: Recipe, folder: Path, clock: StageClock, chat: ChatFormat, checked: PreflightResult, *, console: bool
) -> tuple[RunTracker, Record]:
    loop = asyncio.get_running_loop()
    events = EventLog(folder, on_fault=lambda fault: _report_fault(loop, tracker, fault))
    stack.callback(events.close)
    traces = open_traces(recipe, folder, alert=lambda text: tracker.alert(text))
    trackers = [clock, EventTracker(events.record), *open_trackers(folder, recipe, console=console), *traces]
    tracker = RunTracker(folder, trackers, steps=recipe.steps or 0)
    stack.callback(tracker.close)
    events.record(RunStarted(name=folder.name, recipe=recipe.name, steps=recipe.steps or 0))
    await stack.enter_async_context(DRIVER_LAG.watched(tracker.alert))
    tracker.stage("prepare", chat.form_summary)
    for note in checked.notes:
        tracker.alert(note)
    return tracker, events.record


def _report_fault(loop: asyncio.AbstractEventLoop, tracker: Tracker, fault: str) -> None:
    """Sends an alert about a fault that occurred in a different thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tracker.alert, fault)


def _open_learner(
    stack: AsyncExitStack,
    recipe: Recipe,
    folder: Path,
    services: RunServices,
    root: Path,
    launcher: Launcher,
    *,
    alert: Callable[[str], None],
) -> LearnerProcess:
    learner = LearnerProcess(folder, recipe, root=root, launcher=launcher, sessions=services.sessions, alert=alert)
    stack.push_async_callback(learner.kill)
    return learner


def _open_capture(stack: AsyncExitStack, recipe: Recipe, folder: Path) -> Capture:
    origin = {"run": folder.name, "recipe": recipe.name, "model": recipe.policy.model}
    capture = Capture(folder, recipe.capture, origin=origin, audit=audit_contradiction)
    stack.callback(capture.close)
    return capture


async def _open_experience(
    stack: AsyncExitStack, recipe: Recipe, folder: Path, order: GroupOrder
) -> tuple[DriverStore, BlockStarts, FolderCheckpoints, RunMemory | None]:
    store = await DriverStore.open(partial(open_store, folder, recipe))
    stack.push_async_callback(store.close)
    checkpoints = FolderCheckpoints(folder / "running")
    for index in checkpoints.groups():
        if await store.has(index):  # the driver died after it stored the group
            await asyncio.to_thread(checkpoints.remove_group, index)
    if recipe.store.ref == "sqlite":  # other stores may hold groups that are not stored yet
        await store.call(lambda store: drop_unused_images(folder, store, checkpoints))
    starts = BlockStarts(order, await store.call(lambda store: store.block_versions()))
    memory = await asyncio.to_thread(open_memory, recipe, folder, store, order, starts)
    if memory is not None:
        stack.callback(memory.close)
    return store, starts, checkpoints, memory


async def _open_servers(
    stack: AsyncExitStack, recipe: Recipe, folder: Path, checked: PreflightResult, launcher: Launcher, *, alert: Callable[[str], None]
) -> tuple[FolderRegistry, PolicyServer, RunLeague | None, VersionServer | None, JudgeServers]:
    """Opens the registry, in which version 0 is registered, and the servers. Only the servers for judges are started here."""
    registry = await asyncio.to_thread(_open_registry, folder)
    stack.callback(registry.close)
    served = open_policy_server(recipe, folder, registry, launcher=launcher, alert=alert)
    stack.push_async_callback(served.close)
    gate_server = None
    if recipe.gate_has_server:
        gate_server = VersionServer(recipe, folder, registry, launcher=launcher, alert=alert)
        stack.push_async_callback(gate_server.policy.close)
    league = open_league(recipe, folder, registry, served, launcher=launcher, alert=alert)
    if league is not None:
        stack.push_async_callback(league.close)
    judges = JudgeServers(recipe, checked.judges, folder=folder, launcher=launcher, alert=alert)
    return registry, served, league, gate_server, await stack.enter_async_context(judges)


def _open_registry(folder: Path) -> FolderRegistry:
    registry = FolderRegistry(folder / "versions")
    if registry.get(0) is None:
        weights = folder / "versions" / "000000" / "model.safetensors"
        registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256=sha256_file(weights)))
    return registry
