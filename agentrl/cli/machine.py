"""`agentrl doctor` and `agentrl init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import JsonFlag


def doctor(as_json: JsonFlag = False) -> None:
    """Check this machine and print how to fix what is missing."""
    from agentrl.cli import doctor as examine

    checks = examine.checks()
    print(examine.to_json(checks) if as_json else examine.render(checks))
    raise typer.Exit(0 if all(item.ok or not item.required for item in checks) else 1)


def init(
    target: Annotated[Path, typer.Argument(help="New folder.")],
    empty: Annotated[
        bool, typer.Option("--empty", help="Create a minimal task family, verifier, recipe and test instead of the quickstart.")
    ] = False,
) -> None:
    """Create a project with a task family, verifier, recipe and test, ready to train."""
    from agentrl.cli.project import NEXT, init_project

    for path in init_project(target, target.resolve().name, empty=empty):
        print(path)
    print("\nnext:")
    for command in (f"cd {shlex.quote(str(target))}", *NEXT[empty]):
        print(f"  {command}")
