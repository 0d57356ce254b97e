"""`agentrl report` and `agentrl memory`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import one_line
from agentrl.cli.running import JsonFlag, RunFolder, progress_bar, say
from agentrl.errors import StoreError, UserError
from agentrl.observe.run_folders import RUN_FILES, is_run, run_state

_FOLLOW_S = 5.0  # seconds between two checks of a run


def report(
    run_dir: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", help="Rewrite the report whenever the run changes, until the run ends.")] = False,
) -> None:
    """Write report.html from the files of a run folder."""
    if not is_run(run_dir) and not (run_dir / "episodes").is_dir():
        raise UserError(
            f"{run_dir} contains no run, evaluation or captured failures", fix="give the folder of a run, such as runs/quickstart"
        )
    say(str(_write(run_dir)))
    while follow and (changed := _wait_for_change(run_dir)):
        _write(run_dir)
        print(f"{changed} changed: the report was rewritten", file=sys.stderr, flush=True)


def _write(run_dir: Path) -> Path:
    from agentrl.failure.digest import write_digest
    from agentrl.observe import write_report

    try:
        write_digest(run_dir)
    except StoreError as error:
        print(f"the failures section may be out of date: {error}", file=sys.stderr)
    return write_report(run_dir)


def _wait_for_change(run_dir: Path) -> str:
    """Waits until a file of the report's run changes, and returns the file's name; empty if no process drives the run and nothing
    changes."""
    before, running = _marks(run_dir), True
    while True:
        time.sleep(_FOLLOW_S)
        after = _marks(run_dir)
        if changed := [name for name, mark in after.items() if before.get(name) != mark]:
            return changed[0]
        if not running:
            return ""
        running = run_state(run_dir) == "running"  # after the end, check once more


def _marks(run_dir: Path) -> dict[str, tuple[int, int]]:
    marks = {}
    for name in (*RUN_FILES, "episodes", "sessions.jsonl"):
        with contextlib.suppress(OSError):
            status = (run_dir / name).stat()
            marks[name] = (status.st_mtime_ns, status.st_size)
    return marks


_CLAIM = "no episode read notes from its own group, a later version, a different split, or an attempt at the same task"
_SHOWN = 10  # episodes that read an answer


def memory(run_dir: RunFolder, as_json: JsonFlag = False) -> None:
    """Show the notes that a run's agents wrote. Check in the run's episodes that no agent read a note from an attempt at the same task."""
    from agentrl.memory.proof import audit_memory

    with progress_bar("groups", quiet=as_json) as progress:
        report = audit_memory(run_dir, on_progress=progress)
    if as_json:
        print(json.dumps(report.to_data()))
        raise typer.Exit(0 if report.ok else 1)
    print(f"memory version {report.version}")
    for scope, (notes, writers) in report.kept.items():
        print(f"  {one_line(scope)}: {plural(notes, 'note')} from {plural(writers, 'episode')}")
    print(f"{plural(report.episodes, 'training episode')}: {report.writers} wrote notes, {report.readers} read notes")
    print(f"{plural(report.evaluated, 'evaluation episode')}: {report.evaluated_readers} read notes")
    print(f"{'ok  ' if report.ok else 'FAIL'}  {_CLAIM}")
    for why in report.examples:
        print(f"      {one_line(why)}")
    if report.wrong > len(report.examples):
        print(f"      and {report.wrong - len(report.examples)} more")
    if report.answers:
        print(f"note  {len(report.answers)} episodes read the answer to their own task in notes from other tasks:")
    for answer in report.answers[:_SHOWN]:
        print(f"      {one_line(str(answer['episode']))} ({one_line(str(answer['task']))}): {one_line('; '.join(map(str, answer['how'])))}")
    raise typer.Exit(0 if report.ok else 1)
