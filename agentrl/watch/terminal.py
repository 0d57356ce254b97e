"""Shows screens in a terminal and passes keys to them. Prints one frame if the output is not a terminal."""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agentrl.watch.frames import Size

REFRESH_S = 1.0
"""Seconds between two reads of the run if the reads are fast."""
_SHARE = 20  # minimum ratio of the pause between two reads to the duration of a read
_LOOK_S = 0.25  # interval for checking the size of the terminal
_ESCAPE_S = 0.05  # time within which the rest of an escape sequence must arrive
_PRINTED_ROWS = 40  # number of rows in a printed frame
_SEQUENCES = {
    **{b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left"},
    **{b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left"},
    **{b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end"},
    **{b"\r": "enter", b"\n": "enter", b"\x7f": "left", b"\x08": "left", b"\x1b": "left", b" ": "page down", b"\t": "right"},
    **{b"k": "up", b"j": "down", b"l": "right", b"h": "left", b"g": "home", b"G": "end"},
}
"""Bytes that a key sends -> name of the key. The name of any other key is its character."""


class Screen(Protocol):
    """One screen: a list of runs, a run or an episode."""

    def refresh(self) -> None:
        """Reads the changes. Does not raise errors that are caused by files."""
        ...

    def lines(self, size: Size) -> list[Text]:
        """Returns the lines of the frame, at most `size.height` of them."""
        ...

    def key(self, name: str) -> Screen | None:
        """Handles a key. Returns the screen that the key opens; None means that this screen stays."""
        ...

    def close(self) -> None:
        """Closes the open files."""
        ...


def print_frame(screen: Screen, console: Console) -> None:
    """Prints one frame of a screen, of at most 40 lines and without the line that lists the keys, and closes the screen."""
    screen.refresh()
    lines = screen.lines(Size(console.width, _PRINTED_ROWS))[:-1]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)
    screen.close()


def show(first: Screen, console: Console, *, keys: int | None = None) -> None:
    """Shows a screen, and the screens that it opens, until q or ctrl-C is pressed or the input ends. Closes them at the end.

    Args:
        keys: file descriptor of the terminal from which keys are read; None reads no keys, so only ctrl-C ends the display.
    """
    stack = [first]
    try:
        live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
        with _reading_keys(keys), live, suppress(KeyboardInterrupt):
            _run(stack, live, console, keys)
    finally:
        for screen in stack:
            screen.close()


def _run(stack: list[Screen], live: Live, console: Console, keys: int | None) -> None:
    due, drawn, pressed = -math.inf, Size(0, 0), list[str]()
    while True:
        if is_stale := (now := time.monotonic()) >= due:
            stack[-1].refresh()
            due = time.monotonic() + max(REFRESH_S, _SHARE * (time.monotonic() - now))
        if is_stale or pressed or drawn != Size(*console.size):
            drawn = Size(*console.size)
            live.update(Group(*stack[-1].lines(drawn)), refresh=True)
        pressed = list(_next_keys(keys))
        for name in pressed:
            if name in ("q", ""):
                return
            if name == "left" and len(stack) > 1:
                stack.pop().close()
            elif (opened := stack[-1].key(name)) is not None:
                opened.refresh()
                stack.append(opened)


def _next_keys(keys: int | None) -> Iterator[str]:
    """Waits briefly for a key, and yields the names of the pressed keys. Yields an empty name at the end of the input."""
    if keys is None:
        time.sleep(_LOOK_S)
        return
    if not select.select([keys], [], [], _LOOK_S)[0]:
        return
    data = _read(keys)
    if not data:
        yield ""
    if data.endswith(b"\x1b") and select.select([keys], [], [], _ESCAPE_S)[0]:
        data += _read(keys)
    while data:
        sequence = next(
            (known_sequence for known_sequence in sorted(_SEQUENCES, key=len, reverse=True) if data.startswith(known_sequence)), data[:1]
        )
        data = data[len(sequence) :]
        yield _SEQUENCES.get(sequence) or sequence.decode("latin-1")


def _read(keys: int) -> bytes:
    try:
        return os.read(keys, 1024)
    except OSError:  # the terminal is gone
        return b""


@contextmanager
def _reading_keys(keys: int | None) -> Iterator[None]:
    """During the block, keys can be read before the end of a line. Restores the terminal afterwards."""
    if keys is None:
        yield
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def keyboard() -> int | None:
    """Returns the file descriptor of standard input if it is a terminal, otherwise None."""
    try:
        return sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None  # None if descriptor 0 was closed
    except (OSError, ValueError):
        return None
