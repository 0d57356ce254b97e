"""Sends groups from rollout workers to the driver through a Redis stream. The ledger in the experience store stays authoritative.

    worker: MULTI, XADD each group, EXEC --(stream)--> driver: XREADGROUP -> one commit of the store -> XACK and XDEL

Each step may fail and be repeated, so an entry may be delivered twice. The store keeps the first group with an index. An entry is removed
only after a commit that contains its group or a different group with the same index. Entries are untrusted input. Their size is bounded,
and an entry that is not a group is moved to the stream `damaged`, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from agentrl.base.database import compress, decompress
from agentrl.base.error_text import one_line_error
from agentrl.errors import GroupTooLarge, StoreError, UserError
from agentrl.experience.driver_store import DriverStore
from agentrl.protocols import GroupTransport
from agentrl.protocols.experience import Delivery
from agentrl.records import Group, codec

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 32 << 20
"""Maximum size of a compressed group. The server must reject longer values, so that no entry fills the driver's memory."""
MAX_GROUP_BYTES = 1 << 30
"""Maximum size of a decompressed group."""
BATCH = 16
"""Maximum number of groups that are added in one transaction or read at once."""
MAX_HELD = 256
"""Maximum number of entries that the driver has read but not stored.

Additional entries stay in the stream and are read again after `IDLE_S`.
"""
IDLE_S = 120.0
"""Seconds after which an entry that was delivered but not acknowledged is delivered again. This is longer than any commit takes."""

_READERS = "driver"  # consumer group
_KEPT_DAMAGED = 1000  # number of newest damaged entries that are kept
_KEPT_BYTES = 1 << 20  # maximum bytes of each of these entries
_SHOWN_CHARS = 200  # maximum characters of a response in an error message
_OLDEST = (7, 0)  # oldest supported server version; XAUTOCLAIM deletes trimmed entries from 7.0 on
_STALLED_S = 600.0  # maximum time for which MAX_HELD entries are held and none is stored; after a resume, a run needs only seconds
_CALL_S = 10.0  # a server that does not respond within this time counts as lost, and the call is repeated
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_REQUIRED = {
    "appendonly": ("yes", "an entry would not survive a restart of the server"),
    "appendfsync": ("always", "an entry would be lost if the machine fails within a second"),
    "maxmemory-policy": ("noeviction", "a full server would delete entries"),
    "proto-max-bulk-len": (str(MAX_ENTRY_BYTES), "a worker could store an entry that fills the driver's memory"),
}


