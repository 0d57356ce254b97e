"""`agentrl eval SUITE ... --policy POLICY`: evaluates suites of cases without a recipe."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentrl.base import files
from agentrl.base.numbers import plural
from agentrl.cli.running import loading, reporting_errors
from agentrl.cli.suites import rates, with_judge_costs
from agentrl.errors import UserError
from agentrl.failure.case import load_suites
from agentrl.failure.timeline import one_line

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.evaluation.open_policy import PreparedEvaluation
    from agentrl.evaluation.policies import NamedPolicy
    from agentrl.evaluation.suites import SuiteEvaluation

_SHOWN = 12  # failed cases with details
_LISTED = 40  # rows of the table


def evaluate_suites_command(
    named: Sequence[str],
    policy: NamedPolicy | None,
    overrides: Sequence[str],
    *,
    repeats: int | None,
    threshold: float,
    run_dir: Path | None,
    junit_file: Path | None,
    pinning: bool,
    as_json: bool,
) -> None:
    """Evaluates suites, prints the results, and exits with 1 if a case did not pass.

    Args:
        policy: the policy to evaluate; None means the policy recorded in the suites.
    """
    suites = list({suite.folder.resolve(): suite for folder in named for suite in load_suites(Path(folder))}.values())
    if junit_file is not None and (junit_file.is_dir() or not junit_file.parent.is_dir()):
        raise UserError(f"--junit {junit_file}: this is a folder, or its folder does not exist", fix="give a file in an existing folder")
    with loading():
        from agentrl.evaluation.open_policy import prepare_evaluation
        from agentrl.evaluation.outcomes import junit_xml
        from agentrl.evaluation.policies import project_of, recorded_policy
        from agentrl.evaluation.suite_code import check_project
        from agentrl.evaluation.suites import exit_code, pin_baselines

    check_project(suites, project_of(suites))
    policy = policy or recorded_policy(suites)
    with prepare_evaluation(policy, suites, overrides=overrides, repeats=repeats, threshold=threshold, run_dir=run_dir) as prepared:
        evaluations = _evaluated(prepared, as_json=as_json)
    outcomes = [outcome for evaluation in evaluations for outcome in evaluation.outcomes]
    if junit_file is not None:
        files.write_atomically(
            junit_file, junit_xml(outcomes, folder=prepared.start.folder, policy=policy.name, at=evaluations[0].results.about.at)
        )
    if pinning:
        print(f"stored these results as the baseline of {plural(pin_baselines(evaluations), 'case')}", file=sys.stderr)
    if code := exit_code(outcomes):
        raise typer.Exit(code)


def evaluate_recipe(
    root: Path, recipe: Recipe, policy: NamedPolicy, *, repeats: int | None, threshold: float, run_dir: Path | None, as_json: bool
) -> None:
    """Evaluates a policy that agentrl does not serve on the held-out tasks of a recipe, and prints the result. Exits with 1 if no attempt
    was scored."""
    with loading():
        from agentrl.evaluation.open_policy import held_out_suite, prepare_evaluation

    own = root, recipe.but({"gate": None, "trackers": ("terminal",)})
    suites = [held_out_suite(recipe, root)]
    with prepare_evaluation(policy, suites, repeats=repeats, threshold=threshold, run_dir=run_dir, own=own) as prepared:
        (evaluation,) = _evaluated(prepared, as_json=as_json)
    if evaluation.results.figures().pass_at_1 is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def _evaluated(prepared: PreparedEvaluation, *, as_json: bool) -> tuple[SuiteEvaluation, ...]:
    """Runs an evaluation and prints its table, or JSON."""
    from agentrl.evaluation.suites import evaluate_suites
    from agentrl.session.measure import judge_costs

    folder = prepared.start.folder
    with reporting_errors(folder):
        evaluations = asyncio.run(evaluate_suites(prepared, console=not as_json))
    judge_calls = judge_costs(folder)
    print(
        json.dumps(summary(evaluations, folder) | {"judges": judge_calls})
        if as_json
        else with_judge_costs(table(evaluations, folder), judge_calls)
    )
    return evaluations


def summary(evaluations: Sequence[SuiteEvaluation], folder: Path) -> dict[str, Any]:
    """Returns the evaluations as JSON data."""
    from agentrl.evaluation.outcomes import CaseStatus, worst_first

    outcomes = [outcome for evaluation in evaluations for outcome in evaluation.outcomes]
    return {
        "passed": all(evaluation.status is CaseStatus.PASSED for evaluation in outcomes),
        "run": str(folder),
        "suites": [
            {
                "about": dataclasses.asdict(evaluation.results.about),
                "figures": dataclasses.asdict(evaluation.results.figures()),
                "folder": str(evaluation.folder),
                "verdicts": {str(kind): sum(outcome.status is kind for outcome in evaluation.outcomes) for kind in CaseStatus},
            }
            for evaluation in evaluations
        ],
        "cases": [evaluation.as_json() for evaluation in worst_first(outcomes)],
    }


def table(evaluations: Sequence[SuiteEvaluation], folder: Path) -> str:
    """Returns the evaluations as text: the cases, with the failed cases first and in detail, then the figures for each suite."""
    from agentrl.evaluation.outcomes import CaseStatus, detail_lines, show_command, summary_line, worst_first

    several = len(evaluations) > 1
    outcomes = worst_first(outcome for evaluation in evaluations for outcome in evaluation.outcomes)
    lines: list[str] = []
    for number, evaluation in enumerate(outcomes[:_LISTED]):
        name = f"{one_line(evaluation.suite, 60)}/{evaluation.case.id}" if several else evaluation.case.id
        lines.append(f"{evaluation.status:9} {name}  {summary_line(evaluation)}")
        if evaluation.status is not CaseStatus.PASSED and number < _SHOWN:
            lines += [f"          {row}" for row in [*detail_lines(evaluation), show_command(evaluation, folder)]]
    if len(outcomes) > _LISTED:
        lines.append(f"and {plural(len(outcomes) - _LISTED, 'more case')}: see --json")
    for suite in evaluations:
        counts = Counter(evaluation.status for evaluation in suite.outcomes)
        unscored = f", {counts[CaseStatus.UNSCORED]} unscored" if counts[CaseStatus.UNSCORED] else ""
        passed = f"{counts[CaseStatus.PASSED]} of {plural(len(suite.outcomes), 'case')} passed, {counts[CaseStatus.FAILED]} failed"
        lines += ["", f"{one_line(suite.suite.name, 80)}: {passed}{unscored}"]
        lines += [*rates(suite.results.figures()), f"evaluation {suite.folder}"]
    return "\n".join(lines)
