"""`agentrl check`: gold solutions must score 1, doing nothing and cheating must score 0, and sandbox backends must pass their checks.

The report also lists the properties that were not proven.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from agentrl.agent import load_tools
from agentrl.agent.run_tools import declared_tools, pin_tools
from agentrl.agent.tools import render_result
from agentrl.base import user_code
from agentrl.base.error_text import main_error
from agentrl.base.numbers import plural
from agentrl.check import cheats
from agentrl.check.access import prove_separation, prove_unreadable
from agentrl.check.environments import NOT_PROVEN, prove_environment
from agentrl.check.null_answers import prove_null_answers
from agentrl.check.purity import FamilySource, draw_name, prove_purity, split_sizes
from agentrl.check.report import GOLD, IMAGE, NOTHING, CaseResult, CheckReport, Proof
from agentrl.check.splits import prove_splits
from agentrl.check.tool_calls import prove_tools
from agentrl.check.verifiers import GoldAttempt, prove_verifiers, retry_sandbox_errors
from agentrl.config.recipe import SandboxConfig
from agentrl.environment import close_environments
from agentrl.environment.hosted import is_hosted
from agentrl.errors import InfrastructureError, SandboxTimeout, SandboxUnavailable, TaskError, UserError
from agentrl.protocols import SandboxBackend, TaskFamily, ToolSource
from agentrl.records import Episode, SandboxSpec, Split, Task, codec
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import GroupJudgeScorer, load_group_judge
from agentrl.reward.verifier_call import prepare_verifier
from agentrl.sandbox import conformance, open_backend, open_sandboxes
from agentrl.sandbox.attacks import ATTACK_SPEC, AttackResult, run_attacks
from agentrl.sandbox.backend import ChannelBackend
from agentrl.session.ending import close_after
from agentrl.task import gold_of, make_task
from agentrl.task.outputs import example_path, run_and_collect

log = logging.getLogger(__name__)
T = TypeVar("T")

NEVER_PROVEN = (
    "that the truth is correct: the gold solution and the verifier may share a mistake",
    "that no other cheat scores: only the cheats in agentrl/check/cheats.py were tried",
    "that no answer is readable in another form, encoded, or over the network",
    "that held-out tasks are not similar to training tasks: only equal tasks are detected",
    "that tasks are the same on another machine, with different packages, or on another day",
    "that the policy's chat template presents the tools as intended",
)


async def check_family(
    source: FamilySource, config: SandboxConfig, *, count: int | None, parallel: int = 8, quiet: bool = False
) -> CheckReport:
    """Runs all cases for the first `count` tasks of every split, at most `parallel` cases at once, and all proofs. If every split is
    finite, `count` may be None, which means all tasks. Runs only proofs if the tasks are episodes of environments.

    Raises `UserError` if the family cannot be opened, or if a split is infinite and `count` is None, and the errors of `prove_tasks`. The
    report lists the faults of tasks, including tasks that cannot be created.
    """
    family = source.open()
    try:
        wanted = split_sizes(family, count)
    except ValueError as error:
        raise UserError(str(error), fix="set the number of tasks in each split with --count") from None
    first = next(_tasks(family, wanted), None)
    if first is None:
        return CheckReport(cases=(), proofs=tuple(await _prove_draws(source, wanted)), not_proven=("any other claim: there is no task",))
    if first.environment is not None:
        return await _check_environments(source, family, wanted)
    sandboxes = await open_sandboxes(config, warm=0, run_label="check", root=source.root)
    async with close_after(sandboxes.close):
        with Progress(console=Console(stderr=True), disable=quiet) as progress:
            bar = progress.add_task("tasks and splits", total=None)
            proofs = await _prove_draws(source, wanted)
            tasks = list(_tasks(family, wanted))
            on_progress = partial(progress.update, bar)
            tools = await pin_tools(declared_tools(source.mcp, source.tools, source.root), tasks, sandboxes, every=False)
            together = open_group_judge(source)
            cases, more = await prove_tasks(
                family,
                tasks,
                sandboxes,
                root=source.root,
                parallel=parallel,
                on_progress=on_progress,
                tools=tools,
                audit=source.tasks.audit,
                together=together,
            )
            proofs += more
    return CheckReport(cases=tuple(cases), proofs=tuple(proofs), not_proven=tuple(_not_proven(family, wanted, tasks, proofs)))


async def _prove_draws(source: FamilySource, wanted: Mapping[Split, int]) -> list[Proof]:
    """Returns the proofs that only create tasks: that creating them is pure, and that the splits are disjoint."""
    return [await asyncio.to_thread(prove, source, wanted) for prove in (prove_purity, prove_splits)]


async def _check_environments(source: FamilySource, family: TaskFamily, wanted: Mapping[Split, int]) -> CheckReport:
    """Checks a family whose tasks are episodes of environments."""
    proofs, tasks = await _prove_draws(source, wanted), list(_tasks(family, wanted))
    if is_hosted(tasks[0]):
        return CheckReport(cases=(), proofs=tuple(proofs), not_proven=("what the program, the tools and the scorers of the tasks do",))
    async with close_after(close_environments):
        proofs += await prove_environment(tasks)
    unproven = [claim for proof in proofs for claim in proof.unproven]
    return CheckReport(cases=(), proofs=tuple(proofs), not_proven=(*unproven, *NOT_PROVEN))


def open_group_judge(source: FamilySource) -> GroupJudgeScorer | None:
    """Returns a scorer with only the recipe's group judge; None if the recipe has no group judge. Raises `UserError` if the group judge
    cannot be loaded."""
    named = source.tasks.group_judge
    if named is None:
        return None
    judge = load_group_judge(named)
    prepare_verifier(judge, root=source.root, folder=None)
    return GroupJudgeScorer(judge=judge, name=named, weight=1.0, task_scorer=TaskScorer(root=source.root))


async def prove_tasks(
    family: TaskFamily,
    tasks: Sequence[Task],
    sandboxes: SandboxBackend,
    *,
    root: Path,
    parallel: int = 8,
    on_progress: Callable[..., None] = lambda **progress: None,
    tools: ToolSource | None = None,
    audit: Sequence[str] = (),
    together: GroupJudgeScorer | None = None,
) -> tuple[list[CaseResult], list[Proof]]:
    """Runs all cases for tasks that have a gold solution in `family`, and the proofs that examine single tasks. Returns the results of the
    cases, and the proofs. Raises `InfrastructureError` if the sandboxes fail, and `SandboxUnavailable` if they cannot be used on this
    machine.

    Args:
        tools: the recipe's tools, including those of its MCP servers.
        audit, together: the recipe's audit verifiers and group judge, which must not reward answers without work either.
        on_progress: receives `description`, `total` and `advance`, like `rich.progress.Progress.update`.
    """
    scorer = TaskScorer(sandboxes=sandboxes, root=root)
    prover = _Prover(family=family, sandboxes=sandboxes, scorer=scorer, parallel=parallel, tools=tools)
    prover.scorer.load(sorted({*audit, *(name for task in tasks for name in task.verifiers)}))
    on_progress(description=f"images on {sandboxes.name}")
    with _one_error():
        cases = await _prepare(tasks, sandboxes)
        without = {result.task for result in cases}
        good = [task for task in tasks if task.id not in without]
        on_progress(description=f"{plural(len(tasks), 'task')} on {sandboxes.name}", total=sum(len(_cases(task)) for task in good))
        cases += await prover.cases(good, lambda: on_progress(advance=1))
        on_progress(description="verifiers, tools and files", total=None)
        proofs = [
            await prove_verifiers(good, prover.golden, prover.scorer, parallel=parallel),
            await prove_null_answers(good, prover.golden, prover.scorer, parallel=parallel, audit=audit, together=together),
            await prove_tools(good, sandboxes, tools),
            prove_separation(good),
            await prove_unreadable(good, prover.golden, sandboxes),
        ]
    cases.sort(key=lambda result: (result.task, result.wanted == 0, result.case))
    return cases, proofs


@contextmanager
def _one_error() -> Iterator[None]:
    """Replaces an exception group that the block raises by one of its members: an infrastructure error if there is one, else the member
    that `main_error` returns."""
    fault: BaseException | None = None
    try:
        yield
    except ExceptionGroup as group:
        fault = user_code.first_cause(group, InfrastructureError) or main_error(group)
    if fault is not None:
        raise fault  # outside the handler, so that its cause stays unchanged


def _not_proven(family: TaskFamily, wanted: Mapping[Split, int], tasks: Sequence[Task], proofs: Sequence[Proof]) -> Iterator[str]:
    """Yields the properties that the report does not prove, although a reader may expect the report to prove them."""
    for split, done in wanted.items():
        size = family.size(split)
        if size is None or size > done:
            of = "infinitely many" if size is None else f"{size:,}"
            yield f"that tasks of {split} beyond the first {done:,} of {of} can be solved, and only without cheating"
    yield from (claim for proof in proofs for claim in proof.unproven)
    if hosts := sorted({host for task in tasks if task.sandbox is not None for host in task.sandbox.network}):
        yield f"that the network that tasks may reach ({', '.join(hosts)}) stays the same: gold solutions worked today"
    yield from NEVER_PROVEN


def sandbox_configs(choice: str) -> list[SandboxConfig]:
    """Returns the backends that a `--backend` option selects. The option is a name, a plug-in reference, JSON with options, or `all`
    (`docker` and `bubblewrap`). Raises `UserError` if there is no such backend."""
    try:
        backends = ["docker", "bubblewrap"] if choice == "all" else [json.loads(choice) if choice.startswith("{") else choice]
        return [SandboxConfig.model_validate({"backend": backend}) for backend in backends]
    except ValueError:
        fix = 'use docker, bubblewrap, auto, all, a plug-in reference, or {"ref": "cell", "options": ...}'
        raise UserError(f"there is no sandbox backend {choice!r}", fix=fix) from None


async def check_backend(config: SandboxConfig, image: str, *, root: Path, only: str = "", runtime: str = "") -> list[dict[str, Any]]:
    """Runs the conformance checks on one backend. Returns a dictionary for each check, with the keys backend, name, ok, detail and
    wall_s."""
    backend = open_backend(config, run_label="check", root=root)
    async with close_after(backend.close):
        results = await conformance.check_conformance(backend, SandboxSpec(image=image, runtime=runtime), only=only)
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


async def attack_backend(
    config: SandboxConfig, image: str, *, root: Path, only: str = "", runtime: str = "", report: Callable[[str, AttackResult], None]
) -> list[dict[str, Any]]:
    """Runs the attack suite on one backend and calls `report` with the backend's name and each result. Returns a dictionary for each
    attack, with the backend's name and the fields of the attack's result. Raises `UserError` if the backend is not built in."""
    backend = open_backend(config, run_label="attack", root=root)
    spec = replace(ATTACK_SPEC, image=image, runtime=runtime)
    async with close_after(backend.close):
        if not isinstance(backend, ChannelBackend):
            raise UserError(f"the attacks run only on built-in backends, not on {config.backend}", fix="run `agentrl sandbox check` on it")
        results = await run_attacks(backend, spec, only=only, report=lambda result: report(backend.name, result))
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


def _tasks(family: TaskFamily, wanted: Mapping[Split, int]) -> Iterator[Task]:
    """Yields the tasks that can be created. The proof of purity reports the tasks that cannot be created."""
    for draw in ((split, index) for split, size in wanted.items() for index in range(size)):
        try:
            task = make_task(family, *draw)
            task.key  # noqa: B018 - a task without a key cannot be stored
        except Exception as error:  # a family is user code
            log.info("%s cannot be created: %s", draw_name(draw), error)
        else:
            yield task


async def _prepare(tasks: Sequence[Task], sandboxes: SandboxBackend) -> list[CaseResult]:
    """Prepares every image. Returns a failed case for each task whose image is faulty or is not ready in time."""
    failed: list[CaseResult] = []
    problems: dict[tuple[str, str], str] = {}
    for task in tasks:
        if task.sandbox is None:
            continue
        started = time.monotonic()
        limit = float(task.data.get("build_timeout_s", 1800.0))
        image = (task.sandbox.image, task.sandbox.runtime)
        if image not in problems:
            problems[image] = ""
            try:
                async with asyncio.timeout(limit):
                    await sandboxes.prepare(task.sandbox)
            except (SandboxTimeout, SandboxUnavailable):
                raise
            except TimeoutError:
                problems[image] = f"{image[0]}: the image is not ready after {limit:g} s; raise environment.build_timeout_sec"
            except UserError as error:
                problems[image] = str(error)
        if problem := problems[image]:
            took = time.monotonic() - started
            failed.append(CaseResult(task=task.id, case=IMAGE, wanted=1.0, value=None, detail=problem, wall_s=took))
    return failed


def _cases(task: Task) -> list[str]:
    return [GOLD, NOTHING, *([*cheats.TEXTS, *cheats.PROGRAMS] if task.outputs else cheats.ANSWERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prover:
    """Runs each case of each task, and records the files and the score of each gold solution."""

    family: TaskFamily
    sandboxes: SandboxBackend
    scorer: TaskScorer
    parallel: int
    tools: ToolSource | None = None
    left: dict[str, list[str]] = field(default_factory=dict)
    golden: dict[str, GoldAttempt] = field(default_factory=dict)

    async def cases(self, tasks: Sequence[Task], done: Callable[[], None]) -> list[CaseResult]:
        """Runs all cases of all tasks. Gold solutions run first, because cheats write to the paths of the files that gold solutions
        write."""
        slots, results = asyncio.Semaphore(self.parallel), []

        async def one(task: Task, case: str) -> None:
            async with slots:
                results.append(await self.case(task, case))
            done()

        for golden in (True, False):
            async with asyncio.TaskGroup() as running:
                for task in tasks:
                    for case in _cases(task):
                        if (case == GOLD) == golden:
                            running.create_task(one(task, case))
        return results

    async def case(self, task: Task, case: str) -> CaseResult:
        """Runs one case."""
        started = time.monotonic()
        wanted = 1.0 if case == GOLD else 0.0
        try:
            episode, problem = await retry_sandbox_errors(lambda: self._attempt(task, case))
        except SandboxUnavailable:
            raise
        except UserError as error:
            episode, problem = None, str(error)
        value: float | None = None
        if episode is not None and not problem:
            score = await self.scorer(task, episode)
            value, problem = score.value, score.reason or score.evidence
            if case == GOLD:
                self.golden[task.id] = GoldAttempt(episode=episode, score=score)
        took = time.monotonic() - started
        return CaseResult(task=task.id, case=case, wanted=wanted, value=value, detail=problem[:1000], wall_s=took)

    async def _attempt(self, task: Task, case: str) -> tuple[Episode, str]:
        """Returns the episode of a case, and the error of the gold solution; the error is empty if the gold solution did not fail."""
        episode = Episode(id="check", task_id=task.id, task_key=task.key, trajectories=())
        if not task.outputs and case != GOLD:
            return replace(episode, answer=None if case == NOTHING else cheats.ANSWERS[case]), ""
        if case == GOLD:
            return await self._gold(task, episode)
        paths = self.left.get(task.id) or [example_path(pattern) for pattern in task.outputs]
        if case in cheats.TEXTS:
            return replace(episode, outputs=cheats.cheat_outputs(case, paths)), ""
        program = "" if case == NOTHING else cheats.cheat_program(case, paths)
        _, collected = await run_and_collect(task, program, self.sandboxes, timeout_s=task.limits.wall_s)
        return replace(episode, outputs=collected.files, removed=collected.removed), ""

    async def _gold(self, task: Task, episode: Episode) -> tuple[Episode, str]:
        load_tools(task.tools, None, self.tools)
        limit = task.limits.wall_s if task.outputs else task.limits.tool_timeout_s
        result, collected = await run_and_collect(task, self._solution(task), self.sandboxes, timeout_s=limit)
        self.left[task.id] = sorted(collected.files)
        shown = render_result(result, task.limits)
        refused = "".join(f"; {path}: {reason}" for path, reason in collected.refused.items())
        problem = "" if result.ok else f"gold solution failed: {shown}{refused}"
        return replace(episode, answer=shown, outputs=collected.files, removed=collected.removed), problem

    def _solution(self, task: Task) -> str:
        with user_code.raising_as(
            lambda error: TaskError(f"task {task.id!r}: the family's gold() failed: {user_code.describe_error(error)}"), but=(UserError,)
        ):
            return gold_of(self.family, task)
