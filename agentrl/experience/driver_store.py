"""The driver's experience store. One thread opens it and executes every call, so the event loop never encodes a group or waits for the
disk.

All groups that arrive during a commit are stored by the next commit (group commit). A disk that syncs 100 times per second can therefore
store thousands of groups per second. `put` returns after the sync that includes its group.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import StoreError
from agentrl.protocols import ExperienceStore, GroupCommit
from agentrl.records import Group, LedgerEntry

MAX_WAITING = 256
"""Maximum number of calls that wait for the thread. Additional callers wait until one of these calls has finished."""
MAX_PER_COMMIT = 64
"""Maximum number of groups in one commit."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[ExperienceStore], Any]
    result: Future[Any]
    group: Group | None = None  # the group that the call stores


class DriverStore:
    """An `ExperienceStore` for coroutines. Calls are executed in the order in which they arrive.

    An accepted call is executed even if its caller is cancelled, and `close` waits for it. A store that implements `GroupCommit` commits
    groups together. Any other store writes them one by one, on the same thread. Each method raises the errors of the store.

    Args:
        factory: opens the store on the thread that uses it. If `factory` raises an error, every call raises the same error.
    """

    def __init__(self, factory: Callable[[], ExperienceStore]) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._slots = asyncio.Semaphore(MAX_WAITING)
        self._closed: Future[None] | None = None
        self._opened: Future[ExperienceStore] = Future()
        self._thread = threading.Thread(target=self._work, args=(factory,), name="experience store", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, factory: Callable[[], ExperienceStore]) -> DriverStore:
        """Returns a `DriverStore` after its store is open. Raises the errors of the factory. If this call is cancelled, the thread closes
        the store."""
        store = cls(factory)
        try:
            await asyncio.shield(asyncio.wrap_future(store._opened))
        except BaseException:
            store._end()
            raise
        return store

    @property
    def store(self) -> ExperienceStore:
        """The open store, for calls outside the driver's event loop. Not every store supports calls from a different thread."""
        return self._opened.result()

    async def put(self, group: Group) -> bool:
        """Stores a group durably and returns True. If a group with this index exists, stores nothing and returns False."""
        return await self._accept(lambda store: store.put(group), group)

    async def has(self, index: int) -> bool:
        """Whether a group is stored."""
        return await self.call(lambda store: store.has(index))

    async def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """See `ExperienceStore.entries`."""
        return await self.call(lambda store: store.entries(first=first, step=step))

    async def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """See `ExperienceStore.groups`."""
        wanted = tuple(indices)
        return await self.call(lambda store: store.groups(wanted))

    async def call(self, function: Callable[[ExperienceStore], T]) -> T:
        """Calls `function` with the store, on the store's thread, and returns the result."""
        return await self._accept(function)

    async def close(self) -> None:
        """Closes the store after all accepted calls have finished. Later calls raise `StoreError`. Idempotent."""
        if self._closed is None:
            self._closed = self._end()
        await asyncio.shield(asyncio.wrap_future(self._closed))

    def _end(self) -> Future[None]:
        """Makes the thread close the store and exit after all accepted calls."""
        closed: Future[None] = Future()
        self._calls.put(_Call(lambda store: store.close(), closed))
        self._calls.put(None)
        return closed

    async def _accept(self, function: Callable[[ExperienceStore], T], group: Group | None = None) -> T:
        await self._slots.acquire()
        if self._closed is not None:
            self._slots.release()
            raise StoreError("the experience store is closed")
        result: Future[T] = Future()
        self._calls.put(_Call(function, result, group))
        running = asyncio.wrap_future(result)
        running.add_done_callback(lambda _: self._slots.release())
        return await asyncio.shield(running)

    def _work(self, factory: Callable[[], ExperienceStore]) -> None:
        """Executes calls until the store is closed."""
        _settle(self._opened, factory)
        waiting = deque[_Call | None]()
        while True:
            while not waiting or (len(waiting) < MAX_WAITING and not self._calls.empty()):
                waiting.append(self._calls.get())
            puts: list[tuple[_Call, Group]] = []
            while waiting and len(puts) < MAX_PER_COMMIT and (call := waiting[0]) is not None and call.group is not None:
                puts.append((call, call.group))
                waiting.popleft()
            if puts:
                self._commit(puts)
            elif (call := waiting.popleft()) is None:
                return
            else:
                self._execute(call)

    def _execute(self, call: _Call) -> None:
        _settle(call.result, lambda: call.function(self._opened.result()))

    def _commit(self, puts: Sequence[tuple[_Call, Group]]) -> None:
        """Stores groups in one commit. If a group cannot be encoded, only its call fails. If the store fails, all of the calls fail."""
        if len(puts) > 1 and self._opened.exception() is None and isinstance(store := self._opened.result(), GroupCommit):
            try:
                stored = store.put_all([group for _, group in puts])
            except StoreError as error:
                for call, _ in puts:
                    copy = StoreError(*error.args)  # several tasks add their tracebacks to it
                    copy.__cause__ = error.__cause__
                    call.result.set_exception(copy)
                return
            except Exception:  # raised by the encoding of one group, before anything was stored
                pass
            else:
                for (call, _), new in zip(puts, stored, strict=True):
                    call.result.set_result(new)
                return
        for call, _ in puts:
            self._execute(call)


def _settle(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:  # a user-supplied store may raise anything; the caller receives it
        result.set_exception(error)
