"""Lets a command finish when its terminal or the reader of its pipe goes away. Its further output is dropped."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = frozenset({errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN})
"""Errors of a write to a closed pipe, terminal or socket. A full disk is not among them, because a result would be lost."""


def outlast_readers() -> None:
    """Replaces standard output and error with streams that ignore the loss of their reader.

    `agentrl train ... | head -1` trains to the end, and the exit code does not change. Descriptors 0 to 2 that the parent has closed are
    opened on /dev/null. Otherwise the next file that is opened would receive the output.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free descriptor
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout, sys.stderr = _lasting(sys.stdout, sys.__stdout__), _lasting(sys.stderr, sys.__stderr__)


def _lasting(stream: TextIO, original: TextIO | None) -> TextIO:
    if stream is not original or not isinstance(stream, io.TextIOWrapper):  # a caller captures it
        return stream
    stream.flush()
    raw = _Lasting(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if not stream.write_through else raw,  # as with python -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Lasting(io.FileIO):
    """A descriptor that is redirected to /dev/null if its reader goes away, for all writers in this process and its later children."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(memoryview(data).cast("B"))


@contextmanager
def outlasting_terminal(note: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Lets the block continue when its terminal closes (SIGHUP). Does nothing under nohup, which ignores the signal.

    Args:
        note: called once with a message about the signal. It must not write to standard output or error, because the signal may
            interrupt a write to them.
    """
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        yield
        return

    heard = False

    def closed(*_: object) -> None:
        nonlocal heard
        if not heard:
            heard = True
            text = f"the terminal was closed (SIGHUP); process {os.getpid()} continues. To end it: kill {os.getpid()}"
            with suppress(OSError):
                os.write(2, f"{text}\n".encode())
            note(text)

    signal.signal(signal.SIGHUP, closed)  # a handler, because children would inherit SIG_IGN
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
