"""`agentrl report` and `agentrl versions`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.base.user_code import printable
from agentrl.cli.options import JsonFlag
from agentrl.errors import StoreError, UserError

_MAX_REASON = 1000  # characters of a reason
_RUN_FILES = ("recipe.json", "run.json", "metrics.jsonl", "evaluations.json", "summary.json", "episodes", "failures/traces.sqlite")


def report(run_dir: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write report.html from the files of a run folder."""
    from agentrl.failure.digest import write_digest
    from agentrl.observe import write_report

    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir}", fix="give the folder of a run, such as runs/quickstart")
    if not any((run_dir / name).exists() for name in _RUN_FILES):
        raise UserError(f"{run_dir} has no run, evaluation or captured failures", fix="give the folder of a run, such as runs/quickstart")
    try:
        write_digest(run_dir)
    except StoreError as error:
        print(f"the failures section may be out of date: {error}", file=sys.stderr)
    print(write_report(run_dir))


def versions(run_dir: Annotated[Path, typer.Argument(help="Run folder.")], as_json: JsonFlag = False) -> None:
    """List the policy versions of a run with their states, evaluations and gate decisions."""
    from agentrl.gate.verdict import read_verdicts
    from agentrl.records import codec
    from agentrl.version import FolderRegistry

    if not (run_dir / "versions").is_dir():
        raise UserError(f"{run_dir} has no versions", fix="give the folder of a run, such as runs/quickstart")
    recorded = FolderRegistry(run_dir / "versions").versions()
    verdicts = {(one.version, one.sha256): one for one in read_verdicts(run_dir)}
    if as_json:
        judged = [(item, verdicts.get((item.number, item.sha256))) for item in recorded]
        print(json.dumps([codec.to_data(item) | {"gate": verdict and codec.to_data(verdict)} for item, verdict in judged]))
        return
    for item in recorded:
        evals = "  ".join(f"{name} {value:.3f}" for name, value in item.evals.items())
        back = item.parent is not None and item.parent != item.number - 1
        origin = f"restored from version {item.parent}" if back else ""
        print("  ".join(part for part in (f"{item.number:6d}", f"{item.state:<11}", item.sha256[:12], evals, origin) if part))
        verdict = verdicts.get((item.number, item.sha256))
        if verdict is not None:
            print(f"        gate: {_line(verdict.outcome)}: {_line(verdict.reason)}")
            for one in verdict.regressions:
                turn = "the transcripts are equal" if one.turn is None else f"turn {one.turn} is the first that differs"
                print(f"        case {_line(one.case)}: {turn} ({_line(one.before_episode)} passed, {_line(one.episode)} did not)")


def _line(text: str) -> str:
    return " ".join(printable(text, _MAX_REASON).split())
