"""The listener on a sandbox's loopback. The exec server hands the listener over to the host before any program runs, and the host serves
its connections.

The descriptor arrives over a socket in the sandbox's runtime folder. A listener stays in the network namespace in which it was created,
so only this sandbox can connect to it. A thread accepts connections, because the process that created a listener shares its flags with the
host: a compromised exec server could make `accept` block, which must never happen in an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.records.destinations import parse_destinations
from agentrl.sandbox.egress.proxy import Bounds, Proxy
from agentrl.sandbox.waiting import accept, listen_at, readable

log = logging.getLogger(__name__)

LINK = "egress"
"""Name of the socket in the sandbox's runtime folder."""
_CLOSE_S = 5.0
_RETRY_S = 0.2
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAX_DESCRIPTORS = 8


class Server(Protocol):
    """Serves the connections of one sandbox's programs: the proxy, or a tunnel to the proxy."""

    async def serve(self, link: socket.socket) -> None:
        """Serves a connection, and closes it."""

    def log_refusals(self) -> None:
        """Logs the rejected requests when the sandbox closes."""


class Listener(Protocol):
    """The host's end of a sandbox's network access."""

    async def receive(self) -> None:
        """Starts serving connections; called after the exec server's greeting. Raises `SandboxError` if the exec server does not send a
        listener."""

    async def close(self) -> None:
        """Closes every connection. Idempotent."""

    def discard(self) -> None:
        """Removes the files and sockets that were created for a sandbox that failed to start."""


class EgressListener:
    """The host's end of a sandbox's network access, which accepts connections and passes them to a `Proxy`, or to `server` if that is set.

    Create this object before the sandbox starts, call `receive` after the exec server's greeting, and call `close` when the sandbox closes.
    """

    def __init__(self, name: str, spec: SandboxSpec, folder: Path, bounds: Bounds | None = None, server: Server | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.proxy = server or Proxy(name, parse_destinations(spec.network), self.bounds)
        self._name = name
        self._path = folder / LINK
        self._handover = listen_at(self._path)  # only this user can enter the folders above
        self._listener: socket.socket | None = None
        self._slots = threading.Semaphore(self.bounds.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._closing = False

    async def receive(self) -> None:
        """Receives the listener and starts serving connections. Raises `SandboxError` if the exec server sends something else. The caller
        sets the deadline."""
        loop = asyncio.get_running_loop()
        with await accept(self._handover) as link:
            await readable(link)
            _, descriptors, _, _ = socket.recv_fds(link, 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self._listener = _checked(descriptors)
        self.discard()
        thread = threading.Thread(target=self._accept, args=(self._listener, loop), name=f"egress {self._name}", daemon=True)
        thread.start()

    async def close(self) -> None:
        """Closes every connection and the listener. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.discard()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._slots.release()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._ended.wait()
                self._listener.close()
            except TimeoutError:
                log.warning("the listener of sandbox %s did not end", self._name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.proxy.log_refusals()

    def discard(self) -> None:
        """Removes the hand-over socket. Called when the listener has arrived or the sandbox failed to start."""
        self._handover.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Passes connections to the driver's event loop until the listener is closed. Runs in its own thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while self._slots.acquire() and not self._closing:
                link = _next(listener)
                if link is None:
                    break
                try:
                    loop.call_soon_threadsafe(self._serve, link)
                except RuntimeError:
                    link.close()
                    raise
                time.sleep(self.bounds.pause_s)
            loop.call_soon_threadsafe(self._ended.set)

    def _serve(self, link: socket.socket) -> None:
        if self._closing:
            link.close()
            return
        link.setblocking(False)
        task = asyncio.create_task(self.proxy.serve(link), name=f"egress {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the proxy of sandbox %s failed: %r", self._name, error)


def _next(listener: socket.socket) -> socket.socket | None:
    """Returns the next connection, or None if the listener is closed."""
    while True:
        try:
            return listener.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in _SHORTAGES:
                return None
            time.sleep(_RETRY_S)


def _checked(descriptors: list[int]) -> socket.socket:
    """Returns the listening TCP socket in `descriptors`. If the exec server sent anything else, closes the descriptors and raises
    `SandboxError`."""
    problem = f"{len(descriptors)} descriptors"
    if len(descriptors) == 1:
        try:
            listener = socket.socket(fileno=descriptors[0])
        except OSError as error:
            problem = error.strerror or repr(error)
        else:
            kind = (listener.family, listener.type, listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if kind == (socket.AF_INET, socket.SOCK_STREAM, 1):
                return listener
            problem = f"a socket of kind {kind}"
            descriptors = [listener.detach()]
    for descriptor in descriptors:
        os.close(descriptor)
    raise SandboxError(f"the exec server sent {problem} instead of its listener (a runtime with a separate network stack cannot send it)")
