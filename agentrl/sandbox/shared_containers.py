"""Containers that several sandboxes share, as the driver sees them: a connection to each one's keeper, and who has which slot.

What costs in a container is the way through the daemon, a tenth of a second of CPU time; the isolation is cheap. So one container is the
outer wall of up to `SLOTS` sandboxes at a time and `LIFETIME` in all, each of which has walls of its own inside it (see
`agentrl.sandbox.inside.room`). A container that fails takes those with it that are in it, and no other.
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

log = logging.getLogger(__name__)

SLOTS = 16
LIFETIME = 256
KEEPER_BYTES = 64 << 20
"""Memory that a container has besides its sandboxes'."""
MAX_IDLE = 8
"""Containers without a sandbox that are kept for the next one; the one unused for longest goes first."""
ENDING_S = 60.0
"""How long a sandbox may take to end after its first process has been killed; then its container takes no further sandbox."""
RETRY_S = 0.1
PACKET = 1 << 17
_SHORT_OF = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC)


class CannotShare(SandboxError):
    """This machine's containers cannot hold sandboxes: the message says what is refused there."""


@dataclass(slots=True)
class SharedSandbox:
    """A sandbox in a shared container. `failure`: what its first process said was in the way, and the kernel's number for it."""

    id: int
    failure: str = ""
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def refused(self) -> bool:
        """Whether it failed for something that may meet every other one here, and not for want of anything."""
        return bool(self.failure) and self.code not in _SHORT_OF


class KeeperClient:
    """The connection to the keeper of one container. The first thing out of order ends it, and with it everything in the container."""

    def __init__(self, link: socket.socket, name: str) -> None:
        self.name = name
        self.gone = asyncio.Event()
        self.retired = False  # takes no further sandbox; the present ones continue
        self.cannot = ""
        self._link = link
        self._rooms: dict[int, SharedSandbox] = {}
        self._numbers = itertools.count()
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link, self._read)

    async def ready(self) -> None:
        """Waits for the keeper's word; the caller bounds the wait. Raises `CannotShare`, `SandboxError`."""
        await self._ready.wait()
        if self.cannot:
            raise CannotShare(self.cannot)
        if self.gone.is_set():
            raise SandboxError(f"container {self.name} ended before it was ready")

    def open(self, room: Mapping[str, Any], handed: Mapping[str, int]) -> SharedSandbox:
        """Has a sandbox made that is handed these descriptors. What comes of it is seen at its own connection. Raises `SandboxError`."""
        made = SharedSandbox(next(self._numbers))
        if not self._asked({"op": "open", "id": made.id, "handed": list(handed), **room}, list(handed.values())):
            raise SandboxError(f"container {self.name} does not read its requests")
        self._rooms[made.id] = made
        return made

    async def end(self, room: SharedSandbox, patience_s: float) -> None:
        """Returns once nothing of the sandbox is left; it is killed when `patience_s` are over. Raises `SandboxError`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await room.ended.wait()
        if room.ended.is_set():
            return
        try:
            async with asyncio.timeout(ENDING_S):
                while not self._asked({"op": "end", "id": room.id}, []):
                    await asyncio.sleep(RETRY_S)
                await room.ended.wait()
        except TimeoutError:
            self.retired = True
            raise SandboxError(
                f"a sandbox in container {self.name} did not end within {ENDING_S:.0f} s; the container ends with its last other sandbox"
            ) from None

    def close(self) -> None:
        """Hangs up, which ends the container. Idempotent."""
        if not self.gone.is_set():
            self._loop.remove_reader(self._link)
            self._link.close()
            self.gone.set()
            self._ready.set()
            for room in self._rooms.values():
                room.ended.set()
            self._rooms.clear()

    def _asked(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> bool:
        """Sends a request; False if the keeper has not read enough of the earlier ones, for example because it gets no CPU time."""
        if self.gone.is_set():
            raise SandboxError(f"container {self.name} is gone")
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise SandboxError(f"container {self.name} takes no request: {error}") from error
        return True

    def _read(self) -> None:
        try:
            data = self._link.recv(PACKET)
            if not data:
                raise SandboxError("it has ended")
            self._heed(json.loads(data))
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SandboxError) as error:
            if self._rooms:
                log.warning("container %s with %d sandboxes is gone: %s", self.name, len(self._rooms), error)
            self.close()

    def _heed(self, said: Any) -> None:
        if not isinstance(said, dict):
            raise ValueError("no words of a keeper")
        if "ready" in said or "cannot" in said:
            self.cannot = str(said.get("cannot", ""))[:500]
            self._ready.set()
            return
        room = self._rooms[said["id"]]
        if "failed" in said:
            room.failure, room.code = str(said["failed"])[:500], said["errno"]
        else:
            room.ended.set()
            del self._rooms[room.id]


class Container:
    """One shared container: its keeper, once that has said that it is ready, and how many slots of it are taken."""

    def __init__(self, name: str, starting: Awaitable[KeeperClient]) -> None:
        self.name = name
        self.starting = asyncio.ensure_future(starting)
        self.taken = 0
        self.served = 0
        self.used = 0.0  # when a slot of it was given back last
        self.starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # marked as seen: the callers may have gone

    @property
    def failed(self) -> bool:
        """Whether it takes no further sandbox."""
        if not self.starting.done():
            return False
        if self.starting.cancelled() or self.starting.exception() is not None:
            return True
        return self.starting.result().gone.is_set() or self.starting.result().retired

    @property
    def has_room(self) -> bool:
        return self.taken < SLOTS and self.served < LIFETIME and not self.failed


Start = Callable[[], Container]
Stop = Callable[[Container], None]


class ContainerPool:
    """The shared containers of a backend, by what makes two sandboxes fit into one. `stop` is told of each that is done with."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._containers: dict[Hashable, list[Container]] = {}

    async def acquire(self, key: Hashable, start: Start) -> Container:
        """A container with a slot for the caller, who gives it back with `give_back`. Raises what its start raises."""
        container = next((container for container in self._containers.get(key, ()) if container.has_room), None)
        if container is None:
            container = start()
            self._containers.setdefault(key, []).append(container)
        container.taken += 1
        container.served += 1
        try:
            await asyncio.shield(container.starting)
        except BaseException:
            self.release(container)
            raise
        return container

    def release(self, container: Container) -> None:
        """Gives a slot back; containers that are used up, have failed or are too many without a sandbox are stopped."""
        container.taken -= 1
        container.used = asyncio.get_running_loop().time()
        idle = sorted((other for here in self._containers.values() for other in here if not other.taken), key=lambda other: other.used)
        kept = [other for other in idle if other.has_room][-MAX_IDLE:]
        for other in idle:
            if other not in kept:
                self._drop(other)

    def _drop(self, container: Container) -> None:
        for key, here in list(self._containers.items()):
            if container in here:
                here.remove(container)
                self._stop(container)
            if not here:
                del self._containers[key]

    def close(self) -> None:
        """Stops every container."""
        for here in self._containers.values():
            for container in here:
                self._stop(container)
        self._containers.clear()
