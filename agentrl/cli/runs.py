"""`agentrl report` and `agentrl versions`: what a run folder holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import JsonFlag
from agentrl.errors import StoreError, UserError


def report(run_dir: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write report.html again from what is in a run folder."""
    from agentrl.failure.digest import write_digest
    from agentrl.observe import write_report

    if not run_dir.is_dir():
        raise UserError(f"no run folder {run_dir}", fix="give the folder of a run, such as runs/quickstart")
    try:
        write_digest(run_dir)
    except StoreError as error:
        print(f"failures are as the last digest has them: {error}", file=sys.stderr)
    print(write_report(run_dir))


def versions(run_dir: Annotated[Path, typer.Argument(help="Run folder.")], as_json: JsonFlag = False) -> None:
    """List the policy versions of a run with their states and evaluations."""
    from agentrl import codec
    from agentrl.version import FolderRegistry

    if not (run_dir / "versions").is_dir():
        raise UserError(f"{run_dir} has no versions", fix="give the folder of a run, such as runs/quickstart")
    found = FolderRegistry(run_dir / "versions").versions()
    if as_json:
        print(json.dumps([codec.to_data(item) for item in found]))
        return
    for item in found:
        evals = "  ".join(f"{name} {value:.3f}" for name, value in item.evals.items())
        print(f"{item.number:6d}  {item.state:<11} {item.sha256[:12]}  {evals}")
