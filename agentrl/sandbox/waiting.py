"""Background tasks, waits that can be cancelled (for sockets and threads), and `close` methods, which cannot be cancelled.

A thread checks regularly whether its caller was cancelled. Otherwise a run that is interrupted during an image build would stop only when
the build finishes, many minutes later.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError

_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


@contextlib.contextmanager
def propagate_cancellation() -> Iterator[None]:
    """Wraps an `await asyncio.to_thread(...)`. If the block raises, the next call of `raise_if_cancelled` in that thread raises."""
    event = threading.Event()
    token = _cancelled.set(event)
    try:
        yield
    except BaseException:
        event.set()
        raise
    finally:
        _cancelled.reset(token)


def raise_if_cancelled() -> None:
    """Raises `SandboxError` if the caller that waits for this thread was cancelled."""
    event = _cancelled.get()
    if event is not None and event.is_set():
        raise SandboxError("cancelled")


class ClosesOnce(abc.ABC):
    """Base class of objects whose `close` is idempotent and completes even if its caller is cancelled."""

    _closing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Closes the object and everything that belongs to it."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {type(self).__name__}")
        await asyncio.shield(self._closing)

    @abc.abstractmethod
    async def _close(self) -> None: ...


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]], *, name: str | None = None) -> asyncio.Task[None]:
    """Runs `work` in a task, which is in `tasks` until it ends. The event loop alone would not keep the task alive."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def listen_at(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Returns a non-blocking listener at `path` for one connection, open to every user who can access the path. Raises `OSError` if the
    path exists or is too long."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection from a non-blocking listener. The caller sets the deadline."""
    await readable(listener)
    link, _ = listener.accept()
    link.setblocking(False)
    return link


async def readable(sock: socket.socket) -> None:
    """Waits until a socket has data to read or a connection to accept. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)  # also after a cancellation, so the event loop never watches a closed socket
