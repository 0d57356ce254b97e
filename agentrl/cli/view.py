"""`agentrl view` and `agentrl watch`, which show a run in the browser and in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.running import require_web_server, user_name

if TYPE_CHECKING:
    from agentrl.view import ViewServer


def view(
    runs: Annotated[Path, typer.Argument(help="Folder with runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8420,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address except 127.0.0.1 shows the runs to your network.")
    ] = "127.0.0.1",
    read_only: Annotated[bool, typer.Option("--read-only", help="Show runs only; do not accept tags, labels, cases or scores.")] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a web page, even during training, at every level: curves, steps, groups, episodes and tokens.

    The printed address contains the access token for the pages. Press ctrl-C to stop.
    """
    require_web_server("agentrl view")
    from agentrl.view import RunLibrary, ViewServer

    server = ViewServer(library=RunLibrary(runs), host=host, port=port, user=user_name(), read_only=read_only)
    asyncio.run(_serve(server, browser=browser))


async def _serve(server: ViewServer, *, browser: bool) -> None:
    await server.start()
    try:
        print(server.url, flush=True)
        if browser and not await asyncio.to_thread(_open, server.url):
            print("no browser was found; open the address in a browser", file=sys.stderr)
        await server.wait()
    finally:
        await server.stop()


def _open(address: str) -> bool:
    with contextlib.suppress(webbrowser.Error):
        return webbrowser.open(address)
    return False


def watch(run: Annotated[Path, typer.Argument(metavar="RUN|RUNS_DIR", help="Run folder, or a folder with runs.")]) -> None:
    """Show a run in the terminal, while it trains or afterwards: curves, busy parts, alerts, token counts and the newest episodes.

    The arrow keys select an episode, enter opens its transcript, the left arrow returns, n and p show the next and the previous episode,
    and q quits. If the output is not a terminal, the command prints one frame.
    """
    from rich.console import Console

    from agentrl.watch import keyboard, open_screen, print_frame, show

    screen, console = open_screen(run), Console()
    if console.is_terminal and not console.is_dumb_terminal:
        show(screen, console, keys=keyboard())
    else:
        print_frame(screen, console)
