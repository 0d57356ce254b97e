"""Checks content and backends by running them: gold solutions score 1, doing nothing and cheating 0; a sandbox backend holds.

The other proofs of `agentrl check` are in `agentrl/check/`, one a file. The report also says what was not proven.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentrl.agent import load_tools
from agentrl.agent.run_tools import declared_tools, pin_tools
from agentrl.agent.tools import render_result
from agentrl.base import user_code
from agentrl.base.scores import all_equal
from agentrl.check import cheats
from agentrl.check.family_source import FamilySource, draw_name, split_sizes
from agentrl.check.findings import Proof, join_examples, plural, unique
from agentrl.check.image_files import ImageFiles, image_files
from agentrl.check.leaks import leak_findings
from agentrl.check.null_answers import prove_null_answers
from agentrl.check.purity import prove_purity
from agentrl.check.separation import prove_separation
from agentrl.check.splits import prove_splits
from agentrl.check.tool_calls import prove_tools
from agentrl.check.verifiers import GoldAttempt, prove_verifiers
from agentrl.config.recipe import SandboxConfig
from agentrl.errors import SandboxError, SandboxTimeout, TaskError, UserError
from agentrl.observe.exclusions import printable_text
from agentrl.plugins import parts
from agentrl.protocols import SandboxBackend, TaskFamily, ToolSource
from agentrl.records import Episode, SandboxSpec, Split, Task, codec
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import GroupJudgeScorer, load_group_judge
from agentrl.reward.verifier_call import prepare_verifier
from agentrl.sandbox import conformance, open_backend, open_sandboxes, select_backend
from agentrl.sandbox.attacks import ATTACK_SPEC, AttackResult, run_attacks
from agentrl.session.ending import close_after
from agentrl.task import make_task
from agentrl.task.leaks import Leak, find_leaks, hidden_truths
from agentrl.task.outputs import example_path, run_and_collect

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRIES = 2
GOLD, NOTHING, IMAGE = "gold solution", "doing nothing", "image"
NEVER_PROVEN = (
    "that the truth is right: gold solution and verifier may share a mistake",
    "that no other cheat scores: only those of agentrl/check/cheats.py were tried",
    "that no answer is readable in other words, encoded, or over the network",
    "that held-out tasks are not similar to training tasks: only equal ones are found",
    "that tasks are the same on another machine, with other packages, or on another day",
    "that the policy's chat template presents the tools as intended",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one case of one task: the expected score, the given one (None: unscored), and why."""

    task: str
    case: str
    wanted: float
    value: float | None
    detail: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.value is not None and all_equal((self.value, self.wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The results of `agentrl check` on a family, and what was not proven."""

    cases: tuple[CaseResult, ...]
    proofs: tuple[Proof, ...]
    not_proven: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases) and all(proof.ok for proof in self.proofs)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready data."""
        proofs = [codec.to_data(proof) | {"ok": proof.ok} for proof in self.proofs]
        return {"ok": self.ok, "cases": list(map(codec.to_data, self.cases)), "proofs": proofs, "not_proven": list(self.not_proven)}


async def check_family(
    source: FamilySource, config: SandboxConfig, *, count: int | None, parallel: int = 8, quiet: bool = False
) -> CheckReport:
    """Runs every case of the first `count` tasks of every split (None: all of a folder), at most `parallel` at once, and every proof.

    Raises `UserError` for a family that cannot be opened, and `InfrastructureError` when the sandboxes themselves fail; faults of
    tasks are in the report.
    """
    family = source.open()
    try:
        wanted = split_sizes(family, count)
    except ValueError as error:
        raise UserError(str(error), fix="set the number of tasks of each split with --count") from None
    sandboxes = await open_sandboxes(config.but(warm=0), run_label="check", root=source.root)
    async with close_after(sandboxes.close):
        with Progress(console=Console(stderr=True), disable=quiet) as progress:
            bar = progress.add_task("tasks and splits", total=None)
            proofs = [await asyncio.to_thread(prove, source, wanted) for prove in (prove_purity, prove_splits)]
            tasks = list(_tasks(family, wanted))
            telling = partial(progress.update, bar)
            tools = await pin_tools(declared_tools(source.tools, source.root), tasks, sandboxes, every=False)
            together = open_group_judge(source)
            cases, more = await prove_tasks(
                family,
                tasks,
                sandboxes,
                root=source.root,
                parallel=parallel,
                telling=telling,
                tools=tools,
                audit=source.tasks.audit,
                together=together,
            )
            proofs += more
    return CheckReport(cases=tuple(cases), proofs=tuple(proofs), not_proven=tuple(_not_proven(family, wanted, tasks, proofs)))


def open_group_judge(source: FamilySource) -> GroupJudgeScorer | None:
    """The judge of groups that the recipe names, alone; None where it names none. Raises `UserError` for one that refuses to be used."""
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
    telling: Callable[..., None] = lambda **progress: None,
    tools: ToolSource | None = None,
    audit: Sequence[str] = (),
    together: GroupJudgeScorer | None = None,
) -> tuple[list[CaseResult], list[Proof]]:
    """Every case of tasks that `family` has a gold solution for, and the proofs that look at tasks one by one.

    Args:
        tools: the recipe's, with what its MCP servers offer.
        audit, together: the recipe's audits and its judge of groups, which answers without work must not please either.
        telling: told `description`, `total` and `advance` as work goes on, as `rich.progress.Progress.update` takes them.
    """
    scorer = TaskScorer(sandboxes=sandboxes, root=root)
    prover = _Prover(family=family, sandboxes=sandboxes, scorer=scorer, parallel=parallel, tools=tools)
    prover.scorer.load(sorted({*audit, *(name for task in tasks for name in task.verifiers)}))
    telling(description=f"images on {sandboxes.name}")
    cases = await _prepare(tasks, sandboxes)
    without = {result.task for result in cases}
    good = [task for task in tasks if task.id not in without]
    telling(description=f"{len(tasks)} tasks on {sandboxes.name}", total=sum(len(_cases(task)) for task in good))
    cases += await prover.cases(good, lambda: telling(advance=1))
    telling(description="verifiers, tools and files", total=None)
    proofs = [
        await prove_verifiers(good, prover.golden, prover.scorer, parallel=parallel),
        await prove_null_answers(good, prover.golden, prover.scorer, parallel=parallel, audit=audit, together=together),
        await prove_tools(good, sandboxes, tools),
        prove_separation(good),
        await _prove_unreadable(good, prover.golden, sandboxes),
    ]
    cases.sort(key=lambda result: (result.task, result.wanted == 0, result.case))
    return cases, proofs


def _not_proven(family: TaskFamily, wanted: Mapping[Split, int], tasks: Sequence[Task], proofs: Sequence[Proof]) -> Iterator[str]:
    """What the report does not prove, though a reader might think so."""
    for split, done in wanted.items():
        size = family.size(split)
        if size is None or size > done:
            of = "infinitely many" if size is None else f"{size:,}"
            yield f"that tasks of {split} beyond the first {done:,} of {of} can be solved, and not by cheating"
    yield from (one for proof in proofs for one in proof.unproven)
    if hosts := sorted({host for task in tasks for host in task.sandbox.network}):
        yield f"that the network that tasks may reach ({', '.join(hosts)}) stays as it is: gold solutions worked today"
    yield from NEVER_PROVEN


async def _prove_unreadable(tasks: Sequence[Task], golden: Mapping[str, GoldAttempt], sandboxes: SandboxBackend) -> Proof:
    """Searches each task's files, its prompt and the files of its image for the task's truth."""
    images: dict[tuple[str, str], ImageFiles] = {}
    given: dict[str, list[Leak]] = {}
    built_in: dict[str, list[Leak]] = {}
    for task in tasks:
        image = (task.sandbox.image, task.sandbox.runtime)
        if image not in images:
            images[image] = await _retried(lambda spec=task.sandbox: image_files(spec, sandboxes))  # type: ignore[misc]
        printed = golden[task.id].episode.answer if task.id in golden else None
        wanted = hidden_truths(task, printed or "")
        prompt = {"its prompt": "\n".join(message.content for message in task.prompt).encode("utf-8", "replace")}
        given[task.id] = find_leaks(task.contents(), wanted) + [replace(leak, certain=False) for leak in find_leaks(prompt, wanted)]
        built_in[task.id] = find_leaks(images[image].files, wanted)
    return Proof(
        name="no answer is readable in what the agent is given",
        looked_at=f"files and prompts of {plural(len(tasks), 'task')}, and "
        f"{plural(sum(len(one.files) for one in images.values()), 'file')} of {plural(len(images), 'image')}",
        findings=(*leak_findings(given, "in its files or prompt"), *leak_findings(built_in, "in its image")),
        unproven=tuple(f"that no answer is in image {image}: {one.problem}" for (image, _), one in images.items() if one.problem),
    )


def backend_names(choice: str) -> list[str]:
    """The backends that a `--backend` option means: words, or a reference to anybody's. Raises `UserError`."""
    if choice == "all":
        return ["docker", "bubblewrap"]
    try:
        return [parts.check_name(parts.BACKEND, choice)]
    except ValueError:
        raise UserError(f"no sandbox backend {choice!r}", fix="use docker, bubblewrap, auto, all or a reference") from None


async def check_backend(name: str, image: str, *, root: Path, only: str = "", runtime: str = "") -> list[dict[str, Any]]:
    """Runs the conformance checks on one backend: dictionaries with backend, name, ok, detail and wall_s."""
    backend = open_backend(SandboxConfig(backend=name), run_label="check", root=root)
    async with close_after(backend.close):
        results = await conformance.check_conformance(backend, SandboxSpec(image=image, runtime=runtime), only=only)
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


async def attack_backend(
    name: str, image: str, *, root: Path, only: str = "", runtime: str = "", report: Callable[[str, AttackResult], None]
) -> list[dict[str, Any]]:
    """Runs the attack suite on one backend, calling `report` (backend, result); returns dictionaries with backend and result."""
    backend = select_backend(name, run_label="attack", root=root)
    spec = replace(ATTACK_SPEC, image=image, runtime=runtime)
    async with close_after(backend.close):
        results = await run_attacks(backend, spec, only=only, report=lambda result: report(backend.name, result))
    return [{"backend": backend.name, **codec.to_data(result)} for result in results]


def render(report: CheckReport) -> str:
    """The report as text: what was proven, what is wrong with which task, and what was not proven."""
    console = Console(width=140, force_terminal=False)
    with console.capture() as captured:
        for line in (*_verdicts(report), ""):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if any(not case.ok for case in report.cases):
            console.print(_wrong_cases(report.cases), markup=False)
        for proof in report.proofs:
            if proof.table:
                console.print(_figures(proof), markup=False)
        findings = [line for proof in report.proofs for line in _findings(proof)]
        for line in (*findings, *([""] if findings else []), "not proven:"):
            console.print(printable_text(line), markup=False, highlight=False, soft_wrap=True)
        for text in report.not_proven:
            console.print(f"  - {printable_text(text)}", markup=False, highlight=False, soft_wrap=True)
    return captured.get().rstrip()


def _findings(proof: Proof) -> list[str]:
    """A proof's findings under its name, failures first."""
    order = ("failure", "warning", "unsafe", "note")
    ordered = sorted(proof.findings, key=lambda finding: order.index(finding.severity))
    lines = [f"  {'FAIL' if finding.severity == 'failure' else finding.severity}: {finding.what}" for finding in ordered]
    return [f"{proof.name}:", *lines] if lines else []


def _verdicts(report: CheckReport) -> list[str]:
    """A line for each claim."""
    cheating = [case for case in report.cases if case.case not in (GOLD, IMAGE)]
    tasks = len({case.task for case in report.cases})
    cheated = sum(case.case != NOTHING for case in cheating)
    lines = [
        (all(case.ok for case in report.cases if case.case in (GOLD, IMAGE)), "every gold solution scores 1", plural(tasks, "task")),
        (all(case.ok for case in cheating), "doing nothing and cheating score 0", f"{cheated:,} cheats on {plural(tasks, 'task')}"),
        *((proof.ok, proof.name, proof.looked_at) for proof in report.proofs),
    ]
    unsafe = {proof.name for proof in report.proofs if any(finding.severity == "unsafe" for finding in proof.findings)}
    marks = ["FAIL" if not ok else "UNSAFE" if name in unsafe else "ok" for ok, name, _ in lines]
    return [f"{mark:<4}  {name:<52} {printable_text(looked_at)}" for mark, (_, name, looked_at) in zip(marks, lines, strict=True)]


def _figures(proof: Proof) -> Table:
    header, *rows = proof.table
    table = Table(header[0], *header[1:], title=proof.name)
    for row in rows:
        table.add_row(*map(printable_text, row))
    return table


def _wrong_cases(cases: Sequence[CaseResult]) -> Table:
    """One row for each cause. Cases without a score share a row if their messages agree; cases with a wrong score, if the due scores do."""
    wrong = [case for case in cases if not case.ok]
    title = f"{len({case.task for case in wrong})} of {len({case.task for case in cases})} tasks are wrong"
    table = Table("tasks", "cases", "due", "scored", "why", title=title)
    causes: dict[tuple[float, str | None], list[CaseResult]] = {}
    for case in wrong:
        causes.setdefault((case.wanted, _cause(case) if case.value is None else None), []).append(case)
    for (due, _), some in sorted(causes.items(), key=lambda item: -len(item[1])):
        values = [case.value for case in some if case.value is not None]
        scored = "-" if not values else f"{min(values):g}" if min(values) == max(values) else f"{min(values):g} to {max(values):g}"
        kinds = [f"{name} ({times})" if times > 1 else name for name, times in Counter(case.case for case in some).most_common()]
        whys = list({_cause(case): case.detail for case in reversed(some)}.values())[::-1]
        row = (join_examples(unique(case.task for case in some)), join_examples(kinds), f"{due:g}", scored, join_examples(whys))
        table.add_row(*map(printable_text, row))
    return table


def _cause(case: CaseResult) -> str:
    """The message of a case without its task's name and numbers, which differ between tasks."""
    return re.sub(r"\d[\d.,]*", "#", case.detail.replace(case.task, "*"))


def _tasks(family: TaskFamily, wanted: Mapping[Split, int]) -> Iterator[Task]:
    """The tasks that can be made; the proof of purity reports the others."""
    for draw in ((split, index) for split, size in wanted.items() for index in range(size)):
        try:
            task = make_task(family, *draw)
            task.key  # noqa: B018 - a task that has none cannot be stored
        except Exception as error:  # a family is user code
            log.info("%s cannot be made: %s", draw_name(draw), error)
        else:
            yield task


async def _prepare(tasks: Sequence[Task], sandboxes: SandboxBackend) -> list[CaseResult]:
    """Prepares every image; tasks whose image cannot be made have failed."""
    failed: list[CaseResult] = []
    problems: dict[tuple[str, str], str] = {}
    for task in tasks:
        started = time.monotonic()
        limit = float(task.data.get("build_timeout_s", 1800.0))
        image = (task.sandbox.image, task.sandbox.runtime)
        if image not in problems:
            problems[image] = ""
            try:
                async with asyncio.timeout(limit):
                    await sandboxes.prepare(task.sandbox)
            except SandboxTimeout:
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
    """Runs single cases, and remembers the files that each task's gold solution left."""

    family: TaskFamily
    sandboxes: SandboxBackend
    scorer: TaskScorer
    parallel: int
    tools: ToolSource | None = None
    left: dict[str, list[str]] = field(default_factory=dict)
    golden: dict[str, GoldAttempt] = field(default_factory=dict)

    async def cases(self, tasks: Sequence[Task], done: Callable[[], None]) -> list[CaseResult]:
        """Every case of every task; cheats write to the paths of the gold solution's files."""
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
        started = time.monotonic()
        wanted = 1.0 if case == GOLD else 0.0
        try:
            episode, problem = await _retried(lambda: self._attempt(task, case))
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
        """The episode of a case, and the error if the gold solution did not run."""
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
        try:
            return self.family.gold(task)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything, and must not end the check
            raise TaskError(f"task {task.id!r}: the family's gold() failed: {user_code.describe_error(error)}") from error


async def _retried(act: Callable[[], Awaitable[T]]) -> T:
    """Retries after failures of the sandboxes; one that persists ends the check."""
    for attempt in range(RETRIES):
        try:
            return await act()
        except SandboxError as error:
            log.warning("retrying: %s", error)
            await asyncio.sleep(0.2 * 2**attempt)
    return await act()
