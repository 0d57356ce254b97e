"""`agentrl eval SUITE ... --policy POLICY`: suites of cases without a recipe, and an exit code that says whether every case passes."""

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
from agentrl.cli.suites import rates, told
from agentrl.cli.terminal import outlasting_terminal
from agentrl.errors import UserError
from agentrl.failure.case import Suite, find_suites
from agentrl.failure.render import line
from agentrl.session.ending import explain, stopped

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.evaluation.outcomes import CaseOutcome
    from agentrl.evaluation.policies import NamedPolicy
    from agentrl.evaluation.regressions import Evaluated, Prepared

_SHOWN = 12  # cases that did not pass, told in full
_LISTED = 40  # rows of the table


def hold_to_suites(
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
    """Evaluates the suites, prints the verdicts, and ends the command with 1 if a case did not pass.

    Args:
        policy: None means the one that the suites record.
    """
    suites = suites_in(named)
    if junit_file is not None and (junit_file.is_dir() or not junit_file.parent.is_dir()):
        raise UserError(f"--junit {junit_file}: no file can be written there", fix="give a file in a folder that exists")
    with loading():
        from agentrl.evaluation.junit import junit
        from agentrl.evaluation.policies import recorded_policy, root_of
        from agentrl.evaluation.regressions import exit_code, pin, prepared
        from agentrl.evaluation.suite_code import check_project

    check_project(suites, root_of(suites))
    policy = policy or recorded_policy(suites)
    with prepared(policy, suites, overrides=overrides, repeats=repeats, threshold=threshold, run_dir=run_dir) as given:
        done = _evaluated(given, as_json=as_json)
    outcomes = [outcome for one in done for outcome in one.outcomes]
    if junit_file is not None:
        files.write(junit_file, junit(outcomes, folder=given.start.folder, policy=policy.name, at=done[0].results.about.at))
    if pinning:
        print(f"{pin(done)} cases have these results as their baseline", file=sys.stderr)
    if code := exit_code(outcomes):
        raise typer.Exit(code)


def evaluate_recipe(
    root: Path, recipe: Recipe, policy: NamedPolicy, *, repeats: int | None, threshold: float, run_dir: Path | None, as_json: bool
) -> None:
    """Evaluates a policy that agentrl does not serve on the held-out tasks of a recipe, and prints the result.

    Raises `UserError` for a model, because `--model` evaluates it.
    """
    if policy.served:
        raise UserError(
            f"--policy {policy.name} is a model, and with a recipe --policy takes only a URL or module:attr",
            fix=f"agentrl eval RECIPE --model {policy.name}",
        )
    with loading():
        from agentrl.evaluation.regressions import held_out, prepared

    own = root, recipe.but({"gate": None, "trackers": ("terminal",), "tracker_options": {}})
    suites = [held_out(recipe, root)]
    with prepared(policy, suites, repeats=repeats, threshold=threshold, run_dir=run_dir, own=own) as given:
        (done,) = _evaluated(given, as_json=as_json)
    if done.results.figures().pass_at_1 is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def _evaluated(given: Prepared, *, as_json: bool) -> tuple[Evaluated, ...]:
    """Runs the evaluation and prints its table, or JSON."""
    from agentrl.evaluation.regressions import evaluate
    from agentrl.session.measure import judges_spent

    folder = given.start.folder
    try:
        with outlasting_terminal():
            done = asyncio.run(evaluate(given, console=not as_json))
    except BaseException as error:
        if stopped(error):
            raise
        raise typer.Exit(explain(error, folder=folder)) from None
    asked = judges_spent(folder)
    print(json.dumps(summary(done, folder) | {"judges": asked}) if as_json else told(table(done, folder), asked))
    return done


def suites_in(named: Sequence[str]) -> list[Suite]:
    """The suites of folders, each once. Raises `UserError` for a folder without one."""
    found = {suite.folder.resolve(): suite for one in named for suite in find_suites(Path(one))}
    return list(found.values())


def summary(done: Sequence[Evaluated], folder: Path) -> dict[str, Any]:
    """Evaluations for programs."""
    from agentrl.evaluation.outcomes import Verdict, worst_first

    outcomes = [outcome for one in done for outcome in one.outcomes]
    return {
        "passed": all(one.verdict is Verdict.PASSED for one in outcomes),
        "run": str(folder),
        "suites": [
            {
                "about": dataclasses.asdict(one.results.about),
                "figures": dataclasses.asdict(one.results.figures()),
                "folder": str(one.folder),
                "verdicts": {str(kind): sum(each.verdict is kind for each in one.outcomes) for kind in Verdict},
            }
            for one in done
        ],
        "cases": [one.as_json() for one in worst_first(outcomes)],
    }


def table(done: Sequence[Evaluated], folder: Path) -> str:
    """Evaluations for a person: every case, those that did not pass first and told in full, then the figures of each suite."""
    from agentrl.evaluation.outcomes import Verdict, details, see_more, short, worst_first

    several = len(done) > 1
    outcomes = worst_first(outcome for one in done for outcome in one.outcomes)
    lines: list[str] = []
    for number, one in enumerate(outcomes[:_LISTED]):
        lines.append(f"{one.verdict:9} {name_of(one, several)}  {short(one)}")
        if one.verdict is not Verdict.PASSED and number < _SHOWN:
            lines += [f"          {row}" for row in [*details(one), see_more(one, folder)]]
    if len(outcomes) > _LISTED:
        lines.append(f"and {len(outcomes) - _LISTED} more cases: --json has all of them")
    for suite in done:
        counts = [sum(one.verdict is kind for one in suite.outcomes) for kind in (Verdict.PASSED, Verdict.FAILED, Verdict.UNSCORED)]
        unscored = f", {counts[2]} unscored" if counts[2] else ""
        lines += ["", f"{line(suite.suite.name, 80)}: {counts[0]} of {len(suite.outcomes)} cases passed, {counts[1]} failed{unscored}"]
        lines += [*rates(suite.results.figures()), f"evaluation {suite.folder}"]
    return "\n".join(lines)


def name_of(one: CaseOutcome, several: bool) -> str:
    """A case's name, with its suite's where there are several."""
    return f"{line(one.suite, 60)}/{one.case.id}" if several else one.case.id
