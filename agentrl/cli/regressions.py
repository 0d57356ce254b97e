"""`agentrl eval SUITE ... --policy POLICY`: evaluates suites of cases without a recipe."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentrl.base import files
from agentrl.cli.running import loading
from agentrl.cli.suites import rates, with_judge_costs
from agentrl.cli.terminal import outlasting_terminal
from agentrl.errors import UserError
from agentrl.failure.case import Suite, load_suites
from agentrl.failure.timeline import one_line
from agentrl.session.ending import ended_by_user, report_error

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.evaluation.open_policy import PreparedEvaluation
    from agentrl.evaluation.outcomes import CaseOutcome
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
        policy: None means the policy recorded in the suites.
    """
    suites = suites_in(named)
    if junit_file is not None and (junit_file.is_dir() or not junit_file.parent.is_dir()):
        raise UserError(f"--junit {junit_file}: cannot write there", fix="give a file in an existing folder")
    with loading():
        from agentrl.evaluation.open_policy import prepare_evaluation
        from agentrl.evaluation.outcomes import junit_xml
        from agentrl.evaluation.policies import project_of, recorded_policy
        from agentrl.evaluation.suite_code import check_project
        from agentrl.evaluation.suites import exit_code, pin_baselines

    check_project(suites, project_of(suites))
    policy = policy or recorded_policy(suites)
    with prepare_evaluation(policy, suites, overrides=overrides, repeats=repeats, threshold=threshold, run_dir=run_dir) as given:
        done = _evaluated(given, as_json=as_json)
    outcomes = [outcome for one in done for outcome in one.outcomes]
    if junit_file is not None:
        files.write_atomically(junit_file, junit_xml(outcomes, folder=given.start.folder, policy=policy.name, at=done[0].results.about.at))
    if pinning:
        print(f"{pin_baselines(done)} cases store these results as their baseline", file=sys.stderr)
    if code := exit_code(outcomes):
        raise typer.Exit(code)


def evaluate_recipe(
    root: Path, recipe: Recipe, policy: NamedPolicy, *, repeats: int | None, threshold: float, run_dir: Path | None, as_json: bool
) -> None:
    """Evaluates a policy that agentrl does not serve on the held-out tasks of a recipe, and prints the result."""
    with loading():
        from agentrl.evaluation.open_policy import held_out_suite, prepare_evaluation

    own = root, recipe.but({"gate": None, "trackers": ("terminal",)})
    suites = [held_out_suite(recipe, root)]
    with prepare_evaluation(policy, suites, repeats=repeats, threshold=threshold, run_dir=run_dir, own=own) as given:
        (done,) = _evaluated(given, as_json=as_json)
    if done.results.figures().pass_at_1 is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def _evaluated(given: PreparedEvaluation, *, as_json: bool) -> tuple[SuiteEvaluation, ...]:
    """Runs an evaluation and prints its table, or JSON."""
    from agentrl.evaluation.suites import evaluate_suites
    from agentrl.session.measure import judge_costs

    folder = given.start.folder
    try:
        with outlasting_terminal():
            done = asyncio.run(evaluate_suites(given, console=not as_json))
    except BaseException as error:
        if ended_by_user(error):
            raise
        raise typer.Exit(report_error(error, folder=folder)) from None
    asked = judge_costs(folder)
    print(json.dumps(summary(done, folder) | {"judges": asked}) if as_json else with_judge_costs(table(done, folder), asked))
    return done


def suites_in(named: Sequence[str]) -> list[Suite]:
    """Loads the suites in folders, without duplicates. Raises `UserError` for a folder without a suite."""
    by_folder = {suite.folder.resolve(): suite for one in named for suite in load_suites(Path(one))}
    return list(by_folder.values())


def summary(done: Sequence[SuiteEvaluation], folder: Path) -> dict[str, Any]:
    """Evaluations as JSON data."""
    from agentrl.evaluation.outcomes import CaseStatus, worst_first

    outcomes = [outcome for one in done for outcome in one.outcomes]
    return {
        "passed": all(one.status is CaseStatus.PASSED for one in outcomes),
        "run": str(folder),
        "suites": [
            {
                "about": dataclasses.asdict(one.results.about),
                "figures": dataclasses.asdict(one.results.figures()),
                "folder": str(one.folder),
                "verdicts": {str(kind): sum(each.status is kind for each in one.outcomes) for kind in CaseStatus},
            }
            for one in done
        ],
        "cases": [one.as_json() for one in worst_first(outcomes)],
    }


def table(done: Sequence[SuiteEvaluation], folder: Path) -> str:
    """Evaluations as text: the cases, failed ones first and in detail, then the figures of each suite."""
    from agentrl.evaluation.outcomes import CaseStatus, detail_lines, show_command, summary_line, worst_first

    several = len(done) > 1
    outcomes = worst_first(outcome for one in done for outcome in one.outcomes)
    lines: list[str] = []
    for number, one in enumerate(outcomes[:_LISTED]):
        lines.append(f"{one.status:9} {name_of(one, several)}  {summary_line(one)}")
        if one.status is not CaseStatus.PASSED and number < _SHOWN:
            lines += [f"          {row}" for row in [*detail_lines(one), show_command(one, folder)]]
    if len(outcomes) > _LISTED:
        lines.append(f"and {len(outcomes) - _LISTED} more cases: see --json")
    for suite in done:
        counts = [sum(one.status is kind for one in suite.outcomes) for kind in (CaseStatus.PASSED, CaseStatus.FAILED, CaseStatus.UNSCORED)]
        unscored = f", {counts[2]} unscored" if counts[2] else ""
        lines += ["", f"{one_line(suite.suite.name, 80)}: {counts[0]} of {len(suite.outcomes)} cases passed, {counts[1]} failed{unscored}"]
        lines += [*rates(suite.results.figures()), f"evaluation {suite.folder}"]
    return "\n".join(lines)


def name_of(one: CaseOutcome, several: bool) -> str:
    """Returns the name of a case, prefixed with its suite if there are several."""
    return f"{one_line(one.suite, 60)}/{one.case.id}" if several else one.case.id
