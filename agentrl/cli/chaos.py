"""`agentrl chaos`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.scratch import ScratchFolder
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.chaos import Result

chaos_app = command_group()


@chaos_app.command("list", epilog="Example: agentrl chaos list --json")
def chaos_list(as_json: JsonFlag = False) -> None:
    """List the cases with their faults and maximum recovery times."""
    from agentrl.chaos import CASES

    if as_json:
        print(json.dumps([{"number": case.number, "name": case.name, "injects": case.injects, "bound_s": case.bound_s} for case in CASES]))
        return
    for case in sorted(CASES, key=lambda case: case.number):
        bound = "" if case.bound_s is None else f" At most {case.bound_s:g} s."
        print(f"{case.title:30}{case.injects}{bound}")


@chaos_app.command("run", epilog="Example: agentrl chaos run --case 1 --case 5")
def chaos_run(
    numbers: Annotated[
        list[int] | None, typer.Option("--case", help="Number of a case; may be repeated. Default: all cases, or none with --minutes.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Kill random parts of the run for this many minutes, after the cases of --case.")
    ] = 0.0,
    kills: Annotated[int, typer.Option(min=1, help="Maximum number of random kills.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the random kills.")] = 0,
    work: Annotated[Path | None, typer.Option(help="Keep the runs in this folder. Default: a temporary folder.")] = None,
    sandbox: Annotated[str, typer.Option(help="Sandbox backend.")] = "bubblewrap",
    slack: Annotated[float, typer.Option(min=1.0, help="Multiply every time bound by this factor, for a busy machine.")] = 1.0,
    as_json: JsonFlag = False,
) -> None:
    """Kill, stop and damage parts of a small real run, and verify that no data is lost.

    Each case verifies that its fault occurred and measures the time until the run recovers. Afterwards, the command checks that the ledger
    adds up, that scoring the episodes again gives the same scores, and that no process or sandbox is left. The exit code is 1 if a case or
    a check fails.
    """
    from agentrl.chaos import CASES, run_cases, run_soak

    chosen = CASES if numbers is None else tuple(case for case in CASES if case.number in numbers)
    if numbers is not None and (unknown := sorted(set(numbers) - {case.number for case in CASES})):
        raise UserError(f"there is no case {unknown[0]}", fix="agentrl chaos list prints the numbers")
    if numbers is None and minutes:
        chosen = ()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run under test, as ctrl-C does
    report = partial(print, file=sys.stderr, flush=True)
    with ScratchFolder() as scratch:
        folder = (work or scratch).resolve()
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", fix="choose an empty folder with --work")
        folder.mkdir(parents=True, exist_ok=True)
        results = run_cases(chosen, work=folder, backend=sandbox, slack=slack, report=report) if chosen else []
        if minutes:
            results += run_soak(work=folder, backend=sandbox, minutes=minutes, kills=kills, seed=seed, report=report)
    if as_json:
        load = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
        print(json.dumps({"results": [result.as_data() for result in results], **load}))
    else:
        print(render_results(results))
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def render_results(results: Sequence[Result]) -> str:
    """Returns the results as a table with the case, the seconds until recovery, the bound, the verdict and the evidence."""
    lines = [f"{'case':30}{'recovered':>10}{'bound':>8}  {'ok':4}witness"]
    for result in results:
        took = "-" if result.recovered_s is None else f"{result.recovered_s:.1f} s"
        bound = "-" if result.bound_s is None else f"{result.bound_s:.0f} s"
        verdict = "skip" if result.skipped else "yes" if result.ok else "NO"
        lines.append(f"{result.case:30}{took:>10}{bound:>8}  {verdict:4} {result.problem or result.skipped or result.witness}")
    return "\n".join(lines)
