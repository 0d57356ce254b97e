"""`agentrl failures`: the failures of a run, listed, read, named, clustered, and made regression cases."""

from __future__ import annotations

import asyncio
import getpass
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentrl.cli.options import JsonFlag
from agentrl.errors import UserError
from agentrl.plugins.references import add_project_root

if TYPE_CHECKING:
    from agentrl.failure.collection import Collection
    from agentrl.failure.listing import TraceFilter, TraceRow
    from agentrl.failure.trace import Trace
    from agentrl.failure.triage import TriageRule
    from agentrl.records import EpisodeState

failures_app = typer.Typer(no_args_is_help=True, add_completion=False)

RunFolder = Annotated[Path, typer.Argument(help="Run folder, or any that holds captured failures.")]
OfTag = Annotated[str, typer.Option("--tag", help="Only those with this tag.")]
OfKind = Annotated[str, typer.Option("--kind", help="Only those of this kind of task.")]
OfPhase = Annotated[str, typer.Option("--phase", help="Only those of this phase: train, before, step8, after, ...")]
OfVersion = Annotated[int | None, typer.Option("--version", help="Only those whose newest tokens this policy version sampled.")]
OfWhy = Annotated[str, typer.Option("--why", help="Only those kept for this: failed, hacked, timeout, limit, regressed, fault, imported.")]
Rules = Annotated[list[str] | None, typer.Option("--rules", help="Rules of yours, module:attr or ./file.py:attr, asked first.")]
_TELL_EVERY = 500  # traces between two words of progress
_BATCH = 100  # traces that are in memory at once
_LEAST_QUESTION = 12  # characters of a question that say anything
_TOLD = 20  # of what could not be read
T = TypeVar("T")


