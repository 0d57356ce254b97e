"""Lets a command finish even if its terminal closes, or if the reader of its pipe exits or stops reading.

If the reader is gone, further output is dropped. During a run, no write waits for a reader, because a thread delivers the output. If the
reader does not read, the oldest output is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = frozenset({errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN})
"""Errors of a write to a closed pipe, terminal or socket. The error of a full disk is not among them, because ignoring it would lose a
result."""


PATIENCE_S = 30.0
_MOST = 1 << 20  # bytes of output that wait for a reader
_CHUNK = 4096  # bytes of one write
_PAUSE_S = 0.05
_DROPPED = b"\n[some output was dropped because it was not read in time; the run folder has all figures]\n"


def outlast_readers() -> None:
    """Replaces standard output and error with streams that ignore the loss of their reader.

    `agentrl train ... | head -1` trains to the end, and the exit code does not change. Descriptors 0 to 2 that the parent has closed are
    opened on /dev/null, because otherwise the next file that is opened would receive the output.
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
        errors="replace" if stream is sys.stdout and stream.encoding.lower() != "utf-8" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outbox:
    """Output that a thread writes, so that callers never wait. Stores at most `_MOST` bytes; if there is more, drops the oldest output."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting = deque[bytes]()
        self._size = 0  # bytes in `_waiting`
        self._writes = 0  # finished writes
        self._delivering = False
        self._dropped = False  # whether output before that in `_waiting` was dropped
        self.abandoned = False  # no reader reads: further output is dropped
        self._error: OSError | None = None
        threading.Thread(target=self._deliver, name="agentrl-output", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether the writer thread exists; False in a forked child."""
        return os.getpid() == self._process

    def put(self, data: bytes) -> None:
        """Queues output. Raises the `OSError` of an earlier write, such as for a full disk."""
        with self._changed:
            self._raise()
            if self.abandoned:
                return
            self._waiting.append(data)
            self._size += len(data)
            while self._size > _MOST and len(self._waiting) > 1:
                self._size -= len(self._waiting.popleft())
                self._dropped = True
            self._changed.notify_all()

    def settle(self, patience_s: float) -> None:
        """Waits until all output is delivered. If the reader reads nothing for `patience_s` seconds, drops the rest. Raises `OSError`."""
        with self._changed:
            try:
                while self._waiting or self._delivering:
                    before = self._writes
                    if not self._changed.wait(patience_s) and self._writes == before:
                        self.abandoned = True
                        return
            except KeyboardInterrupt:
                self.abandoned = True
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._delivering = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
                self._size -= len(data)
                self._delivering = True
                if self._dropped:
                    data, self._dropped = _DROPPED + data, False
            try:
                while data:
                    if written := self._write(data[:_CHUNK]):
                        data = data[written:]
                        self._end_write()
                    else:  # a descriptor that its owner made non-blocking
                        time.sleep(_PAUSE_S)
            except OSError as error:
                self._error = error
                self._end_write()

    def _end_write(self) -> None:
        with self._changed:
            self._writes += 1
            self._changed.notify_all()


class _Lasting(io.FileIO):
    """A descriptor that is redirected to /dev/null if its reader is gone, for all writers in this process and its later children."""

    outbox: _Outbox | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.outbox is None or not self.outbox.usable:
            return self.write_now(data)
        content = bytes(data)
        self.outbox.put(content)
        return len(content)

    def write_now(self, data: ReadableBuffer, /) -> int:
        """Writes the data, waiting for the reader if there is one."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(memoryview(data).cast("B"))


def settle() -> None:
    """Flushes the output of a run. A command calls this function last. Waits up to `PATIENCE_S` seconds for a reader that does not read.

    Later output, such as a traceback, is written directly. Raises `OSError` if output was lost, for example because a disk is full.
    """
    with ExitStack() as stack:
        for stream, raw in _lasting_streams():
            stack.callback(_settle, stream, raw)


def _settle(stream: TextIO, raw: _Lasting) -> None:
    if (outbox := raw.outbox) is None or not outbox.usable:
        return
    try:
        stream.flush()
        outbox.settle(PATIENCE_S)
    finally:
        if not outbox.abandoned:
            raw.outbox = None


def _lasting_streams() -> Iterator[tuple[TextIO, _Lasting]]:
    for stream in (sys.stdout, sys.stderr):
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if isinstance(raw, _Lasting):
            yield stream, raw


def _stop_waiting() -> None:
    """Makes later writes to standard output and standard error return without waiting for a reader. Output that is redirected to a file has
    no reader and is still written directly."""
    for stream, raw in _lasting_streams():
        if raw.outbox is None and not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
            stream.flush()
            raw.outbox = _Outbox(raw.write_now)


@contextmanager
def outlasting_terminal(note: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Lets the block continue when its terminal closes (SIGHUP), or when no reader reads what it prints.

    If the signal is already ignored, as under nohup, it stays ignored.

    Args:
        note: called once with a message about the signal. `note` must not write to standard output or error, because the signal may
        interrupt a write to them.
    """
    _stop_waiting()
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
            with suppress(OSError, ValueError):
                if select.select((), (2,), (), 0)[1]:  # otherwise no reader reads
                    os.write(2, f"{text}\n".encode())
            note(text)

    signal.signal(signal.SIGHUP, closed)  # a handler, because children would inherit SIG_IGN
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
