"""The parts of a running pipeline: opened from a recipe, held together by `Run`, and closed in reverse order, whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentrl.agent import ChatFormat
from agentrl.agent.run_tools import candidate_tasks, declared_tools, pin_tools, save_tool_offers, with_sub_agent_tools
from agentrl.base.files import sha256_file
from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.base.processes import raise_file_limit, rare_collections
from agentrl.cluster.gpus import Placement
from agentrl.config.recipe import Recipe
from agentrl.evaluation.replay import check_start_tokens
from agentrl.experience import FolderCheckpoints, StepGroups, open_store
from agentrl.failure import Capture, FaultRate, Quarantine
from agentrl.failure.case import Suite
from agentrl.failure.withholding import WithholdingLog
from agentrl.gate.server import GateServer
from agentrl.learner.process import LearnerProcess
from agentrl.memory.run_memory import RunMemory, open_memory, placeholder_memory
from agentrl.observe import RunTracker, StageClock, open_trackers
from agentrl.plugins import parts
from agentrl.protocols import (
    CacheUse,
    ExperienceStore,
    Policy,
    PolicyServer,
    SandboxBackend,
    TaskFamily,
    ToolSource,
    Tracker,
    VersionRegistry,
)
from agentrl.protocols.group_judge import GroupJudge
from agentrl.records import Group, PolicyVersion, Split
from agentrl.reward import TaskScorer
from agentrl.reward.audit import audit_contradiction
from agentrl.reward.group_judging import GroupJudgeScorer
from agentrl.rollout import Admission, EpisodeRunner, GroupRunner, MemorySource, Pace, RequestRouter
from agentrl.sandbox import open_sandboxes
from agentrl.serving.server_pool import ServerPool
from agentrl.serving.supervisor import SupervisedServer
from agentrl.session.ending import closing_stack
from agentrl.session.folder import RunStart, write_start
from agentrl.session.judge_servers import JudgeServers, running_judge_servers
from agentrl.session.models import copy_base_version
from agentrl.session.pacing import restore_pace
from agentrl.session.pacing import save_pace as keep_pace
from agentrl.session.preflight import PreflightResult, check_prompt, check_thinking, open_chat
from agentrl.session.run_practice import copy_practice_files
from agentrl.session.snapshot_check import check_snapshots
from agentrl.task import GroupSchedule, sandbox_specs
from agentrl.task.group_tasks import GroupTasks
from agentrl.version import FolderRegistry

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run:
    """One running pipeline: its parts, and how far it is."""

    recipe: Recipe
    folder: Path
    tracker: Tracker
    clock: StageClock
    store: ExperienceStore
    running: FolderCheckpoints
    quarantine: Quarantine
    capture: Capture
    fault_rate: FaultRate
    registry: VersionRegistry
    family: TaskFamily
    sandboxes: SandboxBackend
    served: PolicyServer
    groups: GroupRunner
    group_tasks: GroupTasks
    step_groups: StepGroups
    learner: LearnerProcess
    judges: JudgeServers
    stop_at: int  # learner step after which the run ends; lowered by a first ctrl-C
    learning: bool = False
    interrupted: bool = False
    unfinished_groups: tuple[Group, ...] = ()  # at the end: the stored groups of steps that are not done
    last_step_at: float | None = None  # None: no step was made by this driver
    suite: Suite | None = None  # that versions are held to, where the recipe has a gate
    memory: RunMemory | None = None
    gate_server: GateServer | None = None  # where the gate has one of its own

    async def start_serving(self, version: PolicyVersion, *, judging: bool = False, learning: bool = False) -> None:
        """Starts the servers with a version, and meanwhile makes the images of the family's sandboxes.

        Args:
            judging: whether the gate will judge; otherwise its server is not started.
            learning: whether the learner is being started; it writes the reference logprobs of version 0.
        """
        async with asyncio.TaskGroup() as starting:
            for spec in sandbox_specs(self.family):
                starting.create_task(self.sandboxes.prepare(spec))
            starting.create_task(self.served.start(version, await_probe=learning))
            if judging and self.gate_server is not None:
                starting.create_task(self.gate_server.start(version, await_probe=learning))
            starting.create_task(self.judges.ready())
        self.groups.runner.pace.set_idle_token_s(self.served.token_s)

    def stop_after_step(self) -> None:
        """Finish the step in hand, if there is one; save, report."""
        self.interrupted = True
        self.stop_at = min(self.stop_at, self.served.version + 1 if self.learning else max(self.served.version, 0))


@asynccontextmanager
async def open_run(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, console: bool, steps: StepGroups | None = None
) -> AsyncIterator[Run]:
    """Checks what takes long to check, then opens the parts; closes them in reverse order, whatever happens.

    Args:
        steps: which groups make a step; None: as the recipe says.
    """
    run_dir = start.folder
    steps = steps or StepGroups.from_config(recipe.rollout)
    raise_file_limit()
    faults = fault_rate(recipe)
    async with rare_collections(), closing_stack(run_dir) as stack:
        sandboxes = await open_sandboxes(recipe.sandbox, run_label=run_dir.name, root=root)
        stack.push_async_callback(sandboxes.close)
        await check_snapshots(recipe, checked.family.task(Split.TRAIN, 0), sandboxes)
        base = run_dir / "versions" / "000000"
        model, template = (base, None) if base.is_dir() else (checked.model, checked.template)  # a resumed run keeps its own template
        chat = open_chat(model, template, policy=recipe.policy)
        others = [case.task for case in checked.suite.cases] if checked.suite is not None else []
        if checked.practice is not None:
            others += [task for tasks in checked.practice.tasks for task in tasks]
        tools = await pin_tools(
            declared_tools(recipe.tools, root),
            with_sub_agent_tools(candidate_tasks(checked.family, others), recipe.rollout.delegation),
            sandboxes,
            folder=run_dir,
            chat=chat,
            memory=placeholder_memory(recipe),
        )
        if checked.suite is not None:
            check_start_tokens([checked.suite], chat, tools, recipe.rollout)
        if recipe.rollout.agent in parts.AGENT.shipped:  # another one may show other prompts, and no tools
            check_prompt(chat, checked.family, tools, placeholder_memory(recipe), recipe.rollout.instructions)
        check_thinking(chat, checked.family, recipe.evaluation)
        write_start(run_dir, recipe, start)
        save_tool_offers(tools, run_dir)
        copy_practice_files(run_dir, recipe, root=root)
        copy_base_version(checked.model, base, template=checked.template)
        clock = StageClock(began=start.began)
        tracker = RunTracker(run_dir, [clock, *open_trackers(run_dir, recipe, console=console)], steps=recipe.steps)
        stack.callback(tracker.close)
        await stack.enter_async_context(DRIVER_LAG.watched(tracker.alert))
        tracker.stage("prepare", chat.form_summary)
        for note in checked.notes:
            tracker.alert(note)
        store = open_store(run_dir, recipe)
        stack.callback(store.close)
        running = FolderCheckpoints(run_dir / "running")
        for index in running.groups():
            if store.has(index):  # stored, and then the driver died
                running.remove_group(index)
        memory = open_memory(recipe, run_dir, store, steps)
        if memory is not None:
            stack.callback(memory.close)
        registry = FolderRegistry(run_dir / "versions")
        stack.callback(registry.close)
        if registry.get(0) is None:
            weights = run_dir / "versions" / "000000" / "model.safetensors"
            registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256=sha256_file(weights)))
        served = open_policy_server(recipe, run_dir, registry, checked.gpus, alert=tracker.alert)
        stack.push_async_callback(served.close)
        gate_server = None
        if recipe.gate_has_server:
            gate_server = GateServer(recipe, run_dir, registry, gpus=checked.gpus.gate, alert=tracker.alert)
            stack.push_async_callback(gate_server.close)
        judges = await stack.enter_async_context(
            running_judge_servers(recipe, checked.judges, folder=run_dir, gpus=checked.gpus.judges, alert=tracker.alert)
        )
        pace = restore_pace(recipe, run_dir)
        stack.callback(keep_pace, pace, recipe, run_dir)
        learner = LearnerProcess(run_dir, recipe, gpus=checked.gpus.learner, root=root)
        stack.push_async_callback(learner.kill)
        origin = {"run": run_dir.name, "recipe": recipe.name, "model": recipe.policy.model}
        capture = Capture(run_dir, recipe.capture, origin=origin, audit=partial(audit_contradiction, below=recipe.capture.below))
        stack.callback(capture.close)
        schedule = GroupSchedule(checked.family, recipe.seed, withheld=WithholdingLog(run_dir, checked.withheld), practice=checked.practice)
        yield Run(
            recipe=recipe,
            folder=run_dir,
            tracker=tracker,
            clock=clock,
            store=store,
            running=running,
            quarantine=Quarantine(run_dir, limit=recipe.rollout.max_quarantined),
            capture=capture,
            fault_rate=faults,
            registry=registry,
            family=checked.family,
            sandboxes=sandboxes,
            served=served,
            groups=build_group_runner(
                recipe,
                served,
                sandboxes,
                chat,
                replace(checked.scorer, sandboxes=sandboxes),
                running,
                faults,
                tools,
                group_judge=checked.group_judge,
                cache_use=lambda: served.cache_use,
                router=served.episode,
                memory=None if memory is None else memory.view,
                pace=pace,
            ),
            group_tasks=GroupTasks(recipe, run_dir, store, schedule, steps),
            step_groups=steps,
            learner=learner,
            judges=judges,
            stop_at=recipe.steps,
            suite=checked.suite,
            memory=memory,
            gate_server=gate_server,
        )


def fault_rate(recipe: Recipe) -> FaultRate:
    """Of all attempts that a run has in flight: when a daemon dies, those of a gate with a server of its own fail with the rollouts."""
    return FaultRate(recipe.rollout.max_fault_rate, concurrency=recipe.max_concurrent_episodes)


def open_policy_server(
    recipe: Recipe, run_dir: Path, registry: VersionRegistry, gpus: Placement, *, alert: Callable[[str], None] = log.warning
) -> PolicyServer:
    """The policy on one server, or on several. `alert`: called with a message for the user when a server is restarted."""
    if recipe.serving.replicas == 1:
        return SupervisedServer(recipe, run_dir, registry, gpus=gpus.server, alert=alert)
    return ServerPool(recipe, run_dir, registry, gpus=gpus.replicas, alert=alert)


def build_group_runner(
    recipe: Recipe,
    policy: Policy,
    sandboxes: SandboxBackend,
    chat: ChatFormat,
    scorer: TaskScorer,
    running: FolderCheckpoints,
    faults: FaultRate,
    tools: ToolSource | None = None,
    *,
    group_judge: GroupJudge | None = None,
    cache_use: Callable[[], CacheUse | None] = lambda: None,
    router: RequestRouter = lambda episode_id, task_key: nullcontext(),
    memory: MemorySource | None = None,
    pace: Pace | None = None,
) -> GroupRunner:
    """What plays the groups of a run: the recipe's settings around policy, sandboxes and scorer."""
    named, weight = str(recipe.tasks.group_judge), recipe.tasks.group_weight
    together = None if group_judge is None else GroupJudgeScorer(judge=group_judge, name=named, weight=weight, task_scorer=scorer)
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=sandboxes,
        agent=parts.make_part(parts.AGENT, recipe.rollout.agent, recipe.rollout.agent_settings, chat=chat),
        sampling=recipe.rollout.sampling,
        max_model_len=recipe.policy.max_model_len,
        request_timeout_s=recipe.serving.request_timeout_s,
        open_timeout_s=recipe.sandbox.open_timeout_s,
        tools=tools,
        router=router,
        pace=pace or Pace(slots=recipe.serving.max_num_seqs * recipe.serving.replicas),
    )
    return GroupRunner(
        runner=runner,
        scorer=scorer,
        group_scoring=together,
        slots=Admission(recipe.rollout.concurrency, use=cache_use, full=recipe.rollout.max_cache_use),
        group_size=recipe.rollout.group_size,
        spare_attempts=recipe.rollout.spare_attempts,
        stop_equal_after=recipe.rollout.stop_equal_after,
        max_retries=recipe.rollout.max_retries,
        branching=recipe.rollout.branching,
        memory=memory,
        checkpoints=running if recipe.rollout.checkpoint_turns else None,
        on_attempt=faults.record_attempt,
    )
