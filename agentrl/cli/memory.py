"""`agentrl memory`: what the agents of a run noted and read, and whether anything went where it must not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.base.user_code import printable
from agentrl.cli.options import JsonFlag

_CLAIM = "nobody was shown notes of its own group, of a later version, of another split, or of an attempt at its own task"
_TOLD = 10  # episodes that were shown an answer


def memory(run_dir: Annotated[Path, typer.Argument(help="Run folder.")], as_json: JsonFlag = False) -> None:
    """Show what is in a run's memory, and prove from its episodes that nobody was shown what an attempt at the same task wrote."""
    from rich.console import Console
    from rich.progress import Progress

    from agentrl.memory.proof import audit_memory

    with Progress(console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("groups", total=None)
        report = audit_memory(run_dir, telling=lambda done, total: progress.update(bar, completed=done, total=total))
    if as_json:
        print(json.dumps(report.to_data()))
        raise typer.Exit(0 if report.ok else 1)
    print(f"version {report.version} of the memory")
    for scope, (notes, writers) in report.kept.items():
        print(f"  {_line(scope)}: {notes} notes of {writers} episodes")
    print(f"{report.episodes} training episodes: {report.writers} wrote notes that count, {report.readers} were shown some")
    print(f"{report.evaluated} episodes of evaluations: {report.evaluated_readers} were shown notes")
    print(f"{'ok  ' if report.ok else 'FAIL'}  {_CLAIM}")
    for why in report.examples:
        print(f"      {_line(why)}")
    if report.wrong > len(report.examples):
        print(f"      and {report.wrong - len(report.examples)} more")
    if report.answers:
        print(f"note  {len(report.answers)} episodes were shown words with the answer to their own task, from other tasks:")
    for one in report.answers[:_TOLD]:
        print(f"      {_line(str(one['episode']))} ({_line(str(one['task']))}): {_line('; '.join(map(str, one['how'])))}")
    raise typer.Exit(0 if report.ok else 1)


def _line(text: str) -> str:
    return " ".join(printable(text, 300).split())
