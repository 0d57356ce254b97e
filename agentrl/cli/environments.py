"""`agentrl env`: Python environments for third-party packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.base.numbers import plural
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, project_root, timed_progress, undoing
from agentrl.environment import building, venvs
from agentrl.errors import UserError

env_app = command_group()
_NO_ENVIRONMENTS = "no environments; add one: agentrl env add PACKAGE"


@env_app.command(
    "add",
    epilog="Example: agentrl env add inspect-ai==0.3.285\n\n"
    "Example: agentrl env add ./my_taskset verifiers==0.4.0 --name mine\n\n"
    "Example: agentrl env add nemo-gym --python 3.13",
)
def env_add(
    packages: Annotated[
        list[str],
        typer.Argument(metavar="PACKAGE...", help="Requirements, or paths of folders and wheels."),
    ],
    name: Annotated[str, typer.Option(help="Name of the environment. Default: the first package.")] = "",
    python: Annotated[
        str, typer.Option(help="Python version, such as 3.12, or path of an interpreter. Default: the Python that runs agentrl.")
    ] = "",
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Use the newest versions instead of those in the lock file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Install packages into the virtual environment .environments/NAME, and record them with their hashes in environments/NAME.lock.

    Commit the lock file. If a lock file with the same requirements exists, the versions in that file are installed.
    """
    with undoing():
        lock = building.add_environment(_root(), packages, name=name, python=python, upgrade=upgrade, report=timed_progress())
    if as_json:
        print(json.dumps(_data(lock, built=True)))
    else:
        _print_built(lock)


@env_app.command("sync", epilog="Example: agentrl env sync\n\nExample: agentrl env sync inspect-ai")
def env_sync(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Environments to build. Default: all.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Build environments with exactly the versions in their lock files."""
    built = []
    for name in names or venvs.read_locks(_root()):
        with undoing():
            built.append(building.sync_environment(_root(), name, report=timed_progress()))
        if not as_json:
            _print_built(built[-1])
    if as_json:
        print(json.dumps([_data(lock, built=True) for lock in built]))
    elif not built:
        print(_NO_ENVIRONMENTS)


@env_app.command("list", epilog="Example: agentrl env list --json")
def env_list(as_json: JsonFlag = False) -> None:
    """List the project's environments."""
    root = _root()
    locks = venvs.read_locks(root)
    if as_json:
        print(json.dumps([_data(lock, built=venvs.is_built(root, lock)) for lock in locks.values()]))
        return
    for name, lock in locks.items():
        state = "built" if venvs.is_built(root, lock) else f"not built: agentrl env sync {name}"
        print(f"{name:24} python {lock.python:5} {len(lock.pins) + len(lock.folders):4} packages  {' '.join(lock.requires)}  {state}")
    if not locks:
        print(_NO_ENVIRONMENTS)


@env_app.command("remove", epilog="Example: agentrl env remove inspect-ai")
def env_remove(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Remove environments and their lock files."""
    for name in names:
        if not building.remove_environment(_root(), name):
            raise UserError(f"the project has no environment {name!r}", fix="list the environments: agentrl env list")
        print(f"removed {name}")


def _root() -> Path:
    return project_root(Path.cwd() / "recipe.py")


def _print_built(lock: venvs.Lock) -> None:
    packages = f"python {lock.python}, {plural(len(lock.pins) + len(lock.folders), 'package')}"
    print(f"{venvs.BUILT}/{lock.name}: {packages}; commit {venvs.LOCKS}/{lock.name}.lock")


def _data(lock: venvs.Lock, *, built: bool) -> dict[str, object]:
    return {"name": lock.name, "requires": lock.requires, "python": lock.python, "versions": lock.versions, "built": built}