class RedisTransport:
    """A `GroupTransport` that uses one database of a Redis server. Thread-safe. It connects on first use, and reconnects after a failure.

    Args:
        url: `redis://HOST:PORT/DB` or `unix:///PATH?db=DB`, with or without the password.
        password: used if the URL contains no password.
        run: prefix of the keys, needed if the database contains groups from several runs.
        give_up_s: seconds after which a call that the server has not accepted raises `StoreError`. Until then, the caller waits if the
            server is lost, is loading, or has no memory or disk space left.

    Raises `ValueError` if the URL is invalid.
    """

    def __init__(self, url: str, *, password: str = "", run: str = "", give_up_s: float = 300.0) -> None:
        retry = Retry(NoBackoff(), 0)  # `_answer` repeats calls
        within: dict[str, Any] = {"socket_timeout": _CALL_S, "socket_connect_timeout": _CALL_S, "retry": retry}
        self._redis = redis.Redis.from_url(url, password=password or None, protocol=2, **within)
        self._groups, self._aside = f"{run}groups", f"{run}damaged"
        self._give_up_s = give_up_s
        self._reader = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._cursor = b"0-0"  # delivered entries from this id on have not been taken over yet; empty if all have been
        self._closed = False
        self.damaged = 0

    def check_server(self) -> None:
        """Checks the version and the settings of the server.

        Raises `UserError` if the server is not a Redis server or rejects the password, if its version is below 7.0, if its settings cannot
        be read, or if it could lose accepted data or accept entries that fill the driver's memory. For unsuitable settings, the error
        contains the commands that correct them. Raises `StoreError` if the server does not respond.
        """
        try:
            version = str(self._answer(lambda: self._redis.info("server"))["redis_version"])
            if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
                raise UserError(f"the Redis server has version {version[:_SHOWN_CHARS]}", fix="install Redis 7.0 or newer")
            settings = {name: self._answer(lambda name=name: self._redis.config_get(name)).get(name) for name in _REQUIRED}  # type: ignore[misc]
            wrong = {
                name: str(value)[:_SHOWN_CHARS]
                for name, value in settings.items()
                if (int(value or 0) > MAX_ENTRY_BYTES if name == "proto-max-bulk-len" else value != _REQUIRED[name][0])
            }
        except redis.ResponseError as error:
            raise UserError(
                f"the settings of the Redis server cannot be read: {error}", fix="allow its user to run INFO and CONFIG GET"
            ) from error
        except UserError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            why = one_line_error(error)[:_SHOWN_CHARS]
            raise UserError(f"the server does not respond like a Redis server: {why}", fix="correct the address") from error
        if wrong:
            problems = "; ".join(f"{name} is {value}, so {_REQUIRED[name][1]}" for name, value in wrong.items())
            commands = "; ".join(f"CONFIG SET {name} {_REQUIRED[name][0]}" for name in wrong)
            raise UserError(f"the settings of the Redis server are unsuitable: {problems}", fix=f"redis-cli: {commands}; CONFIG REWRITE")

    def append(self, groups: Sequence[Group], *, leases: Sequence[str] = ()) -> None:
        """Adds either all of the groups or none of them to the stream. When the method returns, the groups are on the server's disk.

        Args:
            leases: the leases under which the groups were sampled, in the order of `groups`.

        Raises `GroupTooLarge` if a group is larger than `MAX_ENTRY_BYTES`.
        """
        pairs = zip(groups, leases or [""] * len(groups), strict=True)
        bodies = [(group.index, lease, compress(codec.to_json(group))) for group, lease in pairs]
        for index, _, body in bodies:
            if len(body) > MAX_ENTRY_BYTES:
                raise GroupTooLarge(f"group {index} has {len(body) >> 20} MiB, but the transport's limit is {MAX_ENTRY_BYTES >> 20} MiB")

        def add() -> None:
            with self._redis.pipeline(transaction=True) as batch:
                for index, lease, body in bodies:
                    batch.xadd(self._groups, {"group": index, "lease": lease, "body": body})
                batch.execute()

        self._answer(add)

    def claim(self, *, limit: int = BATCH, wait_s: float = 1.0) -> tuple[Delivery, ...]:
        """Returns the next entries that have not been acknowledged, starting with entries that were delivered before; empty if there are
        none within `wait_s` seconds (at most 5) or all of them are damaged.

        There is one driver per run, so a new reader, or a reader whose connection was lost, takes over all entries that were delivered but
        not acknowledged. After that, an entry is returned again only if it was delivered at least `IDLE_S` seconds ago.
        """
        while self._cursor:
            if entries := self._take_over(0.0, limit):
                return self._decoded(entries)
        block_ms = max(1, int(1000 * min(wait_s, _CALL_S / 2)))
        answer = self._answer(lambda: self._redis.xreadgroup(_READERS, self._reader, {self._groups: ">"}, count=limit, block=block_ms))
        entries = [entry for _, some in answer or () for entry in some]
        return self._decoded(entries or self._take_over(IDLE_S, limit))

    def acknowledge(self, ids: Collection[str]) -> None:
        """Removes entries from the stream. Call it only after the commit that contains their groups."""
        if ids:
            self._answer(lambda: self._remove(ids))

    def close(self) -> None:
        """Closes the connections. Calls in other threads raise `StoreError` at their next failure."""
        self._closed = True
        self._redis.close()

    def _take_over(self, idle_s: float, limit: int) -> list[Any]:
        """Takes over the entries, from the cursor on, that were delivered at least `idle_s` seconds ago and not acknowledged. Returns these
        entries."""
        start, idle_ms = self._cursor or b"0-0", int(1000 * idle_s)
        claim = partial(self._redis.xautoclaim, self._groups, _READERS, self._reader, idle_ms, start, count=limit)
        following, entries, *_ = self._answer(claim)
        if self._cursor and not idle_ms:  # idle entries do not include those in a response that was lost meanwhile
            self._cursor = b"" if following == b"0-0" else following
        return list(entries)

    def _decoded(self, entries: Iterable[tuple[bytes, Mapping[bytes, bytes] | None]]) -> tuple[Delivery, ...]:
        deliveries = []
        for identity, fields in entries:
            name = identity.decode()
            try:
                body = (fields or {}).get(b"body", b"")
                group = codec.from_json(Group, decompress(body, most=MAX_GROUP_BYTES))
                if (fields or {}).get(b"group") != str(group.index).encode():
                    raise ValueError(f"the entry contains group {group.index}, but its field `group` differs")
                if group.index < 0:
                    raise ValueError(f"group {group.index} is a residual, which only the store creates")
            except ValueError as error:
                self._move_damaged(name, fields or {}, one_line_error(error))
            else:
                lease = (fields or {}).get(b"lease", b"").decode(errors="replace")
                deliveries.append(Delivery(id=name, group=group, lease=lease))
        return tuple(deliveries)

    def _move_damaged(self, identity: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        """Moves a damaged entry to the stream `damaged`."""
        self.damaged += 1
        log.warning("entry %s of the Redis stream is not a group and is moved to the stream %s: %s", identity, self._aside, reason[:500])

        def move() -> None:
            what = {"entry": identity, "reason": reason[:2000], "body": fields.get(b"body", b"")[:_KEPT_BYTES]}
            try:
                with self._redis.pipeline(transaction=True) as batch:
                    batch.xadd(self._aside, what, maxlen=_KEPT_DAMAGED)  # type: ignore[arg-type]
                    batch.xack(self._groups, _READERS, identity)
                    batch.xdel(self._groups, identity)
                    batch.execute()
            except redis.RedisError as error:
                if not _is_full(error):
                    raise
                self._remove([identity])  # the server is full, and keeping the entry would leave no room for groups

        self._answer(move)

    def _remove(self, ids: Collection[str]) -> None:
        with self._redis.pipeline(transaction=True) as batch:
            batch.xack(self._groups, _READERS, *ids)
            batch.xdel(self._groups, *ids)
            batch.execute()

    def _answer(self, call: Callable[[], Any]) -> Any:
        """Returns the server's response to a call.

        Repeats the call while the server is lost, loading or full, for at most `give_up_s`. A rejected password raises `UserError`, and an
        invalid response raises `StoreError`. Other errors from redis-py are raised unchanged.
        """
        deadline, pause_s = time.monotonic() + self._give_up_s, _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except RecursionError as error:  # raised by the client's parser
                raise StoreError("the server does not respond like a Redis server: a response is nested too deeply") from error
            except redis.RedisError as error:
                if _lacks_readers(error):
                    self._create_readers()
                elif isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
                    raise UserError(f"the Redis server rejects the password: {one_line_error(error)}", fix="correct it") from error
                elif isinstance(error, redis.InvalidResponse):
                    raise StoreError(f"the server does not respond like a Redis server: {one_line_error(error)[:_SHOWN_CHARS]}") from error
                elif not _passes(error):
                    raise
                if self._closed:
                    raise StoreError("the connection to the Redis server is closed") from error
                if time.monotonic() + pause_s > deadline:
                    raise StoreError(
                        f"the Redis server did not accept groups for {self._give_up_s:g} s: {one_line_error(error)}\n"
                        "  fix: start it, or free its memory or disk; no acknowledged group is lost"
                    ) from error
                self._cursor = b"0-0"  # the server may have delivered entries in a response that was lost
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _create_readers(self) -> None:
        """Creates the stream and its consumer group, which a new server does not have."""
        with suppress(redis.RedisError):  # another reader created it, or the next call fails in the same way
            self._redis.xgroup_create(self._groups, _READERS, id="0", mkstream=True)


def _lacks_readers(error: redis.RedisError) -> bool:
    return isinstance(error, redis.ResponseError) and str(error).startswith("NOGROUP")


def _passes(error: redis.RedisError) -> bool:
    """Whether a call may succeed later, because the server is lost, is loading, or has no memory (OOM) or disk space (MISCONF) left."""
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | redis.BusyLoadingError) or _is_full(error)


