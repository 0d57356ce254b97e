"""`agentrl sandbox`: check and attack backends, list and remove sandboxes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentrl.cli.check import sandbox_attack, sandbox_check
from agentrl.cli.options import JsonFlag
from agentrl.errors import UserError

sandbox_app = typer.Typer(no_args_is_help=True, add_completion=False)
sandbox_app.command("check", epilog="Example: agentrl sandbox check --backend all")(sandbox_check)
sandbox_app.command("attack", epilog="Example: agentrl sandbox attack --backend all --only fork")(sandbox_attack)


@sandbox_app.command("ls", epilog="Example: agentrl sandbox ls --json")
def sandbox_ls(as_json: JsonFlag = False) -> None:
    """List the sandboxes on this machine, leftovers of dead drivers included."""
    from agentrl.records import codec
    from agentrl.sandbox import list_open

    found = list_open()
    if as_json:
        print(json.dumps([codec.to_data(item) for item in found]))
        return
    for item in found:
        print(f"{item.name:40} {item.backend:11} {'in use' if item.driver_alive else 'left over':9} {item.run}")
    if not found:
        print("no sandboxes")


@sandbox_app.command("prune", epilog="Example: agentrl sandbox prune --images --dry-run")
def sandbox_prune(
    images: Annotated[bool, typer.Option("--images", help="Also images of sandboxes that nothing has used for long.")] = False,
    unused_days: Annotated[float | None, typer.Option(help="How long, with --images: 30 days where it is not given.", min=0.0)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove what dead drivers left behind, and with --images what is not used any more."""
    from agentrl.sandbox import evict, list_open, prune

    if unused_days is not None and not images:
        raise UserError("--unused-days says which images are removed", fix="give --images too")
    if dry_run:
        for sandbox in list_open():
            if not sandbox.driver_alive:
                print(f"would remove sandbox {sandbox.name} ({sandbox.backend})")
    else:
        print(f"{prune()} removed")
    if images:
        found = evict(days=30.0 if unused_days is None else unused_days, dry=dry_run)
        for item in found:
            print(f"{'would remove' if dry_run else 'removed'} {item.name}, {item.size / 1e6:.1f} MB, unused for {item.days:.1f} days")
        print(f"{len(found)} of images, {sum(item.size for item in found) / 1e6:.1f} MB{' would be' if dry_run else ''} removed")
