"""The listener on a sandbox's loopback: handed over by its exec server before any program runs, and served by the host.

The descriptor arrives over a socket in the sandbox's runtime folder. A listener stays in the network namespace it was made in,
so only this sandbox can connect to it. Connections are accepted in a thread: a listener's flags are shared with the process that
made it, so a compromised exec server could make `accept` block, which must never happen in an event loop.
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

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.records.destinations import parse_destinations
from agentrl.sandbox.egress.proxy import Bounds, Proxy
from agentrl.sandbox.links import accept, readable

log = logging.getLogger(__name__)

LINK = "egress"
"""Name of the socket in the sandbox's runtime folder."""
CLOSE_S = 5.0
SHORT_S = 0.2
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAX_DESCRIPTORS = 8


class EgressListener:
    """The host's end of a sandbox with an allow-list: accepts its connections and hands them to `proxy`.

    Create it before the sandbox starts, `take` the listener once the exec server has said hello, `close` it with the sandbox.
    """

    def __init__(self, name: str, spec: SandboxSpec, folder: Path, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.proxy = Proxy(name, parse_destinations(spec.network), self.bounds)
        self._name = name
        self._path = folder / LINK
        self._handing = socket.socket(socket.AF_UNIX)
        self._listener: socket.socket | None = None
        self._slots = threading.Semaphore(self.bounds.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._closing = False
        try:
            self._handing.bind(str(self._path))
            self._path.chmod(0o666)  # the folders above are this user's alone
            self._handing.listen(1)
            self._handing.setblocking(False)
        except BaseException:
            self._handing.close()
            raise

    @classmethod
    def for_spec(cls, name: str, spec: SandboxSpec, folder: Path) -> EgressListener | None:
        """A listener for a sandbox with an allow-list; None, at no cost, for one without."""
        return cls(name, spec, folder) if spec.network else None

    async def receive(self) -> None:
        """Receives the listener and starts to serve. Raises `SandboxError`; the caller sets the deadline."""
        loop = asyncio.get_running_loop()
        with await accept(self._handing) as link:
            await readable(link)
            self._listener = _checked(_received(link))
        self.discard()
        thread = threading.Thread(target=self._accept, args=(self._listener, loop), name=f"egress {self._name}", daemon=True)
        thread.start()

    async def close(self) -> None:
        """Ends every connection and the listener. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.discard()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._slots.release()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._ended.wait()
                self._listener.close()
            except TimeoutError:
                log.warning("the listener of sandbox %s does not end", self._name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.proxy.log_refusals()

    def discard(self) -> None:
        """Removes the hand-over socket: the listener has arrived, or the sandbox failed to start."""
        self._handing.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in its own thread until the listener ends; hands each connection to the driver's event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and the driver with it
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
    """The next connection; None once the listener has ended."""
    while True:
        try:
            return listener.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in _SHORT_OF:
                return None
            time.sleep(SHORT_S)


def _received(link: socket.socket) -> list[int]:
    _, descriptors, _, _ = socket.recv_fds(link, 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return descriptors


def _checked(descriptors: list[int]) -> socket.socket:
    """The listening TCP socket that was sent; anything else is closed and refused."""
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
    raise SandboxError(f"the exec server handed over {problem} instead of its listener (a runtime with its own network stack cannot)")
