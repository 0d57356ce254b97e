"""Evaluates suites of cases with one policy. The outcome of a case is reported as soon as all of its attempts are scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.agent.run_tools import declared_tools
from agentrl.base.numbers import plural
from agentrl.config.recipe import Recipe
from agentrl.evaluation import results
from agentrl.evaluation.engine import PlannedAttempt, SuiteAttempt, evaluation_info, plan_case, run_attempts, suite_attempt
from agentrl.evaluation.open_policy import OpenPolicy, PreparedEvaluation, open_policy
from agentrl.evaluation.outcomes import CaseOutcome, CaseStatus, case_outcome
from agentrl.evaluation.policies import recipe_policy
from agentrl.evaluation.results import SuiteResults
from agentrl.failure.case import Baseline, Case, Suite, load_suite, save_case
from agentrl.failure.digest import write_digest
from agentrl.failure.triage import load_rules
from agentrl.records import ScoredEpisode
from agentrl.session.ending import warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.preflight import PreflightResult, check_suite

EVAL_PHASE = "eval"
SUITE_FOLDER = "suite"
"""Subfolder of a run folder that contains the evaluation, if one suite was evaluated."""
SUITES_FOLDER = "suites"
"""Subfolder of a run folder that contains one folder per evaluation, if several suites were evaluated."""

CaseListener = Callable[[CaseOutcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteEvaluation:
    """The stored evaluation of a suite."""

    suite: Suite
    folder: Path
    results: SuiteResults
    outcomes: tuple[CaseOutcome, ...]


async def evaluate_suites(
    prepared: PreparedEvaluation,
    *,
    console: bool = True,
    on_case: CaseListener = lambda outcome: None,
) -> tuple[SuiteEvaluation, ...]:
    """Runs every case in live sandboxes, scores the attempts and stores the results in the run folder.

    Args:
        console: whether progress is printed to standard output; False means standard error.
        on_case: called with the outcome of each case when its last attempt is scored.

    Raises:
        InfrastructureError: the evaluation cannot continue, for example because the server is permanently lost. The error may be in an
            `ExceptionGroup`. A fault in a single episode is recorded in its attempt instead.
    """
    async with open_policy(prepared, console=console) as policy:
        cases = [(suite, case) for suite in prepared.suites for case in suite.cases]
        total = sum(prepared.repeats_of(suite, case) for suite, case in cases)
        policy.tracker.stage("evaluate", f"{plural(len(cases), 'case')}, {plural(total, 'attempt')}")
        await asyncio.to_thread(policy.capture.reset_phase, EVAL_PHASE)
        await policy.stored.begin(EVAL_PHASE)
        evaluation = _Evaluation(prepared, policy, total, on_case)
        async with asyncio.TaskGroup() as running:
            jobs = {
                suite.folder: [running.create_task(evaluation.run_case(suite, case)) for case in suite.cases] for suite in prepared.suites
            }
        evaluations = tuple(evaluation.save(suite, [job.result() for job in jobs[suite.folder]]) for suite in prepared.suites)
    with warn_on_error(prepared.start.folder, "the digest of failures"):
        write_digest(prepared.start.folder)
    return evaluations


async def evaluate_suite(
    recipe: Recipe,
    start: RunStart,
    checked: PreflightResult,
    suite: Suite,
    *,
    repeats: int | None,
    threshold: float,
    root: Path,
    console: bool = True,
) -> SuiteResults:
    """Serves the recipe's model and evaluates it on a suite. The caller makes the same preparations as for `agentrl.run.loop.train`.

    Args:
        repeats: attempts per case; None means the number that the case sets or, if the case sets none, the suite's number.

    If a verifier or a tool of a case does not resolve, raises `PluginError` before anything starts.
    """
    check_suite(suite, checked.scorer, declared_tools(recipe.mcp, recipe.tools, root), root=root, family=recipe.tasks.family)
    prepared = PreparedEvaluation(
        policy=recipe_policy(recipe),
        suites=(suite,),
        recipe=recipe,
        root=root,
        start=start,
        repeats=repeats,
        threshold=threshold,
        checked=checked,
        scorer=checked.scorer,
    )
    (evaluation,) = await evaluate_suites(prepared, console=console)
    return evaluation.results


def pin_baselines(evaluations: Sequence[SuiteEvaluation]) -> int:
    """Stores the scores from evaluations as the baselines of their cases. Returns the number of stored baselines.

    Skips cases that have no score, and cases that were deleted or whose task or start has changed since the evaluation started.
    """
    pinned = 0
    for evaluation in evaluations:
        cases = {case.id: case for case in load_suite(evaluation.suite.folder).cases}
        for outcome in evaluation.outcomes:
            if outcome.mean is None:
                continue
            info, case = evaluation.results.about, cases.get(outcome.case.id)
            baseline = Baseline(model=info.model, version=info.version if info.sha256 else None, scores=outcome.scores, at=info.at)
            if case is not None and (case.task, case.start) == (outcome.case.task, outcome.case.start):  # the file may have changed since
                save_case(evaluation.suite.folder, replace(case, baseline=baseline))
                pinned += 1
    return pinned


def exit_code(outcomes: Sequence[CaseOutcome]) -> int:
    """Returns 0 if every case passed, otherwise 1."""
    return 0 if all(outcome.status is CaseStatus.PASSED for outcome in outcomes) else 1


class _Evaluation:
    """Runs the attempts at the cases of an evaluation, and saves the results."""

    def __init__(self, prepared: PreparedEvaluation, policy: OpenPolicy, total: int, on_case: CaseListener) -> None:
        self._prepared, self._policy, self._total, self._on_case = prepared, policy, total, on_case
        self._rules = load_rules(prepared.recipe.capture.rules)
        self._names = _names(prepared.suites)
        self._began, self._scored = time.monotonic(), 0

    async def run_case(self, suite: Suite, case: Case) -> tuple[CaseOutcome, list[SuiteAttempt]]:
        """Runs the attempts at a case. Returns the outcome of the case and the records of the attempts."""
        prepared, policy = self._prepared, self._policy
        # Names of suites contain no colon, so the episodes of different suites have different ids.
        prefix = f"{EVAL_PHASE}-" if len(prepared.suites) == 1 else f"{self._names[suite.folder]}:"
        planned = [plan_case(case, f"{prefix}{case.id}-r{number}", policy.broken) for number in range(prepared.repeats_of(suite, case))]
        episodes = await run_attempts(policy.groups, planned, self._count)
        attempts = []
        for number, scored in enumerate(episodes):
            record = suite_attempt(case, number, scored, phase=EVAL_PHASE, version=policy.sampled_by)
            tokens = policy.spent.pop(scored.episode.id, record.attempt.tokens)
            attempts.append(replace(record, attempt=replace(record.attempt, tokens=tokens)))
        pairs = [(record.attempt, scored) for record, scored in zip(attempts, episodes, strict=True)]
        origin = {"model": prepared.policy.name}
        outcome = case_outcome(suite.name, case, pairs, threshold=prepared.threshold, rules=self._rules, origin=origin)
        self._on_case(outcome)
        return outcome, attempts

    def save(self, suite: Suite, cases: Sequence[tuple[CaseOutcome, list[SuiteAttempt]]]) -> SuiteEvaluation:
        """Writes the evaluation of a suite to the run folder, where `agentrl compare` reads it, and returns the evaluation."""
        prepared, run = self._prepared, self._prepared.start.folder
        folder = run / SUITE_FOLDER if len(prepared.suites) == 1 else run / SUITES_FOLDER / self._names[suite.folder]
        repeats = prepared.repeats or suite.repeats
        info = evaluation_info(
            prepared.recipe, suite, self._policy.version, repeats=repeats, threshold=prepared.threshold, began=self._began
        )
        info = replace(info, model=prepared.policy.name, version=prepared.policy.version)  # as typed, so that it is the same on any machine
        attempts = [record for _, records in cases for record in records]
        suite_results = SuiteResults(about=info, attempts=tuple(record.attempt for record in attempts))
        results.save_results(folder, suite_results, [record.transcript for record in attempts])
        return SuiteEvaluation(suite=suite, folder=folder, results=suite_results, outcomes=tuple(outcome for outcome, _ in cases))

    async def _count(self, attempt: PlannedAttempt, scored: ScoredEpisode) -> ScoredEpisode:
        self._scored += 1
        self._policy.tracker.evaluating(self._scored, self._total)
        assert attempt.task is not None, "a case has a task"
        await asyncio.to_thread(self._policy.capture.capture_episode, attempt.task, scored, phase=EVAL_PHASE, step=0)
        await self._policy.stored.add(EVAL_PHASE, 0, attempt.task, scored)
        return scored


def _names(suites: Sequence[Suite]) -> dict[Path, str]:
    """Returns a unique name for each suite, for use in the names of files and episodes."""
    names: dict[Path, str] = {}
    for suite in suites:
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "-" for c in suite.folder.resolve().name).strip("-.")[:60]
        name, number = plain or "suite", 2
        while name in names.values():
            name, number = f"{plain or 'suite'}-{number}", number + 1
        names[suite.folder] = name
    return names