@failures_app.command("list", epilog="Example: agentrl failures list runs/quickstart --tag misread_output --phase after")
def list_failures(
    run: RunFolder,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    version: OfVersion = None,
    why: OfWhy = "",
    most: Annotated[int, typer.Option(min=0, help="Traces listed, the newest; counts are of all.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Count the failures of a run by tag, kind, version and phase, and list the newest of those that are kept."""
    from agentrl.failure.digest import build_digest
    from agentrl.failure.render import one_line

    with _opened(run) as collection:
        wanted = _wanted(tag=tag, kind=kind, phase=phase, version=version, why=why)
        matching, rows = collection.count_matching(wanted), collection.rows(wanted, most=most, newest=True)[::-1]
        digest = {key: value for key, value in build_digest(collection).items() if key != "examples"}
        kinds: Counter[str] = Counter()
        for (name, found), times in collection.counts("kind", "tag").items():
            kinds[name] += times if found else 0
    if as_json:
        print(json.dumps({**digest, "kinds": dict(kinds), "matching": matching, "traces": [asdict(row) for row in rows]}))
        return
    print(
        f"{digest['failures']} failures in {digest['episodes']} episodes; {digest['kept']} traces are kept, {digest['dropped']} made room"
    )
    tables = (
        ("tag", digest["tags"]),
        ("kept for", digest["why"]),
        ("kind", dict(kinds.most_common())),
        ("phase", {one["phase"]: sum(one["tags"].values()) for one in digest["phases"]}),
        ("version, in training", {str(one["version"]): sum(one["tags"].values()) for one in digest["versions"]}),
    )
    for title, counts in tables:
        shown = [f"{one_line(name, 40) or '-'} {times}" for name, times in counts.items() if times]
        if shown:
            print(f"  {title}: {'  '.join(shown[:24])}{'  ...' if len(shown) > 24 else ''}")
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for row in rows:
        score = "-" if row.score is None else f"{row.score:g}"
        told = f"{one_line(row.id, 40):14} {one_line(row.tag, 24):19} {row.why:9} {one_line(row.phase, 12):6} v{row.version:<3} {score:>5}"
        room = wide - len(told) - 2 if wide else 60
        print(f"{told}  {one_line(row.question, room)}" if room >= _LEAST_QUESTION else told)
    if len(rows) < matching:
        print(f"the newest {len(rows)} of {matching} traces; all of them: --most {matching}")


@failures_app.command("show", epilog="Example: agentrl failures show runs/quickstart g000012-3-a0")
def show(
    run: RunFolder, trace: Annotated[str, typer.Argument(help="Id of a trace, as `list` shows it.")], as_json: JsonFlag = False
) -> None:
    """Show a trace whole: what was asked, every turn with calls and outputs, the failing one marked, score and evidence."""
    from agentrl.failure.render import render_trace
    from agentrl.records import codec

    with _opened(run) as collection:
        found = collection.get(trace)
    if found is None:
        raise UserError(f"{run} has no trace {trace!r}", fix=f"agentrl failures list {run} shows them")
    print(json.dumps(json.loads(codec.to_json(found))) if as_json else render_trace(found))


@failures_app.command("tag", epilog="Example: agentrl failures tag runs/quickstart g000012-3-a0 --as misread_output --turn 2")
def tag_failures(
    run: RunFolder,
    traces: Annotated[list[str] | None, typer.Argument(help="Ids of traces. None: all that the filters leave.")] = None,
    name: Annotated[str, typer.Option("--as", help="A tag that you give. Without it the rules are asked again.")] = "",
    turn: Annotated[int | None, typer.Option(min=1, help="The turn where it shows first, counted from 1, with --as.")] = None,
    trajectory: Annotated[int, typer.Option(min=0, help="The trajectory of that turn.")] = 0,
    note: Annotated[str, typer.Option(help="What you saw, with --as.")] = "",
    rules: Rules = None,
    judge: Annotated[str, typer.Option("--judge", help="A judge that is asked where no rule is sure: a FailureJudge, module:attr.")] = "",
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    as_json: JsonFlag = False,
) -> None:
    """Name failures: by rules, yours and the shipped, then by a judge, or by hand. What a person says stays, and counts before all else."""
    from agentrl.failure.digest import write_digest
    from agentrl.failure.trace import Tag
    from agentrl.failure.triage import check_tag_name

    if name and (rules or judge):
        raise UserError("--as gives a tag by hand, --rules and --judge ask others", fix="leave one of them out")
    if not name and (turn is not None or trajectory or note):
        raise UserError("--turn, --trajectory and --note belong to a tag that you give", fix="add --as NAME")
    by_hand = None
    if name:
        if not traces:
            raise UserError("--as names single traces", fix="give their ids")
        try:
            by_hand = Tag(
                name=check_tag_name(name), by=f"person:{_me()}", trajectory=trajectory, turn=None if turn is None else turn - 1, note=note
            )
        except ValueError as error:
            raise UserError(str(error), fix="write it as wrong_unit") from None
    wanted = _wanted(tag=tag, kind=kind, phase=phase, ids=traces)
    try:
        with _opened(run) as collection:
            if by_hand is not None:
                changed = {}
                for row, trace in _each(collection, wanted, "tagged"):
                    collection.tag(row.id, (*trace.tags, by_hand))
                    changed[row.id] = by_hand.name
            else:
                changed = asyncio.run(_named(collection, wanted, _rules(rules), judge))
    finally:  # what was named before an interrupt, or a judge that gave up, is named
        write_digest(run)
    if as_json:
        print(json.dumps(changed))
        return
    counts = {one: list(changed.values()).count(one) for one in dict.fromkeys(changed.values())}
    print("\n".join(f"{times:6}  {one}" for one, times in sorted(counts.items(), key=lambda item: -item[1])) or "no trace to tag")


async def _named(collection: Collection, wanted: TraceFilter, rules: Sequence[TriageRule], reference: str) -> dict[str, str]:
    """Asks rules, and the judge where none is sure, about every trace that is wanted: id -> what they name it."""
    from agentrl.failure.triage import UNCLASSIFIED, merge_tags, tag_by_judge, tag_by_rules
    from agentrl.judge.failure_judge import load_failure_judge

    judge = load_failure_judge(reference) if reference else None
    if judge is not None:
        judge.prepare(collection.folder)
    before, unsure, changed = judge.spent() if judge is not None else None, 0, dict[str, str]()
    try:
        for some in _batches(_each(collection, wanted, "tagged")):
            if judge is None:
                said = [tag_by_rules(trace, rules) for _, trace in some]
            else:
                said = await asyncio.gather(*(tag_by_judge(trace, rules, judge, timeout_s=judge.timeout_s) for _, trace in some))
            for (row, _), tags in zip(some, said, strict=True):
                unsure += tags[0].name == UNCLASSIFIED or tags[0].by != "rules"
                now = collection.get(row.id)
                if now is None:  # it made room meanwhile
                    continue
                every = merge_tags(tags, now.tags)  # which a person may have added to while the judge was asked
                collection.tag(row.id, every)
                changed[row.id] = every[0].name
        if judge is not None and before is not None:
            more = judge.spent().minus(before)
            money = f", money {more.money:g}" if more.money else ""
            beyond, tokens = unsure - more.calls - more.cached, more.prompt_tokens + more.completion_tokens
            asked = f"{more.calls} questions to the judge, {more.cached} answered before, {beyond} beyond its budget"
            lost = f"{more.abstained} abstentions, {more.unreadable} verdicts that cannot be read, {more.failed} without an answer"
            print(f"no rule was sure of {unsure}: {asked}; {lost} ({tokens:,} tokens{money})", file=sys.stderr)
    finally:
        if judge is not None:
            await judge.close()
    return changed


@failures_app.command("cluster", epilog="Example: agentrl failures cluster runs/quickstart --phase train --most 10")
def cluster(
    run: RunFolder,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    most: Annotated[int, typer.Option(min=1, help="Clusters shown, the largest.")] = 12,
    alike: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Least likeness within a cluster.")] = None,
    embed: Annotated[bool, typer.Option("--embed", help="Compare by a small language model: needs the extra [clusters].")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put failures that are alike together, by tags, tools and errors (or by embeddings), the largest clusters first."""
    from agentrl.failure.clusters import MIN_EMBEDDING_SIMILARITY, MIN_SIMILARITY, cluster_traces, trace_features
    from agentrl.failure.features import describe_trace
    from agentrl.failure.render import one_line

    embedding = None
    if embed:
        from agentrl.failure.embedding import load_minilm

        embedding = load_minilm()
    with _opened(run) as collection:
        some = [
            trace_features(trace, describe_trace(trace) if embed else "")
            for _, trace in _each(collection, _wanted(tag=tag, kind=kind, phase=phase), "read")
        ]
    least = alike if alike is not None else MIN_EMBEDDING_SIMILARITY if embed else MIN_SIMILARITY
    found = cluster_traces(some, alike=least, embed=embedding)
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found[:most]:
        tags = "  ".join(f"{one_line(name, 40) or '-'} {times}" for name, times in one.tags[:4])
        print(f"{len(one.ids):6}  {tags}")
        print(f"        {one_line('; '.join(one.about), 130)}")
        print(f"        {'  '.join(one_line(each, 40) for each in one.ids[:4])}")
    if len(found) > most:
        print(f"and {len(found) - most} smaller clusters, of {sum(len(one.ids) for one in found[most:])} traces")
    if not found:
        print("no trace to cluster")


@failures_app.command("promote", epilog="Example: agentrl failures promote runs/quickstart --tag looped --most 20 --into evals/loops")
def promote_failures(
    run: RunFolder,
    into: Annotated[Path, typer.Option("--into", help="Folder of the suite; made where there is none.")],
    traces: Annotated[list[str] | None, typer.Argument(help="Ids of traces. None: those that the filters leave.")] = None,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    version: OfVersion = None,
    most: Annotated[int | None, typer.Option(min=1, help="At most so many of those that the filters leave, the newest.")] = None,
    note: Annotated[str, typer.Option(help="Why these are worth keeping.")] = "",
    threshold: Annotated[float | None, typer.Option(help="Mean score that the attempts at each must reach. Default: the best, 1.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Attempts at each. Default: what the suite says.")] = None,
    from_turn: Annotated[
        str, typer.Option("--from-turn", help="Begin at this turn, counted from 1, or at the `failing` one that the tag names.")
    ] = "",
    verifier: Annotated[
        list[str] | None, typer.Option("--verifier", help="For imported traces: verifier of an answer, module:attr.")
    ] = None,
    truths: Annotated[Path | None, typer.Option(help='For imported traces: file of lines {"trace": "ID", "truth": "412"}.')] = None,
    truth_from: Annotated[str, typer.Option(help="For imported traces: key of their origin that holds the right answer.")] = "",
    tools: Annotated[
        list[str] | None, typer.Option("--tools", help="For imported traces: stub in place of the recorded results, module:attr.")
    ] = None,
    image: Annotated[str, typer.Option(help="For imported traces: sandbox image, for stubs and verifiers that use a sandbox.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Make regression cases of traces: their tasks, frozen, with where they come from. A task that the suite has is not added again.

    An imported trace becomes a case with --verifier and a truth: its prompt is what the user asked, and its tools return recorded results.

    With --from-turn the episode is played again in a live sandbox up to that turn, and captured there: the case samples from there on.
    """
    from agentrl.failure.imported import UserParts, describe_excluded_messages, read_truths
    from agentrl.failure.promote import promote

    if not traces and not (tag or kind or phase or version is not None or most):
        raise UserError("which traces?", fix="give their ids, or filters such as --tag misread_output --most 20")
    supplied = None
    if verifier or truths or truth_from or tools or image:
        known = read_truths(truths) if truths is not None else {}
        supplied = UserParts(verifiers=tuple(verifier or ()), truths=known, truth_from=truth_from, tools=tuple(tools or ()), image=image)
    with _opened(run) as collection:
        wanted = _wanted(tag=tag, kind=kind, phase=phase, version=version, ids=traces)
        chosen = selected = collection.rows(wanted, most=-1 if most is None else most, newest=True)
        if not traces:  # of a selection, what cannot be a case is left out; of named traces it is an error
            chosen = [row for row in selected if row.why != "fault" and (row.task_key or supplied is not None)]
        _check_all_there(run, wanted.ids, chosen)
        found = [trace for row in chosen[::-1] if (trace := collection.get(row.id)) is not None]
    if not found:
        raise _none_chosen(run, selected)
    starts: dict[str, EpisodeState | None] = {}
    if from_turn:
        from agentrl.evaluation.replay import replay_starts

        starts = asyncio.run(replay_starts(run, found, from_turn))
    done = promote(found, into, note=note, by=_me(), threshold=threshold, repeats=repeats, starts=starts, supplied=supplied)
    for trace in found:
        if trace.task is None and (lost := describe_excluded_messages(trace)):
            print(f"{trace.id}: {lost}", file=sys.stderr)
    written = sum(one.path is not None for one in done)
    if as_json:
        print(
            json.dumps(
                [{"trace": one.trace, "case": one.case, "likeness": one.likeness, "path": one.path and str(one.path)} for one in done]
            )
        )
    else:
        print("\n".join(one.summary for one in done))
        print(f"{written} new cases in {into}; {len(done) - written} were there. Never train on them: tasks.withhold='[\"{into}\"]'")


def _none_chosen(run: Path, selected: Sequence[TraceRow]) -> UserError:
    """The error that explains why none of the selected traces can become a case."""
    if not selected:
        return UserError(f"{run} has no trace that matches these filters", fix=f"agentrl failures list {run} shows all traces")
    faults = sum(row.why == "fault" for row in selected)
    reasons = {"ended in a fault, which says nothing about the policy": faults, "hold no task to try again": len(selected) - faults}
    told = ", ".join(f"{times} {why}" for why, times in reasons.items() if times)
    return UserError(
        f"none of the {len(selected)} traces that match these filters can become a case: {told}",
        fix="select other traces; imported traces need --verifier, and --truths FILE or --truth-from KEY",
    )


@failures_app.command(
    "minimize", epilog="Example: agentrl failures minimize evals/reading sum-0f3a9c81b2d4 recipes/quickstart.py --policy runs/quickstart@12"
)
def minimize(
    suite: Annotated[Path, typer.Argument(help="Folder of the suite.")],
    case: Annotated[str, typer.Argument(help="Id of a case in it, which is replaced by the smaller one.")],
    recipe: Annotated[Path, typer.Argument(help="Recipe file whose task family has the gold solution that proves smaller tasks.")],
    policy: Annotated[str, typer.Option(help="Who fails it: a model folder, RUN@VERSION, or module:attr.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides of the evaluation, such as evaluation.temperature=0.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, max=100, help="Attempts at each smaller task.")] = 6,
    budget: Annotated[int, typer.Option(min=12, max=100_000, help="Attempts in all.")] = 240,
    run_dir: Annotated[Path | None, typer.Option(help="Where logs go. Default: runs/SUITE-eval, -eval-2, ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a case smaller while the policy still fails it: fewer messages, files and lines, each proven to be solvable."""
    from agentrl.check.minimize import minimize_case
    from agentrl.cli.recipes import load_recipe
    from agentrl.evaluation.policies import find_policy
    from agentrl.evaluation.regressions import prepare_evaluation
    from agentrl.failure.case import load_case, save_case
    from agentrl.task import open_family

    root, loaded = load_recipe(recipe, [])
    opened, found = load_case(suite, case)
    family = open_family(loaded.tasks, seed=loaded.seed, root=root)
    with prepare_evaluation(find_policy(policy), [replace(opened, cases=(found,))], overrides=overrides or [], run_dir=run_dir) as given:
        made, told = asyncio.run(minimize_case(given, found, family, repeats=repeats, budget=budget))
    path = save_case(suite, made)
    print(json.dumps({"case": made.id, "path": str(path), "told": told}) if as_json else f"{path}: {told}")


@failures_app.command("import", epilog="Example: agentrl failures import runs/support spans.jsonl --format otel")
def import_failures(
    run: Annotated[Path, typer.Argument(help="Folder that takes the traces: a run's, or any; made where there is none.")],
    path: Annotated[Path, typer.Argument(help="File of traces, or a folder of them.")],
    form: Annotated[str | None, typer.Option("--format", help="openai, otel or atif. Default: known by the content.")] = None,
    rules: Rules = None,
    as_json: JsonFlag = False,
) -> None:
    """Take in traces of other people's agents, named by rules. What cannot be read is told, and the rest is taken."""
    from agentrl.failure.collection import Collection
    from agentrl.failure.digest import write_digest
    from agentrl.failure.formats import UnreadableDocument, read
    from agentrl.failure.render import one_line
    from agentrl.failure.triage import tag_by_rules

    asked, told, kept, seen = _rules(rules), 0, 0, 0
    for some in _batches(read(path, form)):
        traces = [one for one in some if not isinstance(one, UnreadableDocument)]
        for one in some:
            if isinstance(one, UnreadableDocument):
                told += 1
                if told <= _TOLD:
                    print(f"left out: {one_line(str(one))}", file=sys.stderr)
        seen += len(traces)
        if traces:
            with Collection(run, make=True) as collection:
                kept += collection.add(
                    replace(one, phase=one.phase or "imported", tags=one.tags or tag_by_rules(one, asked)) for one in traces
                )
    if told > _TOLD:
        print(f"left out: {told - _TOLD} more", file=sys.stderr)
    if seen:
        write_digest(run)
    lost = told + seen - kept
    print(json.dumps({"kept": kept, "left_out": lost}) if as_json else f"{kept} traces are in {run}, {lost} were left out")
    raise typer.Exit(0 if kept else 1)


@failures_app.command("export", epilog="Example: agentrl failures export runs/quickstart loops.jsonl --tag looped --format atif")
def export_failures(
    run: RunFolder,
    path: Annotated[Path, typer.Argument(help="A .jsonl file gets a document a line, any other name a folder with a file each.")],
    traces: Annotated[list[str] | None, typer.Argument(help="Ids of traces. None: all that the filters leave.")] = None,
    form: Annotated[str, typer.Option("--format", help="atif or openai.")] = "atif",
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    as_json: JsonFlag = False,
) -> None:
    """Write traces in a format that other people's programs read."""
    from agentrl.failure.formats import write

    with _opened(run) as collection:
        some = _each(collection, _wanted(tag=tag, kind=kind, phase=phase, ids=traces), "written")
        number = write((trace for _, trace in some), path, form)
    print(json.dumps({"documents": number}) if as_json else f"{number} documents in {path}")
    raise typer.Exit(0 if number else 1)


def _batches(found: Iterator[T]) -> Iterator[list[T]]:
    while some := list(islice(found, _BATCH)):
        yield some


@contextmanager
def _opened(run: Path) -> Iterator[Collection]:
    from agentrl.failure.collection import Collection

    if not run.is_dir():
        raise UserError(f"no folder {run}", fix="give the folder of a run, such as runs/quickstart")
    with Collection(run) as collection:
        yield collection


def _wanted(*, ids: Sequence[str] | None = None, **asked: Any) -> TraceFilter:
    from agentrl.failure.listing import TraceFilter

    return TraceFilter(ids=tuple(ids or ()), **asked)


def _each(collection: Collection, wanted: TraceFilter, doing: str) -> Iterator[tuple[TraceRow, Trace]]:
    """Each trace in turn, with progress where there are many. One that is damaged is told and left out."""
    from agentrl.errors import StoreError

    rows = collection.rows(wanted)
    _check_all_there(collection.folder, wanted.ids, rows)
    for number, row in enumerate(rows, 1):
        try:
            trace = collection.get(row.id)
        except StoreError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        if trace is not None:
            yield row, trace
        if number % _TELL_EVERY == 0:
            print(f"{doing} {number} of {len(rows)}", file=sys.stderr)


def _check_all_there(run: Path, ids: Sequence[str], rows: Sequence[TraceRow]) -> None:
    if missing := sorted(set(ids) - {row.id for row in rows}):
        raise UserError(f"{run} has no trace {', '.join(missing[:8])}", fix=f"agentrl failures list {run} shows them")


def _rules(references: Sequence[str] | None) -> tuple[TriageRule, ...]:
    from agentrl.failure.triage import load_rules

    add_project_root(Path.cwd())
    return load_rules(tuple(references or ()))


def _me() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return "unknown"
