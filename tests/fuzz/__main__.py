"""Fuzzing for the developers of agentrl: `make fuzz`, or `python -m tests.fuzz frames calls --minutes 5 --jobs 2`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from agentrl.errors import UserError
from agentrl.plugins.references import add_project_root
from tests.fuzz.catalog import NAMES
from tests.fuzz.run import Report, Status, replay, run


def fuzz(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets, or references such as tests.fuzz.planted:sound. Default: all.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0.02, help="Time for each target. Default: 1, without --inputs.")] = None,
    inputs: Annotated[int | None, typer.Option(min=1, help="Inputs for each target, instead of a time.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Run each target for seconds, with its brief number of inputs.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Targets that run at the same time.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the inputs. 0: different inputs in each run.")] = 0,
    corpus: Annotated[Path, typer.Option(help="Folder for the inputs that reached new code, and for findings.")] = Path(".fuzz"),
    replayed_file: Annotated[Path | None, typer.Option("--replay", help="Feed this file to the target and report the result.")] = None,
    list_targets: Annotated[bool, typer.Option("--list", help="List the targets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Feeds hostile inputs to every boundary that reads untrusted bytes. Exit code 1 if an input breaks a guarantee of its target."""
    add_project_root(Path.cwd())
    if list_targets:
        print(json.dumps(dict(NAMES)) if as_json else "\n".join(f"{name:12} {about}" for name, about in NAMES.items()))
    elif replayed_file is not None:
        raise typer.Exit(_replay(targets or [], replayed_file))
    elif (minutes is not None) + (inputs is not None) + brief > 1:
        raise UserError("--minutes, --inputs and --brief exclude each other", fix="give one of them")
    else:
        names = list(dict.fromkeys(targets or NAMES))
        seconds = 0 if brief or inputs is not None else round(60 * (minutes or 1.0))
        with _progress(seconds, quiet=as_json) as report:
            runs = run(names, inputs=None if brief else inputs or 0, seconds=seconds, jobs=jobs, folder=corpus, report=report, seed=seed)
        if as_json:
            print(json.dumps([_data(status) for status in runs]))
        else:
            print(describe(runs))
        raise typer.Exit(0 if all(status.ok for status in runs) else 1)


def _replay(targets: Sequence[str], file: Path) -> int:
    if len(targets) != 1:
        raise UserError("--replay feeds one target", fix="name it: python -m tests.fuzz frames --replay FILE")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", fix="give a file from the folder of findings") from None
    finding = replay(targets[0], data)
    if finding is None:
        print(f"{targets[0]}: {len(data)} bytes are handled correctly")
        return 0
    print(f"{targets[0]}: {len(data)} bytes break a guarantee:\n{_printable(''.join(traceback.format_exception(finding)).rstrip())}")
    return 1


@contextmanager
def _progress(seconds: int, *, quiet: bool) -> Iterator[Report]:
    """Shows a line for each target: inputs, inputs per second, branches, remaining time. Without a terminal, prints it at the end."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda status: print(_row(status), flush=True) if status.ended and not quiet else None
        return
    columns = (
        TextColumn("{task.description:12}"),
        TextColumn("{task.fields[inputs]:>11,} inputs {task.fields[rate]:>8,.0f}/s"),
        TextColumn("{task.fields[coverage]:>5} branches  {task.fields[left]}"),
    )
    rows: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as progress:

        def report(status: Status) -> None:
            if status.target not in rows:
                rows[status.target] = progress.add_task(status.target, inputs=0, rate=0.0, coverage=0, left="")
            remaining = _left(status, seconds)
            progress.update(rows[status.target], inputs=status.inputs, rate=status.inputs_per_s, coverage=status.coverage, left=remaining)

        yield report


def _left(status: Status, seconds: int) -> str:
    if status.ended:
        return "ok" if status.ok else "FOUND" if status.finding else "FAILED"
    remaining = (status.most - status.inputs) / max(status.inputs_per_s, 1.0) if status.most else seconds - status.seconds
    return f"{max(0.0, remaining):.0f} s left"


def describe(results: Sequence[Status]) -> str:
    """Describes each finding with the command that replays it, and the totals."""
    rows: list[str] = []
    for status in results:
        if not status.ok:
            rows += ["", f"{status.target}: {_printable(status.error)}", _printable(status.trace.rstrip())]
            rows += [f"again with: python -m tests.fuzz {status.target} --replay {status.finding}"] if status.finding else []
    bad = sum(not status.ok for status in results)
    rows += [""] if bad else []
    rows.append(
        f"{sum(status.inputs for status in results):,} inputs at {len(results)} targets: {f'{bad} of them failed' if bad else 'no finding'}"
    )
    return "\n".join(rows)


def _printable(text: str) -> str:
    """Makes text safe for a terminal, because an error message may contain the hostile input."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _row(status: Status) -> str:
    verdict = "ok" if status.ok else "FOUND" if status.finding else "FAILED"
    return f"{status.target:12} {verdict:6} {status.inputs:>11,} inputs {status.inputs_per_s:>8,.0f}/s {status.coverage:>5} branches"


def _data(status: Status) -> dict[str, object]:
    return {
        "target": status.target,
        "ok": status.ok,
        "inputs": status.inputs,
        "seconds": round(status.seconds, 1),
        "inputs_per_s": round(status.inputs_per_s, 1),
        "branches": status.coverage,
        "error": status.error,
        "finding": status.finding,
        "trace": status.trace,
    }


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(fuzz)
    try:
        app(prog_name="python -m tests.fuzz")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
