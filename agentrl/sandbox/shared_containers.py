"""Containers that several sandboxes share: the connection to each container's keeper, and the allocation of slots.

A container costs the daemon a tenth of a second of CPU time; isolating sandboxes inside a container is cheap. So one container holds up to
`SLOTS` sandboxes at a time and `LIFETIME` in total, each isolated from the others (see `agentrl.sandbox.inside.isolation`). If a container
fails, only the sandboxes in it are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox.lease import sandbox_name

log = logging.getLogger(__name__)

SLOTS = 16
LIFETIME = 256
KEEPER_BYTES = 64 << 20
"""Memory of a container in addition to that of its sandboxes."""
MAX_IDLE = 8
"""Maximum number of containers that are kept ready without a sandbox. The least recently used one is stopped first."""
ENDING_S = 60.0
"""How long a killed sandbox may take to exit. After that, its container gets no new sandboxes."""
_RETRY_S = 0.1
_PACKET = 1 << 17
_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC)


class CannotShare(SandboxError):
    """Containers on this machine cannot hold several sandboxes. The message says what is not permitted."""


@dataclass(slots=True)
class SharedSandbox:
    """A sandbox in a shared container."""

    id: int
    failure: str = ""  # why its first process could not start it
    code: int | None = None  # the kernel's error number
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def refused(self) -> bool:
        """Whether the sandbox failed for a reason that applies to all sandboxes, and not because memory, descriptors or processes ran
        out."""
        return bool(self.failure) and self.code not in _SHORTAGES


class KeeperClient:
    """The connection to the keeper of one container. A protocol violation closes the connection, which stops all sandboxes in the
    container."""

    def __init__(self, link: socket.socket, name: str) -> None:
        self.name = name
        self.gone = asyncio.Event()
        self.retired = False  # if True, the container gets no new sandboxes; the present ones continue
        self._problem = ""
        self._link = link
        self._sandboxes: dict[int, SharedSandbox] = {}
        self._numbers = itertools.count()
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link, self._read)

    async def ready(self) -> None:
        """Waits until the keeper is ready. The caller sets the deadline. Raises `CannotShare` if the keeper reports that it cannot isolate
        sandboxes, and `SandboxError` if the container exits."""
        await self._ready.wait()
        if self._problem:
            raise CannotShare(self._problem)
        if self.gone.is_set():
            raise SandboxError(f"container {self.name} exited before its keeper was ready")

    def open(self, description: Mapping[str, Any], descriptors: Mapping[str, int]) -> SharedSandbox:
        """Requests a sandbox and passes it these descriptors. The sandbox's connection shows whether the sandbox starts. Raises
        `SandboxError` if the keeper cannot receive the request."""
        sandbox = SharedSandbox(next(self._numbers))
        if not self._send({"op": "open", "id": sandbox.id, "handed": list(descriptors), **description}, list(descriptors.values())):
            raise SandboxError(f"container {self.name} does not read its requests")
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def end(self, sandbox: SharedSandbox, patience_s: float) -> None:
        """Waits up to `patience_s` for a sandbox to exit, then kills it. Returns when nothing is left of the sandbox. Raises `SandboxError`
        if the sandbox does not exit within `ENDING_S` seconds; the container then gets no new sandboxes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await sandbox.ended.wait()
        if sandbox.ended.is_set():
            return
        try:
            async with asyncio.timeout(ENDING_S):
                while not self._send({"op": "end", "id": sandbox.id}, []):
                    await asyncio.sleep(_RETRY_S)
                await sandbox.ended.wait()
        except TimeoutError:
            self.retired = True
            raise SandboxError(
                f"a sandbox in container {self.name} did not exit within {ENDING_S:.0f} s; "
                "the container is stopped when its other sandboxes have exited"
            ) from None

    def close(self) -> None:
        """Closes the connection, which stops the container. Idempotent."""
        if not self.gone.is_set():
            self._loop.remove_reader(self._link)
            self._link.close()
            self.gone.set()
            self._ready.set()
            for sandbox in self._sandboxes.values():
                sandbox.ended.set()
            self._sandboxes.clear()

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> bool:
        """Sends a request to the keeper. Returns False if the keeper has too many unread requests, for example because it gets no CPU
        time. Raises `SandboxError` if the container is gone."""
        if self.gone.is_set():
            raise SandboxError(f"container {self.name} is gone")
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise SandboxError(f"cannot send a request to container {self.name}: {error}") from error
        return True

    def _read(self) -> None:
        try:
            data = self._link.recv(_PACKET)
            if not data:
                raise SandboxError("the keeper closed its connection")
            self._handle(json.loads(data))
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SandboxError) as error:
            if self._sandboxes:
                log.warning("lost the container %s with %d sandboxes: %s", self.name, len(self._sandboxes), error)
            self.close()

    def _handle(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise ValueError("a message is not a JSON object")
        if "ready" in message or "cannot" in message:
            self._problem = str(message.get("cannot", ""))[:500]
            self._ready.set()
            return
        sandbox = self._sandboxes[message["id"]]
        if "failed" in message:
            sandbox.failure, sandbox.code = str(message["failed"])[:500], message["errno"]
        else:
            sandbox.ended.set()
            del self._sandboxes[sandbox.id]


class Container:
    """A shared container."""

    def __init__(self, key: Hashable, name: str, starting: Awaitable[KeeperClient]) -> None:
        self.key, self.name = key, name
        self.starting = asyncio.ensure_future(starting)
        self.taken = 0  # slots in use
        self.served = 0  # sandboxes so far
        self.used = 0.0  # when a slot was last released
        self.starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved

    @property
    def failed(self) -> bool:
        """Whether the container failed to start, has exited, or no longer accepts sandboxes."""
        if not self.starting.done():
            return False
        if self.starting.cancelled() or self.starting.exception() is not None:
            return True
        return self.starting.result().gone.is_set() or self.starting.result().retired

    @property
    def has_free_slot(self) -> bool:
        """Whether the container can hold one more sandbox."""
        return self.taken < SLOTS and self.served < LIFETIME and not self.failed


class ContainerPool:
    """The shared containers of a backend, grouped by key. Only interchangeable sandboxes have the same key. The pool calls `stop` to stop a
    container."""

    def __init__(self, stop: Callable[[Container], None]) -> None:
        self._stop = stop
        self._containers: list[Container] = []

    async def acquire(self, key: Hashable, start: Callable[[str], Awaitable[KeeperClient]]) -> Container:
        """Returns a running container with a slot for the caller, who must call `release`. Raises the exceptions of `start`."""
        container = next((container for container in self._containers if container.key == key and container.has_free_slot), None)
        if container is None:
            name = sandbox_name()
            container = Container(key, name, start(name))
            self._containers.append(container)
        container.taken += 1
        container.served += 1
        try:
            await asyncio.shield(container.starting)
        except BaseException:
            self.release(container)
            raise
        return container

    def release(self, container: Container) -> None:
        """Releases a slot. Of the containers without a sandbox, stops those that failed or have reached `LIFETIME`, and all but `MAX_IDLE`
        of the others."""
        container.taken -= 1
        container.used = asyncio.get_running_loop().time()
        idle = sorted((other for other in self._containers if not other.taken), key=lambda other: other.used)
        reusable = [other for other in idle if other.has_free_slot][-MAX_IDLE:]
        self._drop([other for other in idle if other not in reusable])

    def close(self) -> None:
        """Stops every container."""
        self._drop(self._containers[:])

    def _drop(self, containers: Sequence[Container]) -> None:
        for container in containers:
            self._containers.remove(container)
            self._stop(container)
