"""`agentrl failures promote` and `agentrl failures minimize`: regression cases from traces."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import JsonFlag
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.failure.collection import TraceRow
    from agentrl.failure.promote import Promotion, UserParts
    from agentrl.records import EpisodeState

from agentrl.cli.traces import OfKind, OfPhase, OfTag, OfVersion, RunFolder, check_ids, open_collection, trace_filter, user_name


def promote_failures(
    run: RunFolder,
    into: Annotated[Path, typer.Option("--into", help="Folder of the suite, created if needed.")],
    traces: Annotated[list[str] | None, typer.Argument(help="Ids of traces. Default: those that match the filters.")] = None,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    version: OfVersion = None,
    most: Annotated[int | None, typer.Option(min=1, help="Largest number of traces that match the filters; the newest are used.")] = None,
    note: Annotated[str, typer.Option(help="Comment stored in the cases.")] = "",
    threshold: Annotated[float | None, typer.Option(help="Mean score that the attempts at a case must reach. Default: 1.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Attempts per case. Default: as set in the suite.")] = None,
    from_turn: Annotated[
        str, typer.Option("--from-turn", help="Start the cases at this turn, counted from 1, or at the `failing` turn of the tag.")
    ] = "",
    verifier: Annotated[list[str] | None, typer.Option("--verifier", help="For imported traces: verifier, module:attr.")] = None,
    truths: Annotated[Path | None, typer.Option(help='For imported traces: JSON lines file of {"trace": "ID", "truth": "412"}.')] = None,
    truth_from: Annotated[str, typer.Option(help="For imported traces: key of the right answer in the origin of each trace.")] = "",
    tools: Annotated[
        list[str] | None, typer.Option("--tools", help="For imported traces: tool that replaces the recorded results, module:attr.")
    ] = None,
    image: Annotated[str, typer.Option(help="For imported traces: sandbox image, for tools and verifiers that use a sandbox.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Turn traces into regression cases. A case contains the task and its origin. Tasks that are already in the suite are skipped.

    An imported trace needs --verifier and a truth. Its prompt is the message of the user, and its tools return the recorded results.

    With --from-turn the episode is replayed in a live sandbox up to that turn, and the case starts there.
    """
    from agentrl.failure.promote import describe_excluded_messages, promote

    if not traces and not (tag or kind or phase or version is not None or most):
        raise UserError("no traces are selected", fix="give ids, or filters such as --tag misread_output --most 20")
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
    done = promote(chosen_traces, into, note=note, by=user_name(), threshold=threshold, repeats=repeats, starts=starts, supplied=supplied)
    for trace in chosen_traces:
        if trace.task is None and (lost := describe_excluded_messages(trace)):
            print(f"{trace.id}: {lost}", file=sys.stderr)
    _print_promotions(done, into, as_json=as_json)


def _user_parts(verifier: list[str] | None, truths: Path | None, truth_from: str, tools: list[str] | None, image: str) -> UserParts | None:
    """The parts that turn imported traces into cases; None if no option gives one."""
    from agentrl.failure.promote import UserParts, read_truths

    if not (verifier or truths or truth_from or tools or image):
        return None
    known = read_truths(truths) if truths is not None else {}
    return UserParts(verifiers=tuple(verifier or ()), truths=known, truth_from=truth_from, tools=tuple(tools or ()), image=image)


def _print_promotions(done: Sequence[Promotion], into: Path, *, as_json: bool) -> None:
    written = sum(one.path is not None for one in done)
    if as_json:
        print(
            json.dumps(
                [{"trace": one.trace, "case": one.case, "likeness": one.likeness, "path": one.path and str(one.path)} for one in done]
            )
        )
    else:
        print("\n".join(one.summary for one in done))
        print(f"{written} new cases in {into}; {len(done) - written} exist already. Do not train on them: tasks.withhold='[\"{into}\"]'")


def _none_chosen(run: Path, selected: Sequence[TraceRow]) -> UserError:
    """The error that explains why none of the selected traces can become a case."""
    if not selected:
        return UserError(f"{run} has no trace that matches these filters", fix=f"agentrl failures list {run} shows all traces")
    faults = sum(row.why == "fault" for row in selected)
    reasons = {"ended in a fault, not a failure of the policy": faults, "have no task": len(selected) - faults}
    text = ", ".join(f"{times} {why}" for why, times in reasons.items() if times)
    return UserError(
        f"none of the {len(selected)} traces that match these filters can become a case: {text}",
        fix="select other traces; imported traces need --verifier, and --truths FILE or --truth-from KEY",
    )


def minimize(
    suite: Annotated[Path, typer.Argument(help="Folder of the suite.")],
    case: Annotated[str, typer.Argument(help="Id of a case in it. The smaller case replaces it.")],
    recipe: Annotated[Path, typer.Argument(help="Recipe file with the task family, whose gold solution checks the smaller tasks.")],
    policy: Annotated[str, typer.Option(help="Policy that fails the case: a model folder, RUN@VERSION, or module:attr.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides of the evaluation, such as evaluation.sampling.temperature=0.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, max=100, help="Attempts per smaller task.")] = 6,
    budget: Annotated[int, typer.Option(min=12, max=100_000, help="Largest total number of attempts.")] = 240,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for logs. Default: runs/SUITE-eval, runs/SUITE-eval-2, ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove messages, files and lines from a case while the policy still fails it and the gold solution still solves it."""
    from agentrl.check.minimize import minimize_case
    from agentrl.cli.recipes import load_recipe
    from agentrl.evaluation.open_policy import prepare_evaluation
    from agentrl.evaluation.policies import find_policy
    from agentrl.failure.case import load_case, save_case
    from agentrl.task import open_family

    root, loaded = load_recipe(recipe, [])
    opened, selected = load_case(suite, case)
    family = open_family(loaded.tasks, seed=loaded.seed, root=root)
    with prepare_evaluation(find_policy(policy), [replace(opened, cases=(selected,))], overrides=overrides or [], run_dir=run_dir) as given:
        smaller, summary = asyncio.run(minimize_case(given, selected, family, repeats=repeats, budget=budget))
    path = save_case(suite, smaller)
    print(json.dumps({"case": smaller.id, "path": str(path), "summary": summary}) if as_json else f"{path}: {summary}")
