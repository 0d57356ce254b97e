"""`agentrl eval --suite` and `agentrl compare`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import one_line
from agentrl.cli.running import JsonFlag, listed, loading, run_folder, say
from agentrl.errors import UserError
from agentrl.evaluation import results, statistics
from agentrl.evaluation.comparison import ALPHA, MARGIN, Comparison, compare
from agentrl.evaluation.results import EvaluationFigures, EvaluationInfo, SuiteResults, attempt_passes
from agentrl.failure.case import Suite
from agentrl.gate.verdict import evaluation_folder

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe

_CASES_SHOWN = 12
_NAME = 80  # characters of a case name
_PLANNED = (1, 2, 4, 8)  # attempts per case
_CHANCE = 0.8  # power of a planned comparison


def evaluate_suite(
    root: Path,
    recipe: Path,
    written: Recipe,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    suite: Suite,
    *,
    repeats: int | None,
    threshold: float,
    as_json: bool,
) -> None:
    """Runs an evaluation on a suite and prints its table, or JSON. Exits with 1 if no attempt was scored."""
    with run_folder(root, recipe, written, overrides, run_dir, verb="eval") as (start, loaded, checked):
        with loading():
            from agentrl.evaluation.suites import SUITE_FOLDER
            from agentrl.evaluation.suites import evaluate_suite as evaluate
            from agentrl.session.measure import judge_costs

        result = asyncio.run(evaluate(loaded, start, checked, suite, repeats=repeats, threshold=threshold, root=root, console=not as_json))
        figures, judge_calls = result.figures(), judge_costs(start.folder)
        say(
            json.dumps(summary(result) | {"judges": judge_calls})
            if as_json
            else with_judge_costs(table(result, where=start.folder / SUITE_FOLDER), judge_calls)
        )
    if figures.pass_at_1 is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def compare_evaluations(
    before: Annotated[
        str | None,
        typer.Argument(help="Folder of an evaluation or of its run, RUN@VERSION for an evaluation by the gate, or a training run."),
    ] = None,
    after: Annotated[str | None, typer.Argument(help="The second evaluation or run. If omitted, plan a comparison.")] = None,
    alpha: Annotated[float, typer.Option(help="Significance level.")] = ALPHA,
    margin: Annotated[float, typer.Option(help="Largest difference of mean scores that counts as equal.")] = MARGIN,
    difference: Annotated[float, typer.Option(help="Print how many cases are needed to detect this difference of mean scores.")] = 0.1,
    rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Plan without an evaluation: expected share of passing attempts.")
    ] = None,
    across_sampling: Annotated[
        bool, typer.Option("--across-sampling", help="Print a verdict even if the sampling settings differ.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two evaluations of a suite case by case: the effect with its interval, the verdict, and the cases whose results changed.

    For two training runs, compare their recipes, success rates before and after training, success rates by kind, and costs.

    The verdict is "same" if the interval of the difference at level 1 - 2 alpha is within --margin of 0. Otherwise the verdict is "better"
    or "worse" if the difference is significant, and "not enough data" if it is not. If the evaluations differ in temperature, top_k, top_p
    or min_p, there is no verdict unless --across-sampling is given.

    With only one evaluation, or only --rate, print how many cases a comparison needs to detect --difference.
    """
    _check_ranges(alpha, margin, difference)
    if (before is None) == (rate is None):
        raise UserError(
            "give two evaluations to compare, or one evaluation or --rate to plan a comparison",
            fix="agentrl compare BEFORE AFTER, agentrl compare BEFORE, or agentrl compare --rate 0.9",
        )
    if before is None or after is None:
        known = results.load_results(evaluation(before)) if before is not None else None
        plan = planned(known, rate, difference, alpha=alpha)
        print(json.dumps(dataclasses.asdict(plan)) if as_json else plan.render())
        return
    if is_training_run(before) and is_training_run(after):
        from agentrl.observe.run_comparison import compare_folders

        runs = compare_folders([Path(before), Path(after)])
        print(json.dumps(runs.to_data()) if as_json else runs.render())
        return
    first, second = (results.load_results(evaluation(folder)) for folder in (before, after))
    ones, others, changed = results.same_cases(first, second)
    compared = compare(ones, others, alpha=alpha, margin=margin)
    if compared is None:
        raise UserError("the evaluations have no scored case in common", fix="evaluate both on the same suite")
    apart = first.about.sampling != second.about.sampling and not across_sampling
    needed = compared.cases_needed(difference, chance=_CHANCE)
    if as_json:
        comparison = dataclasses.asdict(compared) | {"changed_cases": changed, "difference": difference, "cases_for_difference": needed}
        if apart:
            comparison["verdict"] = None
        print(json.dumps(comparison))
        return
    print(render_comparison(compared, first, second, changed, verdict=not apart))
    print(f"\n{_number(needed)} such cases are needed to detect a difference of {100 * difference:g} points with {_CHANCE:.0%} probability")


