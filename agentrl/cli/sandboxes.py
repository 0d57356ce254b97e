"""`agentrl sandbox`: check and attack backends, list and remove sandboxes, serve them to other machines."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentrl.base.numbers import plural
from agentrl.base.secrets import read_secret
from agentrl.cli import command_group
from agentrl.cli.check import sandbox_attack, sandbox_check
from agentrl.cli.running import JsonFlag
from agentrl.errors import UserError

sandbox_app = command_group()
sandbox_app.command("check", epilog="Example: agentrl sandbox check --backend all")(sandbox_check)
sandbox_app.command("attack", epilog="Example: agentrl sandbox attack --backend all --only fork")(sandbox_attack)


@sandbox_app.command("ls", epilog="Example: agentrl sandbox ls --json")
def sandbox_ls(as_json: JsonFlag = False) -> None:
    """List the sandboxes on this machine, including those of dead drivers."""
    from agentrl.records import codec
    from agentrl.sandbox import list_open

    opened = list_open()
    if as_json:
        print(json.dumps([codec.to_data(item) for item in opened]))
        return
    states = {True: "in use", False: "left over", None: "unknown"}
    for item in opened:
        print(f"{item.name:40} {item.backend:11} {states[item.driver_alive]:9} {item.run}")
    if not opened:
        print("no sandboxes")


@sandbox_app.command("prune", epilog="Example: agentrl sandbox prune --images --dry-run")
def sandbox_prune(
    images: Annotated[bool, typer.Option("--images", help="Also remove unused images.")] = False,
    unused_days: Annotated[
        float | None, typer.Option(help="With --images: days since the last use of an image. Default: 30.", min=0.0)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove the sandboxes of dead drivers. With --images, also remove unused images."""
    from agentrl.sandbox import evict, list_open, prune
    from agentrl.sandbox.lease import runtime_folder

    if unused_days is not None and not images:
        raise UserError("--unused-days needs --images", fix="add --images")
    opened = list_open()
    if dry_run:
        for sandbox in opened:
            if sandbox.driver_alive is False:
                print(f"would remove sandbox {sandbox.name} ({sandbox.backend})")
    else:
        print(f"sandboxes removed: {prune()}")
    if unknown := [sandbox.name for sandbox in opened if sandbox.driver_alive is None]:
        print(f"sandboxes kept, because their drivers may still be running in other containers or on the host: {', '.join(unknown)}")
        print(
            "  fix: run agentrl sandbox prune there; if the containers no longer exist, run it as root on the host, or"
            f" remove each sandbox with docker rm -f NAME (docker) or rm -r {runtime_folder()}/*/NAME (bubblewrap)"
        )
    if images:
        evicted = evict(days=30.0 if unused_days is None else unused_days, dry=dry_run)
        for item in evicted:
            print(f"{'would remove' if dry_run else 'removed'} {item.name}, {item.size / 1e6:.1f} MB, unused for {item.days:.1f} days")
        print(f"{plural(len(evicted), 'image')}, {sum(item.size for item in evicted) / 1e6:.1f} MB{' would be' if dry_run else ''} removed")


@sandbox_app.command("serve", epilog="Example: agentrl sandbox serve --key env:AGENTRL_CELL_KEY")
def sandbox_serve(
    key: Annotated[str, typer.Option(help="Key of the drivers: env:NAME or file:PATH, at least 16 characters.")] = "env:AGENTRL_CELL_KEY",
    listen: Annotated[
        str, typer.Option(help="Address to listen on. The connection is not encrypted: use a private network.")
    ] = "0.0.0.0:7423",
    sandboxes: Annotated[int, typer.Option(min=1, help="Maximum number of open sandboxes.")] = 64,
    memory_mb: Annotated[
        int, typer.Option(min=0, help="Memory of all sandboxes in MiB. 0: the memory of this container minus 256 MiB.")
    ] = 0,
) -> None:
    """Run a cell: open bubblewrap sandboxes for drivers on other machines that set sandbox.backend=cell. Run this command in a container or
    pod."""
    from agentrl.sandbox.cell.server import run_cell

    run_cell(read_secret(key), listen, sandboxes=sandboxes, memory_mb=memory_mb)
