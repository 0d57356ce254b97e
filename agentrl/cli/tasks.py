"""`agentrl tasks`: lists the tasks of a run, and adds, removes and re-weights them while the run trains or while it is stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.base.user_code import one_line
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, RunFolder, loading, say
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.task.changes import LoggedChange

tasks_app = command_group()

Name = Annotated[str, typer.Argument(help="Task family, kind or task, as printed by `agentrl tasks list`.")]
_ROWS = 50


@tasks_app.command("list", epilog="Example: agentrl tasks list runs/quickstart --json")
def list_command(
    run: RunFolder,
    all_tasks: Annotated[bool, typer.Option("--all", help=f"List all tasks. Default: the {_ROWS} with the most groups.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the task families of a run, the tasks used so far (weight, state, groups, mean score) and the changes to them."""
    with loading():
        from agentrl.session.task_changes import list_tasks

    listed = list_tasks(run)
    if as_json:
        changes = [asdict(change.change) | {"start": change.start and asdict(change.start)} for change in listed.changes]
        print(json.dumps({"families": [*map(asdict, listed.families)], "tasks": [*map(asdict, listed.tasks)], "changes": changes}))
        return
    print(f"{'family':20} {'weight':>8} {'share':>7}  from")
    for family in listed.families:
        weight = f"{family.weight:g}" if family.weight else "removed"
        print(f"{one_line(family.name):20} {weight:>8} {family.share:7.1%}  {one_line(family.ref)}")
    print(f"\n{'task':32} {'kind':20} {'weight':>8} {'state':8} {'groups':>6} {'success':>8}")
    rows = sorted(listed.tasks, key=lambda row: -row.groups)
    for row in rows if all_tasks else rows[:_ROWS]:
        success = "-" if row.success is None else f"{row.success:.3f}"
        print(f"{one_line(row.task):32} {one_line(row.kind):20} {row.weight:8g} {row.state:8} {row.groups:6} {success:>8}")
    if len(rows) > _ROWS and not all_tasks:
        print(f"and {len(rows) - _ROWS} more; --all lists them")
    for change in listed.changes:
        print(f"{one_line(change.change.text)}: {_state(change)}")


def _state(logged: LoggedChange) -> str:
    if logged.start is None:
        return "requested"
    return f"rejected: {one_line(logged.start.rejected)}" if logged.start.rejected else f"from group {logged.start.first} on"


@tasks_app.command(
    "add", epilog="Example: agentrl tasks add runs/x sandboxes/chores --weight 2; agentrl tasks add runs/x mine:family level=3"
)
def add_command(
    run: RunFolder,
    family: Annotated[str, typer.Argument(help="Folder of task folders, or plug-in reference, as for tasks.family.")],
    options: Annotated[list[str] | None, typer.Argument(help="Options of the family, such as level=3.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the family in this run. Default: the last part of FAMILY.")] = None,
    weight: Annotated[float, typer.Option(help="Weight relative to other families. The recipe's family has weight 1.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the family. Default: the recipe's.")] = None,
) -> None:
    """Add a task family to a run. Run this command in the recipe's project.

    A share of the groups that have not started yet is sampled from the training tasks of this family. Evaluations still use the held-out
    tasks of the recipe's family.
    """
    with loading():
        from agentrl.session.task_changes import family_label

    settings = {"family": family, "options": _options(options or []), "seed": seed, "weight": weight}
    _request(run, "add", name or family_label(family), **settings)


@tasks_app.command("remove", epilog="Example: agentrl tasks remove runs/quickstart join")
def remove_command(run: RunFolder, name: Name) -> None:
    """Remove a task family, a kind of task or one task from the groups that have not started yet. Run this command in the recipe's
    project."""
    _request(run, "remove", name)


@tasks_app.command("reweight", epilog="Example: agentrl tasks reweight runs/quickstart join 0.5")
def reweight_command(
    run: RunFolder,
    name: Name,
    weight: Annotated[
        float, typer.Argument(help="Weight of a family relative to the other families, or of a kind or task relative to 1, the default.")
    ],
) -> None:
    """Sample a family, a kind of task or one task more or less often. Run this command in the recipe's project."""
    _request(run, "reweight", name, weight=weight)


def _request(run: Path, action: str, name: str, **settings: Any) -> None:
    with loading():
        from agentrl.session.folder import resume_command
        from agentrl.session.task_changes import request_change
        from agentrl.session.version_changes import is_driven
        from agentrl.task.changes import TaskChange

    try:
        change = TaskChange(action=action, target="family", name=name, at=datetime.now(UTC).isoformat(timespec="seconds"), **settings)
    except ValueError as error:
        raise UserError(str(error), fix=f"agentrl tasks {action} --help") from None
    done = request_change(run, change)
    live = is_driven(run)
    print(f"requested: {one_line(done.text)}, starting with the next group")
    say(f"check with: agentrl tasks list {run}" if live else f"the run is stopped; continue it with: {resume_command(run)}")


def _options(pairs: list[str]) -> dict[str, Any]:
    options = dict[str, Any]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UserError(f"option {pair!r} is not KEY=VALUE", fix="write options such as level=3")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options