def _check_ranges(alpha: float, margin: float, difference: float) -> None:
    for name, value, valid, limits in (
        ("--alpha", alpha, 0 < alpha < 0.5, "above 0 and below 0.5"),
        ("--margin", margin, 0 <= margin < 1, "from 0 to below 1"),
        ("--difference", difference, 0 < difference <= 1, "above 0, up to 1"),
    ):
        if not valid:
            raise UserError(f"{name} {value:g} is out of range", fix=f"use a value {limits}")


def _number(cases: int) -> str:
    """Returns a result of `cases_needed` as text, which may be its upper limit."""
    return f"{cases:,}{'' if cases < statistics.MAX_CASES else ' or more'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The number of cases that a comparison needs."""

    difference: float
    alpha: float
    chance: float  # probability of detecting the difference
    noise: float  # `agentrl.evaluation.statistics.attempt_noise`
    cases: dict[int, int]  # attempts per case and policy -> number of cases
    here: dict[int, float | None]  # attempts per case -> smallest detectable difference with the cases of the given evaluation
    suite_cases: int = 0

    def render(self) -> str:
        """Returns the plan as text."""
        points = f"a difference of {100 * self.difference:g} points"
        lines = [f"{points} is detected with {self.chance:.0%} probability (two-sided, alpha {self.alpha:g}) with"]
        for repeats, cases in self.cases.items():
            line = f"  {_number(cases)} cases, each tried {'once' if repeats == 1 else f'{repeats} times'} by both policies"
            seen = self.here.get(repeats)
            if repeats in self.here:
                shown = "no difference" if seen is None else f"{100 * seen:.0f} points or more"
                line += f"; the {self.suite_cases} cases of this suite detect {shown}"
            lines.append(line)
        return "\n".join(lines)


def planned(known: SuiteResults | None, rate: float | None, difference: float, *, alpha: float) -> Plan:
    """Plans a comparison from an evaluation or an expected rate. Raises `UserError` if the evaluation has no scored attempt."""
    attempts = known.scores().values() if known is not None else ()
    scored = [[score for score in scores if score is not None and math.isfinite(score)] for scores in attempts]
    scored = [scores for scores in scored if scores]
    try:
        noise = statistics.attempt_noise(scored) if rate is None else 2 * rate * (1 - rate)
    except ValueError:
        raise UserError("the evaluation has no scored attempt", fix="evaluate again, or use --rate") from None
    plan = {n: statistics.planned_spread(difference, noise, repeats=n) for n in _PLANNED}
    return Plan(
        difference=difference,
        alpha=alpha,
        chance=_CHANCE,
        noise=noise,
        cases={n: statistics.cases_needed(difference, spread, alpha=alpha, power=_CHANCE) for n, spread in plan.items()},
        here={n: statistics.smallest_detectable(len(scored), noise, repeats=n, alpha=alpha, power=_CHANCE) for n in _PLANNED}
        if known
        else {},
        suite_cases=len(scored),
    )


def evaluation(named: str) -> Path:
    """Returns the folder of an evaluation, given its folder, its run folder, or RUN@VERSION. The folder may not exist."""
    run, at, number = named.rpartition("@")
    if at and number.isdecimal() and len(number) < 10 and not Path(named).exists():
        return evaluation_folder(Path(run), int(number))
    folder = Path(named)
    return folder if (folder / results.ABOUT).is_file() or not (folder / "suite").is_dir() else folder / "suite"


def is_training_run(named: str) -> bool:
    """Whether an argument is the folder of a training run, as opposed to the folder of an evaluation on a suite."""
    folder = Path(named)
    return (folder / "metrics.jsonl").is_file() and not (folder / results.ABOUT).is_file() and not (folder / "suite").is_dir()


def summary(evaluation: SuiteResults) -> dict[str, Any]:
    """Returns an evaluation as JSON data."""
    cases = {case: {"scores": list(scores), "task_key": evaluation.task_keys[case]} for case, scores in sorted(evaluation.scores().items())}
    return {"about": dataclasses.asdict(evaluation.about), "figures": dataclasses.asdict(evaluation.figures()), "cases": cases}


def table(evaluation: SuiteResults, *, where: Path) -> str:
    """Returns an evaluation as text: first the figures, then up to 12 cases that did not always pass, the worst first."""
    figures = evaluation.figures()
    lines = [
        f"{one_line(evaluation.about.suite, _NAME)}: {plural(evaluation.about.cases, 'case')}, {plural(figures.attempts, 'attempt')}",
        *rates(figures),
    ]
    short = []
    for case, scores in evaluation.scores().items():
        counted = [score for score in scores if score is not None]
        passed = sum(attempt_passes(score, evaluation.about.pass_threshold(case)) for score in counted)
        if passed < len(scores):
            unscored = f", {len(scores) - len(counted)} unscored" if len(counted) < len(scores) else ""
            short.append((passed / len(scores), f"  {one_line(case, _NAME)}: {passed} of {len(counted)} passed{unscored}"))
    short.sort()
    lines += [line for _, line in short[:_CASES_SHOWN]]
    if len(short) > _CASES_SHOWN:
        lines.append(f"  and {plural(len(short) - _CASES_SHOWN, 'more case')} that did not always pass")
    return "\n".join([*lines, f"evaluation {where}"])