def _is_full(error: redis.RedisError) -> bool:
    return isinstance(error, redis.OutOfMemoryError) or str(error).startswith(("OOM", "MISCONF"))


async def receive_groups(
    transport: GroupTransport,
    store: DriverStore,
    deliver: Callable[[Delivery], Awaitable[None]],
    forget: Callable[[int], None] = lambda index: None,
) -> None:
    """Delivers arriving groups until the call is cancelled. An entry is acknowledged when the store contains a group with the entry's
    index.

    Args:
        deliver: called once with each entry whose index is not stored. It must store the group, or a different group with the same index.
        forget: called with the index of each group after the group is stored.

    Raises `StoreError` if the store fails, if the transport stays unavailable, or if groups that the run does not sample leave no room for
    other groups. Entries that were not acknowledged are delivered again.
    """
    held: dict[str, int] = {}  # entry -> group index
    roomy = time.monotonic()  # last time at which there was room for an entry
    while True:
        for delivery in await asyncio.to_thread(transport.claim):
            if delivery.id in held or len(held) >= MAX_HELD:
                continue
            held[delivery.id] = delivery.group.index
            if not await store.has(delivery.group.index):
                await deliver(delivery)
        stored = [entry for entry, index in held.items() if await store.has(index)]
        await asyncio.to_thread(transport.acknowledge, stored)
        for entry in stored:
            forget(held.pop(entry))
        roomy = time.monotonic() if stored or len(held) < MAX_HELD else roomy
        if time.monotonic() - roomy > _STALLED_S:
            raise StoreError(
                f"the Redis stream has {len(held)} groups that this run does not sample, such as group {next(iter(held.values()))}, so no"
                " other group can be read\n  fix: empty the stream (redis-cli XTRIM), then continue with --resume, which samples the groups"
                " again"
            )
