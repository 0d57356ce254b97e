"""Checks an evaluation of suites before it starts, and opens its policy and sandboxes."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.agent.run_tools import declared_tools, pin_tools, with_sub_agent_tools
from agentrl.base.processes import process_age_s
from agentrl.config.recipe import OWN_SOLVER, Recipe
from agentrl.environment.hosted import is_hosted
from agentrl.errors import UserError
from agentrl.evaluation.chat_agent import BYTES_PER_TOKEN, ChatAgent, ChatEndpoint, NoPolicy
from agentrl.evaluation.engine import BrokenImages, StoredEpisodes, case_repeats, evaluation_runner, prepare_images
from agentrl.evaluation.policies import NamedPolicy, PolicySource, check_policy_plugin, load_policy_plugin, project_of, recipe_for
from agentrl.evaluation.replay import check_start_tokens, starts_mid_episode
from agentrl.experience import DriverStore, open_store
from agentrl.failure import Capture, FaultRate
from agentrl.failure.case import Case, Suite, check_attempt_options, own_threshold
from agentrl.observe import RunTracker, StageClock, open_trackers
from agentrl.plugins import parts
from agentrl.plugins.references import add_project_root
from agentrl.protocols import Agent, Policy, SandboxBackend, ToolSource, Tracker
from agentrl.records import PolicyVersion, Split
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.sandbox import open_sandboxes
from agentrl.session import preflight
from agentrl.session.builders import build_agent
from agentrl.session.ending import closing_stack
from agentrl.session.folder import RunStart, check_disk, claim_run_folder, write_start
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import check_snapshots
from agentrl.task import make_task, open_family


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that has passed the checks and claimed its run folder, but has not started."""

    policy: NamedPolicy
    suites: tuple[Suite, ...]
    recipe: Recipe
    root: Path
    start: RunStart
    repeats: int | None  # attempts per case; None means the case's number or, if it has none, its suite's
    threshold: float  # applies to cases without a threshold
    checked: preflight.PreflightResult | None  # None if the policy is not served here
    scorer: TaskScorer

    def repeats_of(self, suite: Suite, case: Case) -> int:
        """Returns the number of attempts at a case of a suite."""
        return self.repeats or case_repeats(case, suite.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """The open components that an evaluation uses."""

    groups: GroupRunner
    sandboxes: SandboxBackend
    capture: Capture
    tracker: Tracker
    version: PolicyVersion
    sampled_by: int | None  # the only version that may have sampled tokens; None if versions are unknown
    broken: BrokenImages  # images that cannot be built
    stored: StoredEpisodes
    run: Run | None = None  # the open run, if the policy is served here
    spent: dict[str, int] = field(default_factory=dict)  # episode -> number of tokens, if its turns do not record them


@contextmanager
def prepare_evaluation(
    policy: NamedPolicy,
    suites: Sequence[Suite],
    *,
    overrides: Sequence[str] = (),
    repeats: int | None = None,
    threshold: float = 1.0,
    run_dir: Path | None = None,
    own: tuple[Path, Recipe] | None = None,
) -> Iterator[PreparedEvaluation]:
    """Claims the run folder of an evaluation and runs all checks that take little time.

    Args:
        own: the project and the recipe that supply the cases (`held_out_suite`) and the settings, with `overrides` already applied. None
            means that `suites` supplies the cases.

    Raises `UserError` if a check fails, for example if a verifier does not resolve or a model folder is invalid.
    """
    check_attempt_options(repeats=repeats, threshold=threshold)
    names = [suite.name for suite in suites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two suites have the name {twice[0]!r}", fix="change the name in one suite.toml")
    root, recipe = own or (project_of(suites), recipe_for(policy, suites, overrides))
    add_project_root(root)
    typed = [str(suite.folder) for suite in suites]
    doing = shlex.join(["agentrl", "eval", *typed, "--policy", policy.name])
    with claim_run_folder(run_dir, root / "runs", f"{recipe.name}-eval", resume=False, resumable=False, command=doing) as folder:
        checked = preflight.run_preflight(recipe, folder, root=root, training=False) if policy.served else None
        if checked is None:
            check_disk(folder)
            preflight.check_parts(recipe)
        scorer = TaskScorer(root=root, folder=folder) if checked is None else checked.scorer
        for suite in suites:
            tools, checked_root = declared_tools(recipe.mcp, recipe.tools, root), root if own is None else None
            preflight.check_suite(suite, scorer, tools, root=checked_root, family=recipe.tasks.family)
        _check_source(policy, suites, recipe)
        yield PreparedEvaluation(
            policy=policy,
            suites=tuple(suites),
            recipe=recipe,
            root=root,
            start=RunStart(
                recipe=Path(typed[0]), folder=folder, verb="eval", overrides=tuple(overrides), began=time.monotonic() - process_age_s()
            ),
            repeats=repeats,
            threshold=threshold,
            checked=checked,
            scorer=scorer,
        )


def _check_source(policy: NamedPolicy, suites: Sequence[Suite], recipe: Recipe) -> None:
    """Raises `UserError` if a plug-in does not resolve, or if the policy or its agent cannot run a case."""
    if policy.source is PolicySource.PLUGIN:
        check_policy_plugin(policy)
    for case in (case for suite in suites for case in suite.cases):
        if policy.source is PolicySource.ENDPOINT and case.start is not None:
            raise UserError(
                f"case {case.id} starts in the middle of an episode, with exact tokens, but an endpoint accepts only messages",
                fix="evaluate a suite whose cases start at the first turn",
            )
        environment = "" if case.task.environment is None else case.task.environment.ref
        if policy.source is PolicySource.ENDPOINT and environment:
            also = f", or set tasks.family.options.solver={OWN_SOLVER}" if environment.startswith("inspect:") else ""
            raise UserError(
                f"case {case.id} runs in the environment {environment[:80]!a}, but a model behind an endpoint gets only a"
                " task's messages and tools",
                fix=f"evaluate a model that agentrl serves: agentrl eval RECIPE --model FOLDER{also}",
            )
        if is_hosted(case.task) and recipe.agent.ref in parts.AGENT.shipped:
            raise UserError(
                f"case {case.id}: the program of {environment[:80]!a} drives the model, so {recipe.agent} cannot run it",
                fix="evaluate it with the recipe of its tasks: agentrl eval RECIPE --suite SUITE --model MODEL",
            )


def held_out_suite(recipe: Recipe, root: Path) -> Suite:
    """Returns a suite whose cases are the recipe's held-out tasks, generated and real.

    A split that has fewer tasks than the recipe evaluates contributes all of them. Raises `UserError` if there are no such tasks.
    """
    family = open_family(recipe.tasks, seed=recipe.seed, root=root)
    counts = {Split.HELDOUT: recipe.evaluation.heldout, Split.HELDOUT_REAL: recipe.evaluation.heldout_real}
    sizes = {split: family.size(split) for split, count in counts.items() if count}  # None means endless
    counts = {split: counts[split] if size is None else min(counts[split], size) for split, size in sizes.items()}
    tasks = [(f"{split}-{index:04d}", make_task(family, split, index)) for split, count in counts.items() for index in range(count)]
    cases = [Case(id=name, task=task, threshold=own_threshold(task)) for name, task in tasks]
    if not cases:
        raise UserError(
            f"the recipe {recipe.name} evaluates no held-out tasks", fix="set evaluation.heldout to at least 1, and add held-out tasks"
        )
    return Suite(folder=root / recipe.name, name=recipe.name, repeats=recipe.evaluation.attempts, cases=tuple(cases))


@asynccontextmanager
async def open_policy(prepared: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """Opens the policy of an evaluation, and the sandboxes in which its episodes run.

    Raises `UserError` if a case starts with tokens that the policy's tokenizer or template would not produce (`check_start_tokens`).
    """
    kind = _served if prepared.policy.served else _not_served
    async with kind(prepared, console=console) as policy:
        yield policy


@asynccontextmanager
async def _served(prepared: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """Opens a model folder on a supervised server."""
    assert prepared.checked is not None, "a served policy was checked"
    async with open_run(prepared.recipe, prepared.start, prepared.checked, root=prepared.root, console=console) as run:
        run.tracker.stage("start", "server and sandbox images")
        base = await run.base_version()
        if starts_mid_episode(prepared.suites):
            chat = preflight.open_chat(prepared.start.folder / "versions" / "000000", policy=prepared.recipe.policy)
            check_start_tokens(prepared.suites, chat, run.groups.runner.tools, prepared.recipe.rollout)
        async with asyncio.TaskGroup() as starting:
            making = starting.create_task(prepare_images(prepared.suites, run.sandboxes))
            starting.create_task(run.served.start(base))
            starting.create_task(run.judges.ready())
        async with asyncio.TaskGroup() as watched:
            watcher = watched.create_task(run.served.watch(on_loss=run.learner.kill))
            groups = evaluation_runner(run.groups, prepared.recipe.evaluation.distribution)
            yield OpenPolicy(
                groups=groups,
                sandboxes=run.sandboxes,
                capture=run.capture,
                tracker=run.tracker,
                version=base,
                sampled_by=base.number,
                broken=making.result(),
                stored=StoredEpisodes(run.store),
                run=run,
            )
            watcher.cancel()


@asynccontextmanager
async def _not_served(prepared: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """Opens a policy that agentrl does not serve: a plug-in from the project, or a third-party endpoint."""
    recipe, folder = prepared.recipe, prepared.start.folder
    async with closing_stack(folder) as stack:
        sandboxes = await open_sandboxes(recipe.sandbox, run_label=folder.name, root=prepared.root)
        stack.push_async_callback(sandboxes.close)
        write_start(folder, recipe, prepared.start)
        clock = StageClock(began=prepared.start.began)
        tracker = RunTracker(folder, [clock, *open_trackers(folder, recipe, console=console)])
        stack.callback(tracker.close)
        tracker.stage("start", "sandbox images")
        policy, agent, chat = _parts(prepared)
        if isinstance(agent, ChatAgent):
            stack.push_async_callback(agent.endpoint.close)
        broken = await prepare_images(prepared.suites, sandboxes)
        capture = Capture(folder, recipe.capture, origin={"run": folder.name, "recipe": recipe.name, "model": prepared.policy.name})
        stack.callback(capture.close)
        cases = [case.task for suite in prepared.suites for case in suite.cases]
        tasks = with_sub_agent_tools(cases, recipe.rollout.delegation)
        tools = await pin_tools(declared_tools(recipe.mcp, recipe.tools, prepared.root), tasks, sandboxes, every=False, chat=chat)
        if chat is not None:
            for task in [case for case in cases if case.sandbox is not None and (case.sandbox.image, case.sandbox.runtime) not in broken][
                :1
            ]:
                await check_snapshots(recipe, task, sandboxes)
            check_start_tokens(prepared.suites, chat, tools, recipe.rollout)
        store = await DriverStore.open(partial(open_store, folder, recipe))
        stack.push_async_callback(store.close)
        yield OpenPolicy(
            groups=_group_runner(recipe, policy, agent, tools, sandboxes, prepared.scorer),
            sandboxes=sandboxes,
            capture=capture,
            tracker=tracker,
            version=PolicyVersion(number=0, parent=None, folder="-", sha256=""),
            sampled_by=None,
            broken=broken,
            stored=StoredEpisodes(store),
            spent=agent.tokens if isinstance(agent, ChatAgent) else {},
        )


def _group_runner(
    recipe: Recipe, policy: Policy, agent: Agent, tools: ToolSource, sandboxes: SandboxBackend, scorer: TaskScorer
) -> GroupRunner:
    runner = EpisodeRunner(
        tools=tools,
        policy=policy,
        sandboxes=sandboxes,
        agent=agent,
        sampling=recipe.evaluation.distribution,
        max_model_len=recipe.policy.max_model_len,
        request_timeout_s=recipe.serving.request_timeout_s,
    )
    return GroupRunner(
        runner=runner,
        scorer=replace(scorer, sandboxes=sandboxes),
        slots=asyncio.Semaphore(recipe.rollout.concurrency),
        group_size=1,
        on_attempt=FaultRate(concurrency=recipe.rollout.concurrency).record_attempt,
    )


def _parts(prepared: PreparedEvaluation) -> tuple[Policy, Agent, ChatFormat | None]:
    """Returns the policy, the agent and the chat format. For an endpoint, the agent is a `ChatAgent` and the chat format is None."""
    if prepared.policy.source is PolicySource.ENDPOINT:
        return NoPolicy(), _chat_agent(prepared.policy, prepared.recipe), None
    plugin: Any = load_policy_plugin(prepared.policy)
    policy = prepared.recipe.policy
    chat = ChatFormat(plugin.tokenizer, tool_format=policy.tool_format, rewritten=policy.rewritten_context)
    return plugin, build_agent(prepared.recipe, chat), chat


def _chat_agent(policy: NamedPolicy, recipe: Recipe) -> ChatAgent:
    serving, sampling = recipe.serving, recipe.evaluation.sampling
    endpoint = ChatEndpoint(
        url=policy.model,
        model=policy.model_name,
        key_env=policy.key_env,
        temperature=None if policy.requests.without_temperature else sampling.temperature,
        tokens_name=policy.requests.tokens_name,
        headers=policy.requests.headers,
        timeout_s=serving.request_timeout_s,
        patience_s=serving.startup_timeout_s,
        concurrency=recipe.rollout.concurrency,
        max_bytes=max(1 << 20, BYTES_PER_TOKEN * recipe.policy.max_model_len),
    )
    further = {**policy.requests.keys, **({"top_p": sampling.top_p} if sampling.top_p < 1 else {})}
    return ChatAgent(endpoint=endpoint, sampling=further, instructions=recipe.rollout.instructions)
