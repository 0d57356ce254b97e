"""`agentrl failures`: lists, shows, tags, clusters, promotes, minimizes, imports and exports captured failures."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.numbers import plural
from agentrl.cli import command_group
from agentrl.cli.cases import minimize, promote_failures
from agentrl.cli.running import JsonFlag, say, user_name
from agentrl.cli.traces import (
    OfKind,
    OfPhase,
    OfTag,
    OfVersion,
    OfWhy,
    Rules,
    RunFolder,
    batches,
    each_trace,
    open_collection,
    trace_filter,
    user_rules,
)
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.failure.collection import Collection, TraceFilter
    from agentrl.failure.triage import TriageRule

failures_app = command_group()

_MIN_QUESTION = 12  # characters of a question worth showing
_SHOWN = 20  # unreadable documents
_REASON_CHARS = 1500  # of one unreadable document


@failures_app.command("list", epilog="Example: agentrl failures list runs/quickstart --tag misread_output --phase after")
def list_failures(
    run: RunFolder,
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    version: OfVersion = None,
    why: OfWhy = "",
    most: Annotated[int, typer.Option(min=0, help="Number of newest traces to list. The counts cover all failures of the run.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Count the failures of a run by tag, kind, version and phase, and list the newest traces."""
    from agentrl.failure.digest import build_digest
    from agentrl.failure.timeline import one_line

    with open_collection(run) as collection:
        wanted = trace_filter(tag=tag, kind=kind, phase=phase, version=version, why=why)
        matching, rows = collection.count_matching(wanted), collection.rows(wanted, most=most, newest=True)[::-1]
        digest = {key: value for key, value in build_digest(collection).items() if key != "examples"}
        kinds: Counter[str] = Counter()
        for (name, tag_name), times in collection.counts("kind", "tag").items():
            kinds[name] += times if tag_name else 0
    if as_json:
        print(json.dumps({**digest, "kinds": dict(kinds), "matching": matching, "traces": [asdict(row) for row in rows]}))
        return
    failures = plural(digest["failures"], "failure")
    print(f"{failures} in {plural(digest['episodes'], 'episode')}; {plural(digest['kept'], 'trace')} stored, {digest['dropped']} dropped")
    tables = (
        ("tag", digest["tags"]),
        ("reason", digest["why"]),
        ("kind", dict(kinds.most_common())),
        ("phase", {phase["phase"]: sum(phase["tags"].values()) for phase in digest["phases"]}),
        ("version, in training", {str(version["version"]): sum(version["tags"].values()) for version in digest["versions"]}),
    )
    for title, counts in tables:
        shown = [f"{one_line(name, 40) or '-'} {times}" for name, times in counts.items() if times]
        if shown:
            print(f"  {title}: {'  '.join(shown[:24])}{'  ...' if len(shown) > 24 else ''}")
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for row in rows:
        score = "-" if row.score is None else f"{row.score:g}"
        columns = (
            f"{one_line(row.id, 40):14} {one_line(row.tag, 24):19} {row.why:9} {one_line(row.phase, 12):6} v{row.version:<3} {score:>5}"
        )
        room = wide - len(columns) - 2 if wide else 60
        print(f"{columns}  {one_line(row.question, room)}" if room >= _MIN_QUESTION else columns)
    if not matching and wanted != trace_filter():
        print(f"no trace matches the filters; the counts above cover {failures}")
    if len(rows) < matching:
        print(f"showing the newest {len(rows)} of {plural(matching, 'trace')}; to list all: --most {matching}")


@failures_app.command("show", epilog="Example: agentrl failures show runs/quickstart g000012-3-a0")
def show(
    run: RunFolder,
    trace: Annotated[str, typer.Argument(help="Id of a trace, as printed by `agentrl failures list`.")],
    as_json: JsonFlag = False,
) -> None:
    """Show one trace: the prompt, every turn with its calls and outputs, the failing turn, the score and its evidence."""
    from agentrl.failure.timeline import render_trace
    from agentrl.records import codec

    with open_collection(run) as collection:
        stored = collection.get(trace)
    if stored is None:
        raise UserError(f"{run} has no trace {trace!r}", fix=f"list the traces: agentrl failures list {run}")
    print(json.dumps(json.loads(codec.to_json(stored))) if as_json else render_trace(stored))


