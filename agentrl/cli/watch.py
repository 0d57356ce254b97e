"""`agentrl watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(run: Annotated[Path, typer.Argument(metavar="RUN|RUNS_DIR", help="Run folder, or a folder with runs.")]) -> None:
    """Show a run in the terminal: curves, busy parts, alerts, token counts and the newest episodes, while it trains or afterwards.

    The arrow keys select an episode, enter opens its transcript, the left arrow returns, n and p show the next and previous episode, q
    quits. If the output is not a terminal, the command prints one frame.
    """
    from rich.console import Console

    from agentrl.watch import keyboard, open_screen, print_frame, show

    screen, console = open_screen(run), Console()
    if console.is_terminal and not console.is_dumb_terminal:
        show(screen, console, keys=keyboard())
    else:
        print_frame(screen, console)
