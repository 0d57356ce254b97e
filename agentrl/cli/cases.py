"""`agentrl failures promote`, `agentrl failures minimize` and `agentrl practice`: cases and training tasks from traces."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import printable
from agentrl.cli.running import JsonFlag, load_recipe, say, user_name
from agentrl.cli.traces import OfKind, OfPhase, OfTag, OfVersion, RunFolder, check_ids, open_collection, trace_filter
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.failure.case import Suite, load_suite
from agentrl.failure.overlap import WithheldTasks, load_withheld
from agentrl.failure.practice import save_practice
from agentrl.session.ending import close_after

if TYPE_CHECKING:
    from agentrl.check.practice import PracticeReport
    from agentrl.failure.collection import TraceRow
    from agentrl.failure.promote import Promotion, UserParts
    from agentrl.records import EpisodeState


def promote_failures(
    run: RunFolder,
    into: Annotated[Path, typer.Option("--into", help="Folder of the suite, created if needed.")],
    traces: Annotated[list[str] | None, typer.Argument(help="Trace ids. Default: all traces that match the filters.")] = None,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    version: OfVersion = None,
    most: Annotated[int | None, typer.Option(min=1, help="Maximum number of traces that match the filters; the newest are used.")] = None,
    note: Annotated[str, typer.Option(help="Comment stored in the cases.")] = "",
    threshold: Annotated[float | None, typer.Option(help="Lowest passing mean score. Default: as in training or evaluation.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Attempts per case. Default: as set in the suite.")] = None,
    from_turn: Annotated[
        str, typer.Option("--from-turn", help="Start the cases at this turn: a number from 1, or `failing` for the tagged turn.")
    ] = "",
    verifier: Annotated[list[str] | None, typer.Option("--verifier", help="For imported traces: verifier, module:attr.")] = None,
    truths: Annotated[Path | None, typer.Option(help='For imported traces: JSON lines file with {"trace": "ID", "truth": "412"}.')] = None,
    truth_from: Annotated[str, typer.Option(help="For imported traces: key of the correct answer in the origin of each trace.")] = "",
    tools: Annotated[
        list[str] | None, typer.Option("--tools", help="For imported traces: tool to call, module:attr. Default: recorded results.")
    ] = None,
    image: Annotated[str, typer.Option(help="For imported traces: sandbox image, for tools and verifiers that use a sandbox.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Turn traces into regression cases. A case contains a task and its origin. Tasks that are already in the suite are skipped.

    An imported trace needs --verifier, and --truths or --truth-from. The prompt of its case is the user's message, and the tools of its
    case return the recorded results.

    With --from-turn, the episode is replayed in a live sandbox up to that turn, and the case starts there.
    """
    from agentrl.failure.promote import describe_excluded_messages, promote

    if not traces and not (tag or kind or phase or version is not None or most):
        raise UserError("no traces are selected", fix="give trace ids, or filters such as --tag misread_output --most 20")
    supplied = _user_parts(verifier, truths, truth_from, tools, image)
    with open_collection(run) as collection:
        wanted = trace_filter(tag=tag, kind=kind, phase=phase, version=version, ids=traces)
        chosen = selected = collection.rows(wanted, most=-1 if most is None else most, newest=True)
        if not traces:  # traces that cannot become cases are skipped in a selection; given by id they raise an error
            chosen = [row for row in selected if row.why != "fault" and (row.task_key or supplied is not None)]
        check_ids(run, wanted.ids, chosen)
        chosen_traces = [trace for row in chosen[::-1] if (trace := collection.get(row.id)) is not None]
    if not chosen_traces:
        raise _none_chosen(run, selected)
    starts: dict[str, EpisodeState | None] = {}
    if from_turn:
        from agentrl.evaluation.replay import replay_starts

        starts = asyncio.run(replay_starts(run, chosen_traces, from_turn))
    promotions = promote(
        chosen_traces, into, note=note, by=user_name(), threshold=threshold, repeats=repeats, starts=starts, supplied=supplied
    )
    for trace in chosen_traces:
        if trace.task is None and (lost := describe_excluded_messages(trace)):
            print(f"{trace.id}: {lost}", file=sys.stderr)
    _print_promotions(promotions, into, as_json=as_json)


def _user_parts(verifier: list[str] | None, truths: Path | None, truth_from: str, tools: list[str] | None, image: str) -> UserParts | None:
    """Returns the verifiers, truths, tools and image for the cases of imported traces; None if no option sets any of them."""
    from agentrl.failure.promote import UserParts, read_truths

    if not (verifier or truths or truth_from or tools or image):
        return None
    known = read_truths(truths) if truths is not None else {}
    return UserParts(verifiers=tuple(verifier or ()), truths=known, truth_from=truth_from, tools=tuple(tools or ()), image=image)


def _print_promotions(promotions: Sequence[Promotion], into: Path, *, as_json: bool) -> None:
    written = sum(promotion.path is not None for promotion in promotions)
    old = len(promotions) - written
    if as_json:
        print(json.dumps([asdict(promotion) | {"path": promotion.path and str(promotion.path)} for promotion in promotions]))
    else:
        print("\n".join(promotion.summary for promotion in promotions))
        say(
            f"{plural(written, 'new case')} in {into}; {old} already exist{'s' if old == 1 else ''}. "
            f"To exclude them from training: tasks.withhold='[\"{into}\"]'"
        )