@failures_app.command("tag", epilog="Example: agentrl failures tag runs/quickstart g000012-3-a0 --as misread_output --turn 2")
def tag_failures(
    run: RunFolder,
    traces: Annotated[list[str] | None, typer.Argument(help="Trace ids. Default: all traces that match the filters.")] = None,
    name: Annotated[str, typer.Option("--as", help="Tag to set by hand. If omitted, the rules are applied again.")] = "",
    turn: Annotated[int | None, typer.Option(min=1, help="With --as: the turn where the failure starts, counted from 1.")] = None,
    trajectory: Annotated[int, typer.Option(min=0, help="With --as: the trajectory of that turn.")] = 0,
    note: Annotated[str, typer.Option(help="With --as: a comment.")] = "",
    rules: Rules = None,
    judge: Annotated[
        str, typer.Option("--judge", help="FailureJudge to call for traces that the rules leave unclassified, module:attr.")
    ] = "",
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    as_json: JsonFlag = False,
) -> None:
    """Tag failures with rules, with a judge or by hand. Tags that are set by hand take precedence and are not removed."""
    from agentrl.failure.digest import write_digest
    from agentrl.failure.triage import manual_tag

    if name and (rules or judge):
        raise UserError("--as sets a tag by hand and cannot be combined with --rules or --judge", fix="omit one of them")
    if not name and (turn is not None or trajectory or note):
        raise UserError("--turn, --trajectory and --note need --as", fix="add --as NAME")
    if name and not traces:
        raise UserError("--as needs trace ids", fix="give the ids of the traces to tag")
    by_hand = manual_tag(name, by=user_name(), turn=turn, trajectory=trajectory, note=note) if name else None
    wanted = trace_filter(tag=tag, kind=kind, phase=phase, ids=traces)
    try:
        with open_collection(run) as collection:
            if by_hand is not None:
                changed = {}
                for row, trace in each_trace(collection, wanted, "tagged"):
                    collection.tag(row.id, (*trace.tags, by_hand))
                    changed[row.id] = by_hand.name
            else:
                changed = asyncio.run(_tag_traces(collection, wanted, user_rules(rules), judge))
    finally:  # tags set before an interrupt or a failing judge are kept
        write_digest(run)
    if as_json:
        print(json.dumps(changed))
        return
    counts = Counter(changed.values()).most_common()
    print("\n".join(f"{times:6}  {tag_name}" for tag_name, times in counts) or "no traces to tag")


async def _tag_traces(collection: Collection, wanted: TraceFilter, rules: Sequence[TriageRule], reference: str) -> dict[str, str]:
    """Tags all selected traces with the rules, and tags the traces that the rules leave unclassified with the judge. Returns trace id ->
    tag."""
    from agentrl.failure.triage import UNCLASSIFIED, merge_tags, tag_by_judge, tag_by_rules
    from agentrl.judge.failure_judge import load_failure_judge

    judge = load_failure_judge(reference) if reference else None
    if judge is not None:
        judge.prepare(collection.folder)
    before, unsure, changed = judge.spent() if judge is not None else None, 0, dict[str, str]()
    try:
        for batch in batches(each_trace(collection, wanted, "tagged")):
            if judge is None:
                tag_lists = [tag_by_rules(trace, rules) for _, trace in batch]
            else:
                tag_lists = await asyncio.gather(*(tag_by_judge(trace, rules, judge, timeout_s=judge.timeout_s) for _, trace in batch))
            for (row, _), tags in zip(batch, tag_lists, strict=True):
                unsure += tags[0].name == UNCLASSIFIED or tags[0].by != "rules"
                now = collection.get(row.id)
                if now is None:  # dropped in the meantime
                    continue
                every = merge_tags(tags, now.tags)  # a user may have added tags while the judge answered
                collection.tag(row.id, every)
                changed[row.id] = every[0].name
        if judge is not None and before is not None:
            more = judge.spent().minus(before)
            money = f", money {more.money:g}" if more.money else ""
            beyond, tokens = unsure - more.calls - more.cached, more.prompt_tokens + more.completion_tokens
            judge_calls = f"{plural(more.calls, 'call')} of the judge, {plural(more.cached, 'cached answer')}, {beyond} beyond its budget"
            losses = ((more.abstained, "abstention"), (more.unreadable, "unreadable verdict"), (more.failed, "failed call"))
            lost = ", ".join(plural(count, what) for count, what in losses)
            print(f"no rule was sure about {plural(unsure, 'trace')}: {judge_calls}; {lost} ({tokens:,} tokens{money})", file=sys.stderr)
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
    most: Annotated[int, typer.Option(min=1, help="Number of largest clusters to show.")] = 12,
    alike: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Minimum similarity within a cluster.")] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Compare the failures by embeddings from a small language model. Needs the extra `clusters`.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Cluster similar failures by tags, tools and errors, or by embeddings. The largest clusters come first."""
    from agentrl.failure.clusters import (
        MIN_EMBEDDING_SIMILARITY,
        MIN_SIMILARITY,
        cluster_traces,
        describe_trace,
        load_minilm,
        trace_features,
    )
    from agentrl.failure.timeline import one_line

    embedding = load_minilm() if embed else None
    with open_collection(run) as collection:
        features = [
            trace_features(trace, describe_trace(trace) if embed else "")
            for _, trace in each_trace(collection, trace_filter(tag=tag, kind=kind, phase=phase), "read")
        ]
    least = alike if alike is not None else MIN_EMBEDDING_SIMILARITY if embed else MIN_SIMILARITY
    clusters = cluster_traces(features, alike=least, embed=embedding)
    if as_json:
        print(json.dumps([asdict(group) for group in clusters]))
        return
    for group in clusters[:most]:
        tags = "  ".join(f"{one_line(name, 40) or '-'} {times}" for name, times in group.tags[:4])
        print(f"{len(group.ids):6}  {tags}")
        print(f"        {one_line('; '.join(group.about), 130)}")
        print(f"        {'  '.join(one_line(trace_id, 40) for trace_id in group.ids[:4])}")
    if len(clusters) > most:
        rest = plural(sum(len(group.ids) for group in clusters[most:]), "trace")
        print(f"and {plural(len(clusters) - most, 'smaller cluster')} with {rest}")
    if not clusters:
        print("no traces to cluster")