def with_judge_costs(table: str, judges: Mapping[str, float]) -> str:
    """Returns a table, followed by the costs of the judges if any judge was called."""
    from agentrl.judge import JudgeUsage

    return f"{table}\njudges  {JudgeUsage.from_figures(judges).summary()}" if judges else table


def rates(figures: EvaluationFigures) -> list[str]:
    """Returns the figures of an evaluation as lines of text."""
    lines, rate = [], figures.pass_at_1
    if rate is not None:
        lines.append(f"pass@1  {rate:.3f}  95% interval [{figures.low:.3f}, {figures.high:.3f}]")
    if figures.k > 1 and figures.pass_at_k is not None:
        lines.append(f"pass@{figures.k:<2} {figures.pass_at_k:.3f}")
    if figures.mean_score is not None and rate is not None and abs(figures.mean_score - rate) > 1e-9:
        lines.append(f"score   {figures.mean_score:.3f}  mean over cases")
    each = f"{figures.tokens / figures.attempts:.0f} per attempt, " if figures.attempts else ""
    turns = "" if figures.turns is None else f"{figures.turns:.1f} turns per attempt, "
    lines.append(f"cost    {figures.tokens:,} tokens ({each}{turns}{figures.wall_s:.1f} s in total)")
    if figures.unscored:
        lines.append(f"unscored {figures.unscored} attempts, which are not counted")
    return lines


def render_comparison(
    comparison: Comparison, first: SuiteResults, second: SuiteResults, changed: list[str], *, verdict: bool = True
) -> str:
    """Returns a comparison as text. `verdict`: whether to print a verdict, which is valid only for equal sampling settings."""
    names = [
        f"{one_line(side.about.model, _NAME)} version {side.about.version} ({one_line(side.about.sha256[:12], _NAME)})"
        for side in (first, second)
    ]
    test = "exact" if comparison.exact else "sampled"
    ways = " and ".join(_sampling(side) for side in (first, second))
    concluded = comparison.verdict if verdict else f"none because the sampling settings differ: {ways}; add --across-sampling to get one"
    lines = [
        f"before  {comparison.before:.3f}  {names[0]}",
        f"after   {comparison.after:.3f}  {names[1]}",
        f"effect  {100 * comparison.effect:+.1f} points  95% interval [{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}]"
        f"  p = {comparison.p_value:.3g} ({test})",
        f"verdict {concluded}  ({plural(comparison.cases, 'case')}, {plural(comparison.attempts, 'pair')} of attempts, "
        f"margin {100 * comparison.margin:g} points)",
    ]
    if comparison.unscored:
        lines.append(f"excluded {plural(comparison.unscored, 'pair')} of attempts with only one score")
    ones, others = first.scores(), second.scores()
    for what, cases in (("lower", comparison.lost), ("higher", comparison.gained)):
        lines += [f"{what}: {one_line(case, _NAME)}  {_mean(ones[case])} -> {_mean(others[case])}" for case in cases[:_CASES_SHOWN]]
        if len(cases) > _CASES_SHOWN:
            lines.append(f"{what}: {plural(len(cases) - _CASES_SHOWN, 'more case')}")
    for what, named in (("only in one evaluation", comparison.unpaired), ("changed", tuple(changed))):
        if named:
            lines.append(f"{what}: {listed([one_line(case, _NAME) for case in named], _CASES_SHOWN)}")
    if apart := differing_settings(first.about, second.about):
        lines.append(f"the evaluations differ in {', '.join(apart)}")
    return "\n".join(lines)


def differing_settings(first: EvaluationInfo, second: EvaluationInfo) -> list[str]:
    """Returns the names of the settings in which two evaluations differ. The evaluations are comparable if no setting differs."""
    names = ("suite_sha256", "sampling", "threshold", "thresholds", "repeats")
    return [name for name in names if getattr(first, name) != getattr(second, name)]


def _mean(scores: Sequence[float | None]) -> str:
    counted = [score for score in scores if score is not None]
    return f"{sum(counted) / len(counted):.2f} of {len(counted)}" if counted else "unscored"


def _sampling(evaluation: SuiteResults) -> str:
    settings = {name: value for name, value in evaluation.about.sampling.items() if name in ("temperature", "top_k", "top_p", "min_p")}
    return one_line(", ".join(f"{name} {value}" for name, value in settings.items()), _NAME)
