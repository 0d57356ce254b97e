"""`agentrl doctor` and `agentrl init`: the machine, and a project on it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import JsonFlag


def doctor(as_json: JsonFlag = False) -> None:
    """Say what is there, what is missing, and the fix, a line each."""
    from agentrl.cli import doctor as examine

    checks = examine.checks()
    print(examine.to_json(checks) if as_json else examine.render(checks))
    raise typer.Exit(0 if all(item.ok or not item.required for item in checks) else 1)


def init(
    target: Annotated[Path, typer.Argument(help="New folder.")],
    empty: Annotated[
        bool, typer.Option("--empty", help="Omit the quickstart: write a small task family, a verifier, a recipe and a test as a template.")
    ] = False,
) -> None:
    """Write a project of your own: task family, verifier, recipe and test, ready to train."""
    from agentrl.cli.project import NEXT, init_project

    for path in init_project(target, target.resolve().name, empty=empty):
        print(path)
    print("\nnext:")
    for command in (f"cd {shlex.quote(str(target))}", *NEXT[empty]):
        print(f"  {command}")