@failures_app.command("import", epilog="Example: agentrl failures import runs/support spans.jsonl --format otel")
def import_failures(
    run: Annotated[Path, typer.Argument(help="Folder for the traces: a run folder or any other folder, created if needed.")],
    path: Annotated[Path, typer.Argument(help="File or folder with traces.")],
    form: Annotated[str | None, typer.Option("--format", help="openai, otel or atif. Default: detected from the content.")] = None,
    rules: Rules = None,
    as_json: JsonFlag = False,
) -> None:
    """Import traces from third-party agents and tag them with rules. Unreadable documents are reported and skipped."""
    from agentrl.failure.collection import Collection
    from agentrl.failure.digest import write_digest
    from agentrl.failure.formats import UnreadableDocument, read
    from agentrl.failure.timeline import one_line
    from agentrl.failure.triage import tag_by_rules

    applied, unreadable, stored, seen = user_rules(rules), 0, 0, 0
    for batch in batches(read(path, form)):
        traces = [document for document in batch if not isinstance(document, UnreadableDocument)]
        for document in batch:
            if isinstance(document, UnreadableDocument):
                unreadable += 1
                if unreadable <= _SHOWN:
                    print(f"excluded: {one_line(f'{document.message}; fix: {document.fix}', _REASON_CHARS)}", file=sys.stderr)
        seen += len(traces)
        if traces:
            with Collection(run, make=True) as collection:
                stored += collection.add(
                    replace(trace, phase=trace.phase or "imported", tags=trace.tags or tag_by_rules(trace, applied)) for trace in traces
                )
    if unreadable > _SHOWN:
        print(f"excluded: {unreadable - _SHOWN} more", file=sys.stderr)
    if seen:
        write_digest(run)
    excluded = unreadable + seen - stored
    say(
        json.dumps({"stored": stored, "excluded": excluded})
        if as_json
        else f"{plural(stored, 'trace')} imported into {run}, {excluded} excluded"
    )
    raise typer.Exit(0 if stored else 1)


@failures_app.command("export", epilog="Example: agentrl failures export runs/quickstart loops.jsonl --tag looped --format atif")
def export_failures(
    run: RunFolder,
    path: Annotated[
        Path, typer.Argument(help="A .jsonl file with one document per line; any other name is a folder with one file per trace.")
    ],
    traces: Annotated[list[str] | None, typer.Argument(help="Trace ids. Default: all traces that match the filters.")] = None,
    form: Annotated[str, typer.Option("--format", help="atif or openai.")] = "atif",
    tag: OfTag = "",
    kind: OfKind = "",
    phase: OfPhase = "",
    as_json: JsonFlag = False,
) -> None:
    """Write traces in a third-party format."""
    from agentrl.failure.formats import write

    with open_collection(run) as collection:
        selected = each_trace(collection, trace_filter(tag=tag, kind=kind, phase=phase, ids=traces), "written")
        number = write((trace for _, trace in selected), path, form)
    say(json.dumps({"documents": number}) if as_json else f"{plural(number, 'document')} in {path}")
    raise typer.Exit(0 if number else 1)


failures_app.command("promote", epilog="Example: agentrl failures promote runs/quickstart --tag looped --most 20 --into evals/loops")(
    promote_failures
)
failures_app.command(
    "minimize", epilog="Example: agentrl failures minimize evals/reading sum-0f3a9c81b2d4 recipes/quickstart.py --policy runs/quickstart@12"
)(minimize)