def _none_chosen(run: Path, selected: Sequence[TraceRow]) -> UserError:
    """Returns the error that explains why none of the selected traces can become a case."""
    if not selected:
        return UserError(f"{run} has no trace that matches these filters", fix=f"agentrl failures list {run} shows all traces")
    faults = sum(row.why == "fault" for row in selected)
    reasons = {"ended in a fault, not a failure of the policy": faults, "have no task": len(selected) - faults}
    text = ", ".join(f"{times} {why}" for why, times in reasons.items() if times)
    return UserError(
        f"none of {plural(len(selected), 'trace')} that these filters select can become a case: {text}",
        fix="select different traces; imported traces need --verifier, and --truths FILE or --truth-from KEY",
    )


def minimize(
    suite: Annotated[Path, typer.Argument(help="Folder of the suite.")],
    case: Annotated[str, typer.Argument(help="Id of a case in the suite. The smaller case replaces it.")],
    recipe: Annotated[
        Path, typer.Argument(help="Recipe file with the task family. The family's gold solution must solve the smaller tasks.")
    ],
    policy: Annotated[str, typer.Option(help="Policy that fails the case: a model folder or id, RUN@VERSION, or module:attr.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides of the evaluation, such as evaluation.sampling.temperature=0.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, max=100, help="Attempts per smaller task.")] = 6,
    budget: Annotated[int, typer.Option(min=12, max=100_000, help="Maximum total number of attempts.")] = 240,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs. Default: the first free one of runs/SUITE-eval, runs/SUITE-eval-2, ...")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove messages, files and lines from a case while the policy still fails it and the gold solution still solves it."""
    from agentrl.check.minimize import minimize_case
    from agentrl.evaluation.open_policy import prepare_evaluation
    from agentrl.evaluation.policies import find_policy
    from agentrl.failure.case import load_case, save_case
    from agentrl.task import open_family

    root, loaded = load_recipe(recipe, [])
    opened, selected = load_case(suite, case)
    family = open_family(loaded.tasks, seed=loaded.seed, root=root)
    with prepare_evaluation(
        find_policy(policy), [replace(opened, cases=(selected,))], overrides=overrides or [], run_dir=run_dir
    ) as prepared:
        smaller, summary = asyncio.run(minimize_case(prepared, selected, family, repeats=repeats, budget=budget))
    path = save_case(suite, smaller)
    print(json.dumps({"case": smaller.id, "path": str(path), "summary": summary}) if as_json else f"{path}: {summary}")


_REFUSED_SHOWN = 12
_LINE = 1000  # characters


def practice(
    suite: Annotated[Path, typer.Argument(help="Folder of a suite. The command replaces its practice.jsonl.")],
    recipe: Annotated[Path, typer.Argument(help="Recipe file whose task family generates the tasks.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides of the recipe.")] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of tasks per case.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated tasks.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Number of parallel sandboxes.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Generate training tasks from the cases of a suite and keep those that pass the checks of `agentrl check`.

    Tasks that are equal or nearly equal to a case in this suite, or in any suite that the recipe withholds, are excluded. To train on the
    generated tasks, set tasks.practice.
    """
    root, loaded = load_recipe(recipe, overrides or [])
    cases = load_suite(suite)
    report = asyncio.run(_generate(suite, cases, loaded, root, count=count, seed=seed, parallel=parallel, quiet=as_json))
    path = None
    if report.tasks:
        about = {"suite": cases.name, "family": loaded.tasks.family.ref, "recipe": loaded.name, "seed": seed, "count": count}
        path = save_practice(suite, report.tasks, about)
    by_case = {case: dict(how) for case, how in report.by_case().items()}
    if as_json:
        print(json.dumps({"file": path and str(path), "tasks": len(report.tasks), "cases": by_case, "refused": report.rejected}))
    else:
        print(render_report(report, path))
    raise typer.Exit(0 if by_case.keys() == {case.id for case in cases.cases} else 1)


async def _generate(
    suite: Path, cases: Suite, recipe: Recipe, root: Path, *, count: int, seed: int, parallel: int, quiet: bool
) -> PracticeReport:
    from agentrl.check.practice import check_count, generate_practice
    from agentrl.sandbox import open_sandboxes
    from agentrl.session.judge_servers import standalone_judge_servers
    from agentrl.session.run_practice import held_out_cases
    from agentrl.task import open_family

    check_count(count, cases)
    family = open_family(recipe.tasks, seed=recipe.seed, root=root)
    gate = [recipe.gate.suite] if recipe.gate is not None else []
    suites = dict.fromkeys(
        path.resolve() for path in (suite, *(root / folder for folder in (*recipe.tasks.withhold, *gate, *recipe.tasks.practice)))
    )
    measured_with = WithheldTasks([*load_withheld([str(path) for path in suites], root=root).cases, *held_out_cases(recipe, family)])
    sandboxes = await open_sandboxes(recipe.sandbox, warm=0, run_label="practice", root=root)
    async with close_after(sandboxes.close), standalone_judge_servers(recipe, root=root):
        return await generate_practice(
            cases, family, sandboxes, withheld=measured_with, count=count, seed=seed, root=root, parallel=parallel, quiet=quiet
        )


def render_report(report: PracticeReport, path: Path | None) -> str:
    """Returns the number of generated tasks by case, and the first 12 rejected tasks with reasons, as text."""
    lines = [f"{case}: {', '.join(f'{number} {how}' for how, number in how_many.items())}" for case, how_many in report.by_case().items()]
    lines += [f"rejected, {case}: {why}" for case, why in report.rejected[:_REFUSED_SHOWN]]
    if len(report.rejected) > _REFUSED_SHOWN:
        lines.append(f"and {plural(len(report.rejected) - _REFUSED_SHOWN, 'more rejected task')}: see --json")
    where = "no task passed the checks; no file was written" if path is None else f"{plural(len(report.tasks), 'task')} in {path}"
    return "\n".join(printable(line, _LINE) for line in (*lines, where))
