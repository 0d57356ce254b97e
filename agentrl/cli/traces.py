"""Code that the commands of `agentrl failures` share: options, and reading the traces in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentrl.errors import UserError
from agentrl.plugins.references import add_project_root

if TYPE_CHECKING:
    from agentrl.failure.collection import Collection, TraceFilter, TraceRow
    from agentrl.failure.trace import Trace
    from agentrl.failure.triage import TriageRule


RunFolder = Annotated[Path, typer.Argument(help="Run folder, or any folder with captured failures.")]
OfTag = Annotated[str, typer.Option("--tag", help="Only traces with this tag.")]
OfKind = Annotated[str, typer.Option("--kind", help="Only traces of this kind of task.")]
OfPhase = Annotated[str, typer.Option("--phase", help="Only traces of this phase: train, before, step8, after, ...")]
OfVersion = Annotated[int | None, typer.Option("--version", help="Only traces whose last tokens were sampled by this policy version.")]
OfWhy = Annotated[
    str, typer.Option("--why", help="Only traces captured for this reason: failed, hacked, timeout, limit, regressed, fault, imported.")
]
Rules = Annotated[list[str] | None, typer.Option("--rules", help="User-supplied rules, module:attr or ./file.py:attr, applied first.")]
_REPORT_EVERY = 500  # traces between two progress messages
_BATCH = 100  # traces in memory at a time
T = TypeVar("T")


def batches(traces: Iterator[T]) -> Iterator[list[T]]:
    """Yields the traces in lists of at most `_BATCH`."""
    while some := list(islice(traces, _BATCH)):
        yield some


@contextmanager
def open_collection(run: Path) -> Iterator[Collection]:
    """Opens the captured failures of a folder. Raises `UserError` if there are none, and `StoreError` if their file cannot be read."""
    from agentrl.failure.collection import Collection

    if not run.is_dir():
        raise UserError(f"there is no folder {run}", fix="give the folder of a run, such as runs/quickstart")
    with Collection(run) as collection:
        yield collection


def trace_filter(*, ids: Sequence[str] | None = None, **filters: Any) -> TraceFilter:
    """Returns the trace filter that the options of a command describe."""
    from agentrl.failure.collection import TraceFilter

    return TraceFilter(ids=tuple(ids or ()), **filters)


def each_trace(collection: Collection, wanted: TraceFilter, doing: str) -> Iterator[tuple[TraceRow, Trace]]:
    """Yields each selected trace, and prints progress messages. A damaged trace is reported and skipped. Raises `UserError` if an id in
    `wanted` has no trace."""
    from agentrl.errors import StoreError

    rows = collection.rows(wanted)
    check_ids(collection.folder, wanted.ids, rows)
    for number, row in enumerate(rows, 1):
        try:
            trace = collection.get(row.id)
        except StoreError as error:
            print(f"excluded: {error}", file=sys.stderr)
            continue
        if trace is not None:
            yield row, trace
        if number % _REPORT_EVERY == 0:
            print(f"{doing} {number} of {len(rows)}", file=sys.stderr)


def check_ids(run: Path, ids: Sequence[str], rows: Sequence[TraceRow]) -> None:
    """Raises `UserError` unless every trace id has a row."""
    if missing := sorted(set(ids) - {row.id for row in rows}):
        raise UserError(f"{run} has no trace {', '.join(missing[:8])}", fix=f"list the traces: agentrl failures list {run}")


def user_rules(references: Sequence[str] | None) -> tuple[TriageRule, ...]:
    """Loads the rules given with --rules, from the current folder. Raises the errors of `load_rules`."""
    from agentrl.failure.triage import load_rules

    add_project_root(Path.cwd())
    return load_rules(tuple(references or ()))
