"""Suites evaluated side by side without a recipe: one policy, one set of sandboxes, a verdict on every case as soon as it is there."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.agent.run_tools import declared_tools, pin_tools, with_sub_agent_tools
from agentrl.base.processes import process_age_s
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.chat_agent import BYTES_PER_TOKEN, ChatAgent, ChatEndpoint, NoPolicy
from agentrl.evaluation.outcomes import CaseOutcome, CaseStatus, case_outcome
from agentrl.evaluation.policies import NamedPolicy, PolicySource, check_policy_plugin, load_policy_plugin, project_of, recipe_for
from agentrl.evaluation.replay import check_start_tokens, starts_mid_episode
from agentrl.evaluation.results import SuiteResults
from agentrl.evaluation.suites import (
    SUITE_FOLDER,
    BrokenImages,
    SuiteAttempt,
    case_repeats,
    evaluation_info,
    evaluation_runner,
    prepare_images,
    suite_attempt,
    transcripts_of,
    unrunnable_attempt,
)
from agentrl.failure import Capture, FaultRate
from agentrl.failure.case import Baseline, Case, Suite, check_attempt_options, load_suite, save_case
from agentrl.failure.digest import write_digest
from agentrl.failure.triage import load_rules
from agentrl.observe import RunTracker, StageClock, open_trackers
from agentrl.plugins import parts
from agentrl.plugins.references import add_project_root
from agentrl.protocols import Agent, Policy, SandboxBackend, Tracker
from agentrl.records import PolicyVersion, ScoredEpisode, Split
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.sandbox import open_sandboxes
from agentrl.session import preflight
from agentrl.session.ending import closing_stack, warn_on_error
from agentrl.session.folder import RunStart, check_disk, claim_run_folder, write_start
from agentrl.session.opening import open_run
from agentrl.session.snapshot_check import check_snapshots
from agentrl.task import make_task, open_family

EVAL_PHASE = "eval"
SUITES_FOLDER = "suites"
"""Of a run folder: where the evaluations of several suites are, each in a folder of its own."""

CaseListener = Callable[[CaseOutcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that passed the checks before a start, with its run folder claimed."""

    policy: NamedPolicy
    suites: tuple[Suite, ...]
    recipe: Recipe
    root: Path
    start: RunStart
    repeats: int | None  # None: as the case says, else its suite
    threshold: float  # for cases without one
    checked: preflight.PreflightResult | None  # None: no server of ours
    scorer: TaskScorer

    def tries(self, suite: Suite, case: Case) -> int:
        """Attempts at a case."""
        return self.repeats or case_repeats(case, suite.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteEvaluation:
    """A suite's evaluation, as it was kept."""

    suite: Suite
    folder: Path
    results: SuiteResults
    outcomes: tuple[CaseOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """What an evaluation runs on."""

    groups: GroupRunner
    sandboxes: SandboxBackend
    capture: Capture
    tracker: Tracker
    version: PolicyVersion
    sampled_by: int | None  # the version that may have sampled tokens; None: versions are not ours to know
    broken: BrokenImages  # images that cannot be made
    spent: dict[str, int] = field(default_factory=dict)  # episode -> tokens, where its turns do not hold them


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
    """Around an evaluation: its run folder, held by this process alone, and all the checks that are cheap.

    Args:
        own: the project and the recipe from which the cases come (`held_out_suite`), and whose settings apply. None means cases of suites.

    Raises `UserError` for whatever these checks tell, such as a verifier that does not resolve or a model folder that is none.
    """
    check_attempt_options(repeats=repeats, threshold=threshold)
    names = [suite.name for suite in suites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two suites are called {twice[0]!r}", fix="change the name in one suite.toml")
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
            preflight.check_suite(suite, scorer, declared_tools(recipe.tools, root), root=root if own is None else None)
        if policy.source is PolicySource.ENDPOINT and starts_mid_episode(suites):
            late = next(case.id for suite in suites for case in suite.cases if case.start is not None)
            raise UserError(
                f"case {late} begins in the middle, with exact tokens, and an endpoint takes only messages",
                fix="evaluate a suite of cases that begin with their task",
            )
        if policy.source is PolicySource.PLUGIN:
            check_policy_plugin(policy)
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


def held_out_suite(recipe: Recipe, root: Path) -> Suite:
    """The recipe's held-out tasks, and those on real data, as cases. Raises `UserError` if there are none."""
    family = open_family(recipe.tasks, seed=recipe.seed, root=root)
    counts = {Split.HELDOUT: recipe.evaluation.heldout, Split.HELDOUT_REAL: recipe.evaluation.heldout_real}
    cases = [
        Case(id=f"{split}-{index:04d}", task=make_task(family, split, index)) for split, count in counts.items() for index in range(count)
    ]
    if not cases:
        raise UserError(f"the recipe {recipe.name} evaluates no held-out task", fix="set evaluation.heldout to at least 1")
    return Suite(folder=root / recipe.name, name=recipe.name, repeats=recipe.evaluation.attempts, cases=tuple(cases))


async def evaluate_suites(
    given: PreparedEvaluation,
    *,
    console: bool = True,
    on_ready: Callable[[], None] = lambda: None,
    on_case: CaseListener = lambda outcome: None,
) -> tuple[SuiteEvaluation, ...]:
    """Asks every case anew in live sandboxes, judges it and keeps the results in the run folder.

    Args:
        console: whether a person watches the progress.
        on_ready: called once the policy answers.
        on_case: told of each case when its last attempt is scored.

    Raises:
        InfrastructureError: the server is lost for good, or the like; faults of single episodes are told in their attempts.
    """
    folder, done = given.start.folder, list[SuiteEvaluation]()
    async with open_policy(given, console=console) as parts_:
        on_ready()
        asked = [(suite, case) for suite in given.suites for case in suite.cases]
        total = sum(given.tries(suite, case) for suite, case in asked)
        parts_.tracker.stage("evaluate", f"{len(asked)} cases, {total} attempts")
        parts_.capture.reset_phase(EVAL_PHASE)
        began, scored = time.monotonic(), 0

        def on_scored() -> None:
            nonlocal scored
            scored += 1
            parts_.tracker.evaluating(scored, total)

        asking = _Asking(given, parts_, on_scored, on_case)
        async with asyncio.TaskGroup() as running:
            jobs = {suite.folder: [running.create_task(asking.case(suite, case)) for case in suite.cases] for suite in given.suites}
        for suite in given.suites:
            found = [job.result() for job in jobs[suite.folder]]
            done.append(_kept(given, suite, [one for one, _ in found], [each for _, some in found for each in some], parts_.version, began))
    with warn_on_error(folder, "the digest of failures"):
        write_digest(folder)
    return tuple(done)


def pin_baselines(done: Sequence[SuiteEvaluation]) -> int:
    """Makes the results of an evaluation the baselines of its cases, but for those with nothing scored, or whose task was changed since.

    Returns how many were pinned.
    """
    pinned = 0
    for one in done:
        there = {case.id: case for case in load_suite(one.suite.folder).cases}
        for outcome in one.outcomes:
            if outcome.mean is None:
                continue
            of = one.results.about
            baseline = Baseline(model=of.model, version=of.version if of.sha256 else None, scores=outcome.scores, at=of.at)
            found = there.get(outcome.case.id)
            if found is not None and found.task == outcome.case.task:  # somebody may have changed or removed it meanwhile
                save_case(one.suite.folder, replace(found, baseline=baseline))
                pinned += 1
    return pinned


def exit_code(outcomes: Sequence[CaseOutcome]) -> int:
    """0: every case passed; 1: some did not."""
    return 0 if all(one.status is CaseStatus.PASSED for one in outcomes) else 1


class _Asking:
    """The attempts at the cases of an evaluation."""

    def __init__(self, given: PreparedEvaluation, open_: OpenPolicy, on_scored: Callable[[], None], on_case: CaseListener) -> None:
        self._given, self._open, self._on_scored, self._on_case = given, open_, on_scored, on_case
        self._rules = load_rules(given.recipe.capture.rules)
        self._names = _names(given.suites)

    async def case(self, suite: Suite, case: Case) -> tuple[CaseOutcome, list[SuiteAttempt]]:
        async with asyncio.TaskGroup() as running:
            numbers = range(self._given.tries(suite, case))
            jobs = [running.create_task(self._attempt(suite, case, number)) for number in numbers]
        done = [job.result() for job in jobs]
        origin = {"model": self._given.policy.name}
        threshold = self._given.threshold
        outcome = case_outcome(
            suite.name, case, [(one.attempt, scored) for one, scored in done], threshold=threshold, rules=self._rules, origin=origin
        )
        self._on_case(outcome)
        return outcome, [one for one, _ in done]

    async def _attempt(self, suite: Suite, case: Case, number: int) -> tuple[SuiteAttempt, ScoredEpisode]:
        label = EVAL_PHASE if len(self._given.suites) == 1 else self._names[suite.folder]
        name = f"{label}-{case.id}-r{number}"
        scored = unrunnable_attempt(case, name, self._open.broken) or await self._open.groups.run_episode(
            case.task, name=name, start=case.start, always=True
        )
        self._on_scored()
        self._open.capture.capture_episode(case.task, scored, phase=EVAL_PHASE, step=0)
        made = suite_attempt(case, number, scored, phase=EVAL_PHASE, version=self._open.sampled_by)
        tokens = self._open.spent.pop(scored.episode.id, made.attempt.tokens)
        return replace(made, attempt=replace(made.attempt, tokens=tokens)), scored


def _names(suites: Sequence[Suite]) -> dict[Path, str]:
    """A name of its own for each suite, for files and episodes."""
    names: dict[Path, str] = {}
    for suite in suites:
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "-" for c in suite.folder.resolve().name).strip("-.")[:60]
        name, number = plain or "suite", 2
        while name in names.values():
            name, number = f"{plain or 'suite'}-{number}", number + 1
        names[suite.folder] = name
    return names


def _kept(
    given: PreparedEvaluation,
    suite: Suite,
    outcomes: Sequence[CaseOutcome],
    attempts: Sequence[SuiteAttempt],
    version: PolicyVersion,
    began: float,
) -> SuiteEvaluation:
    """Writes a suite's evaluation, where `agentrl compare` reads it."""
    run = given.start.folder
    folder = run / SUITE_FOLDER if len(given.suites) == 1 else run / SUITES_FOLDER / _names(given.suites)[suite.folder]
    repeats = given.repeats or suite.repeats
    origin = evaluation_info(given.recipe, suite, version, repeats=repeats, threshold=given.threshold, began=began)
    origin = replace(origin, model=given.policy.name, version=given.policy.version)  # in the words of who asked, on any machine
    found = SuiteResults(about=origin, attempts=tuple(one.attempt for one in attempts))
    results.save_results(folder, found, transcripts_of(attempts))
    return SuiteEvaluation(suite=suite, folder=folder, results=found, outcomes=tuple(outcomes))


@asynccontextmanager
async def open_policy(given: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """The policy, answering, and the sandboxes that its episodes play in."""
    kind = _served if given.policy.served else _not_served
    async with kind(given, console=console) as found:
        yield found


@asynccontextmanager
async def _served(given: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """A model folder on a server of ours, which is watched meanwhile."""
    assert given.checked is not None, "a served policy was checked"
    async with open_run(given.recipe, given.start, given.checked, root=given.root, console=console) as run:
        run.tracker.stage("start", "server and sandbox images")
        base = run.registry.get(0)
        assert base is not None, "version 0 was registered"
        if starts_mid_episode(given.suites):
            chat = preflight.open_chat(given.start.folder / "versions" / "000000", policy=given.recipe.policy)
            check_start_tokens(given.suites, chat, run.groups.runner.tools, given.recipe.rollout)
        async with asyncio.TaskGroup() as starting:
            making = starting.create_task(prepare_images(given.suites, run.sandboxes))
            starting.create_task(run.served.start(base))
            starting.create_task(run.judges.ready())
        async with asyncio.TaskGroup() as watched:
            watcher = watched.create_task(run.served.watch(on_loss=run.learner.kill))
            groups = evaluation_runner(run)
            yield OpenPolicy(
                groups=groups,
                sandboxes=run.sandboxes,
                capture=run.capture,
                tracker=run.tracker,
                version=base,
                sampled_by=base.number,
                broken=making.result(),
            )
            watcher.cancel()


@asynccontextmanager
async def _not_served(given: PreparedEvaluation, *, console: bool) -> AsyncIterator[OpenPolicy]:
    """A policy that answers by itself: a part of the project, or somebody's server."""
    recipe, folder = given.recipe, given.start.folder
    async with closing_stack(folder) as stack:
        sandboxes = await open_sandboxes(recipe.sandbox, run_label=folder.name, root=given.root)
        stack.push_async_callback(sandboxes.close)
        write_start(folder, recipe, given.start)
        clock = StageClock(began=given.start.began)
        tracker = RunTracker(folder, [clock, *open_trackers(folder, recipe, console=console)])
        stack.callback(tracker.close)
        tracker.stage("start", "sandbox images")
        policy, agent, chat = _parts(given)
        if isinstance(agent, ChatAgent):
            stack.push_async_callback(agent.endpoint.close)
        broken = await prepare_images(given.suites, sandboxes)
        capture = Capture(folder, recipe.capture, origin={"run": folder.name, "recipe": recipe.name, "model": given.policy.name})
        stack.callback(capture.close)
        cases = [case.task for suite in given.suites for case in suite.cases]
        tasks = with_sub_agent_tools(cases, recipe.rollout.delegation)
        tools = await pin_tools(declared_tools(recipe.tools, given.root), tasks, sandboxes, every=False, chat=chat)
        if chat is not None:
            for task in [one for one in cases if (one.sandbox.image, one.sandbox.runtime) not in broken][:1]:
                await check_snapshots(recipe, task, sandboxes)
            check_start_tokens(given.suites, chat, tools, recipe.rollout)
        runner = EpisodeRunner(
            tools=tools,
            policy=policy,
            sandboxes=sandboxes,
            agent=agent,
            sampling=recipe.evaluation.sampling,
            max_model_len=recipe.policy.max_model_len,
            request_timeout_s=recipe.serving.request_timeout_s,
            open_timeout_s=recipe.sandbox.open_timeout_s,
        )
        groups = GroupRunner(
            runner=runner,
            scorer=replace(given.scorer, sandboxes=sandboxes),
            slots=asyncio.Semaphore(recipe.rollout.concurrency),
            group_size=1,
            max_retries=recipe.rollout.max_retries,
            on_attempt=FaultRate(recipe.rollout.max_fault_rate, concurrency=recipe.rollout.concurrency).record_attempt,
        )
        spent = agent.tokens if isinstance(agent, ChatAgent) else {}
        unknown = PolicyVersion(number=0, parent=None, folder="-", sha256="")
        yield OpenPolicy(
            groups=groups,
            sandboxes=sandboxes,
            capture=capture,
            tracker=tracker,
            version=unknown,
            sampled_by=None,
            broken=broken,
            spent=spent,
        )


def _parts(given: PreparedEvaluation) -> tuple[Policy, Agent, ChatFormat | None]:
    """The policy that a reference makes, and the recipe's agent in the policy's own tokens; or the agent of an endpoint, and no tokens."""
    if given.policy.source is PolicySource.ENDPOINT:
        return NoPolicy(), _chat_agent(given.policy, given.recipe), None
    made: Any = load_policy_plugin(given.policy)
    rollout = given.recipe.rollout
    policy = given.recipe.policy
    chat = ChatFormat(made.tokenizer, tool_format=policy.tool_format, rewritten=policy.rewritten_context)
    agent: Agent = parts.make_part(parts.AGENT, rollout.agent, rollout.agent_settings, chat=chat)
    return made, agent, chat


def _chat_agent(policy: NamedPolicy, recipe: Recipe) -> ChatAgent:
    serving, sampling = recipe.serving, recipe.evaluation
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
