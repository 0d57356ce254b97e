"""`agentrl eval --suite` and `agentrl compare`: a suite of cases asked of a policy, and two such evaluations side by side."""

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

from agentrl.base.user_code import printable
from agentrl.cli.options import JsonFlag
from agentrl.cli.running import loading, run_folder
from agentrl.errors import UserError
from agentrl.evaluation import power, results
from agentrl.evaluation.comparison import ALPHA, MARGIN, Comparison, Scores, compare
from agentrl.evaluation.results import EvaluationFigures, SuiteResults
from agentrl.failure.case import Suite, check_attempt_options, load_suite
from agentrl.gate.rule import attempt_passes
from agentrl.gate.verdict import evaluation_folder

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe

_CASES_SHOWN = 12
_NAME = 80  # characters of a case's name
_PLANNED = (1, 2, 4, 8)  # attempts at each case
_CHANCE = 0.8  # of seeing a difference, for the number of cases that it needs


def open_suite(folder: Path, *, repeats: int | None, threshold: float) -> Suite:
    """A suite, once what was said of its attempts is looked at. Raises `UserError`."""
    check_attempt_options(repeats=repeats, threshold=threshold)
    return load_suite(folder)


def evaluate_suite(
    root: Path,
    recipe: Path,
    written: Recipe,
    given: tuple[str, ...],
    run_dir: Path | None,
    suite: Suite,
    *,
    repeats: int | None,
    threshold: float,
    as_json: bool,
) -> None:
    """Runs the evaluation and prints its table, or JSON."""
    with run_folder(root, recipe, written, given, run_dir, verb="eval") as (start, loaded, checked):
        with loading():
            from agentrl.evaluation.suites import SUITE_FOLDER
            from agentrl.evaluation.suites import evaluate_suite as evaluate
            from agentrl.session.measure import judge_costs

        found = asyncio.run(evaluate(loaded, start, checked, suite, repeats=repeats, threshold=threshold, root=root, console=not as_json))
        figures, asked = found.figures(), judge_costs(start.folder)
        print(json.dumps(summary(found) | {"judges": asked}) if as_json else told(table(found, where=start.folder / SUITE_FOLDER), asked))
    if figures.pass_at_1 is None:
        print("not one attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def compare_evaluations(
    before: Annotated[
        str | None, typer.Argument(help="An evaluation's folder, the run folder that holds it, or RUN@VERSION of a run's gate.")
    ] = None,
    after: Annotated[str | None, typer.Argument(help="The evaluation that is compared with it. None: plan a comparison with it.")] = None,
    alpha: Annotated[float, typer.Option(help="Largest chance of calling a difference that is none.")] = ALPHA,
    margin: Annotated[float, typer.Option(help="Mean scores closer than this are the same.")] = MARGIN,
    difference: Annotated[float, typer.Option(help="Tell how many cases this difference of the mean score would need.")] = 0.1,
    rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Plan without an evaluation: the share of attempts that are expected to pass.")
    ] = None,
    across_sampling: Annotated[
        bool, typer.Option("--across-sampling", help="Give a verdict even if the two were sampled differently.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two policies on the same cases, in pairs: effect with its interval, verdict, and which cases flipped.

    better, worse: the difference is significant. same: it is smaller than --margin, whichever way. not enough data: neither.
    Evaluations with different temperature, top_k, top_p or min_p get no verdict without --across-sampling.

    With one evaluation, or with --rate alone: how many cases a --difference will need, before anything is asked.
    """
    if not 0 < alpha < 0.5 or not 0 <= margin < 1 or not 0 < abs(difference) <= 1:
        raise UserError("--alpha lies between 0 and 0.5, --margin from 0 to below 1, --difference from above 0 to 1", fix="give other ones")
    if (before is None) == (rate is None):
        raise UserError(
            "either two evaluations are compared, or a comparison is planned",
            fix="give BEFORE and AFTER; BEFORE alone, or --rate 0.9 alone, tells how many cases a difference needs",
        )
    if before is None or after is None:
        known = results.load_results(evaluation(before)) if before is not None else None
        plan = planned(known, rate, difference, alpha=alpha)
        print(json.dumps(dataclasses.asdict(plan)) if as_json else plan.told())
        return
    first, second = (results.load_results(evaluation(one)) for one in (before, after))
    ones, others, changed = same_cases(first, second)
    found = compare(ones, others, alpha=alpha, margin=margin)
    if found is None:
        raise UserError("the two evaluations have no scored attempt at the same case", fix="evaluate both on the same suite")
    apart = first.about.sampling != second.about.sampling and not across_sampling
    needed = found.cases_needed(difference, chance=_CHANCE)
    if as_json:
        told = dataclasses.asdict(found) | {"changed_cases": changed, "difference": difference, "cases_for_difference": needed}
        if apart:
            told["verdict"] = None
        print(json.dumps(told))
        return
    print(described(found, first, second, changed, verdict=not apart))
    print(f"\na difference of {100 * difference:g} points would be seen with {_CHANCE:.0%} chance on {needed} such cases")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How many cases a comparison needs, told before it is made."""

    difference: float
    alpha: float
    chance: float  # of seeing the difference
    noise: float  # `agentrl.evaluation.power.attempt_noise`
    cases: dict[int, int]  # attempts at each case by each policy -> cases
    here: dict[int, float | None]  # the same -> smallest difference that the cases of the evaluation at hand show; empty without one
    suite_cases: int = 0

    def told(self) -> str:
        """For a person."""
        points = f"a difference of {100 * abs(self.difference):g} points"
        lines = [f"{points} is seen with {self.chance:.0%} chance (two-sided, alpha {self.alpha:g}) on"]
        for repeats, cases in self.cases.items():
            line = f"  {cases:,} cases, each tried {'once' if repeats == 1 else f'{repeats} times'} by both"
            seen = self.here.get(repeats)
            if repeats in self.here:
                shown = "no difference" if seen is None else f"one of {100 * seen:.0f} points"
                line += f"; the {self.suite_cases} cases of this suite show {shown}"
            lines.append(line)
        return "\n".join(lines)


def planned(known: SuiteResults | None, rate: float | None, difference: float, *, alpha: float) -> Plan:
    """Planned from what an evaluation shows of its cases, or from an expected rate. Raises `UserError` where it has nothing scored."""
    tried = known.scores().values() if known is not None else ()
    scored = [[one for one in scores if one is not None and math.isfinite(one)] for scores in tried]
    scored = [scores for scores in scored if scores]
    try:
        noise = power.attempt_noise(scored) if rate is None else 2 * rate * (1 - rate)
    except ValueError:
        raise UserError("not one attempt of that evaluation was scored", fix="evaluate again, or plan with --rate") from None
    plan = {n: power.planned_spread(difference, noise, repeats=n) for n in _PLANNED}
    return Plan(
        difference=difference,
        alpha=alpha,
        chance=_CHANCE,
        noise=noise,
        cases={n: power.cases_needed(difference, spread, alpha=alpha, power=_CHANCE) for n, spread in plan.items()},
        here={n: power.smallest_detectable(len(scored), noise, repeats=n, alpha=alpha, power=_CHANCE) for n in _PLANNED} if known else {},
        suite_cases=len(scored),
    )


def evaluation(named: str) -> Path:
    """The folder of an evaluation: itself, its run folder, or RUN@VERSION of a gate. Raises `UserError`."""
    run, at, number = named.rpartition("@")
    if at and number.isdecimal() and len(number) < 10 and not Path(named).exists():
        return evaluation_folder(Path(run), int(number))
    folder = Path(named)
    return folder if (folder / results.ABOUT).is_file() or not (folder / "suite").is_dir() else folder / "suite"


def same_cases(before: SuiteResults, after: SuiteResults) -> tuple[Scores, Scores, list[str]]:
    """The scores of both, without the cases whose content is not the same; and these."""
    ones, others = before.task_keys, after.task_keys
    changed = sorted(case for case in ones.keys() & others.keys() if ones[case] != others[case])
    kept = [{case: scores for case, scores in one.scores().items() if case not in changed} for one in (before, after)]
    return kept[0], kept[1], changed


def summary(found: SuiteResults) -> dict[str, Any]:
    """An evaluation for programs: where it comes from, its figures, and each case."""
    cases = {case: {"scores": list(scores), "task_key": found.task_keys[case]} for case, scores in sorted(found.scores().items())}
    return {"about": dataclasses.asdict(found.about), "figures": dataclasses.asdict(found.figures()), "cases": cases}


def table(found: SuiteResults, *, where: Path) -> str:
    """An evaluation for a person: its figures, then the cases that did not always pass."""
    figures = found.figures()
    lines = [f"{_shown(found.about.suite)}: {found.about.cases} cases, {figures.attempts} attempts", *rates(figures)]
    short = []
    for case, scores in found.scores().items():
        counted = [score for score in scores if score is not None]
        passed = sum(attempt_passes(score, found.about.pass_threshold(case)) for score in counted)
        if passed < len(scores):
            unscored = f", {len(scores) - len(counted)} unscored" if len(counted) < len(scores) else ""
            short.append((passed / len(scores), f"  {_shown(case)}: {passed} of {len(counted)} passed{unscored}"))
    short.sort()
    lines += [line for _, line in short[:_CASES_SHOWN]]
    if len(short) > _CASES_SHOWN:
        lines.append(f"  and {len(short) - _CASES_SHOWN} other cases that did not always pass")
    return "\n".join([*lines, f"evaluation {where}"])


def told(table: str, judges: Mapping[str, float]) -> str:
    """A table, and what the judges of its attempts have cost."""
    from agentrl.judge import JudgeUsage

    return f"{table}\njudges  {JudgeUsage.from_figures(judges).summary()}" if judges else table


def rates(figures: EvaluationFigures) -> list[str]:
    """Figures in lines."""
    lines, rate = [], figures.pass_at_1
    if rate is not None:
        lines.append(f"pass@1  {rate:.3f}  95% interval [{figures.low:.3f}, {figures.high:.3f}]")
    if figures.k > 1 and figures.pass_at_k is not None:
        lines.append(f"pass@{figures.k:<2} {figures.pass_at_k:.3f}")
    if figures.mean_score is not None and rate is not None and abs(figures.mean_score - rate) > 1e-9:
        lines.append(f"score   {figures.mean_score:.3f}  mean over cases")
    each = f"{figures.tokens / figures.attempts:.0f} of an attempt, " if figures.attempts else ""
    turns = "" if figures.turns is None else f"{figures.turns:.1f} turns an attempt, "
    lines.append(f"cost    {figures.tokens:,} tokens ({each}{turns}{figures.wall_s:.1f} s in all)")
    if figures.unscored:
        lines.append(f"unscored {figures.unscored} attempts, which count in no figure")
    return lines


def described(found: Comparison, first: SuiteResults, second: SuiteResults, changed: list[str], *, verdict: bool = True) -> str:
    """Formats a comparison for the terminal. `verdict`: whether to give one; differently sampled evaluations do not isolate the policy."""
    names = [f"{_shown(one.about.model)} version {one.about.version} ({_shown(one.about.sha256[:12])})" for one in (first, second)]
    test = "exact" if found.exact else "sampled"
    ways = " and ".join(_sampling(one) for one in (first, second))
    concluded = found.verdict if verdict else f"none: sampled with {ways}; --across-sampling gives one anyway"
    lines = [
        f"before  {found.before:.3f}  {names[0]}",
        f"after   {found.after:.3f}  {names[1]}",
        f"effect  {100 * found.effect:+.1f} points  95% interval [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        f"  p = {found.p_value:.3g} ({test})",
        f"verdict {concluded}  ({found.cases} cases, {found.attempts} pairs of attempts, margin {100 * found.margin:g} points)",
    ]
    if found.unscored:
        lines.append(f"left out {found.unscored} pairs of attempts that one side has no score of")
    ones, others = first.scores(), second.scores()
    for what, cases in (("lower", found.lost), ("higher", found.gained)):
        lines += [f"{what}: {_shown(case)}  {_mean(ones[case])} -> {_mean(others[case])}" for case in cases[:_CASES_SHOWN]]
        if len(cases) > _CASES_SHOWN:
            lines.append(f"{what}: {len(cases) - _CASES_SHOWN} more cases")
    for what, named in (("only on one side", found.unpaired), ("changed", tuple(changed))):
        if named:
            more = f", and {len(named) - _CASES_SHOWN} more" if len(named) > _CASES_SHOWN else ""
            lines.append(f"{what}: {', '.join(map(_shown, named[:_CASES_SHOWN]))}{more}")
    apart = [
        name
        for name in ("suite_sha256", "sampling", "threshold", "thresholds", "repeats")
        if getattr(first.about, name) != getattr(second.about, name)
    ]
    if apart:
        lines.append(f"the evaluations differ in {', '.join(apart)}")
    return "\n".join(lines)


def _mean(scores: Sequence[float | None]) -> str:
    counted = [score for score in scores if score is not None]
    return f"{sum(counted) / len(counted):.2f} of {len(counted)}" if counted else "unscored"


def _shown(text: str) -> str:
    return " ".join(printable(text, _NAME).split())


def _sampling(found: SuiteResults) -> str:
    settings = found.about.sampling
    return _shown(", ".join(f"{name} {value}" for name, value in settings.items() if name in ("temperature", "top_k", "top_p", "min_p")))
