"""The Redis stream of a run with `store=redis`. Rollout workers add finished groups to the stream, and the driver reads them.

If the option `url` is not set, the run starts a server, whose data is stored in `RUN/redis`. The options are `url` (`redis://HOST:PORT/DB`)
and `password`, a reference such as `env:NAME`. The driver passes both options to workers in the response to `GET /spec`, never in a file or
an argument.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base import secrets
from agentrl.base.files import write_atomically
from agentrl.base.installation import import_optional
from agentrl.base.liveness import RestartAlert, Restarts
from agentrl.config.recipe import Recipe
from agentrl.errors import GroupTooLarge, InfrastructureError, StoreError, UserError
from agentrl.experience import DriverStore
from agentrl.protocols import GroupTransport, Launcher
from agentrl.protocols.experience import Delivery
from agentrl.records import Group

if TYPE_CHECKING:
    from agentrl.experience.redis_server import RedisServer
    from agentrl.experience.redis_transport import RedisTransport

BATCH = 16
"""Maximum number of groups in one transaction."""
_WATCH_S = 0.25
_SILENT_S = 20.0
_RESTARTS = 5  # maximum number of restarts in a row
_SOUND_S = 120.0
_CHECK_S = 10.0  # maximum time to reach a server before the run starts


def check_stream(recipe: Recipe) -> None:
    """Raises `UserError` if a package or a program is missing, if an option is invalid, or if the server at `url` is unreachable or may
    lose groups. Does nothing for other stores."""
    if recipe.store.ref != "redis":
        return
    import_optional("redis", "redis", needed_for="store=redis")
    from agentrl.experience.redis_server import find_program
    from agentrl.experience.redis_transport import RedisTransport

    options = _options(recipe)
    if not options:
        find_program()
        return
    try:
        transport = RedisTransport(**options, give_up_s=_CHECK_S)
    except ValueError as error:
        raise UserError(f"store.options.url: {error}", fix="use redis://HOST:PORT/DB") from None
    try:
        transport.check_server()
    except StoreError as error:
        raise UserError(f"store.options.url: {error}", fix="start the server, or remove url to let the run start one") from error
    finally:
        transport.close()


def open_transport(options: dict[str, Any]) -> RedisTransport:
    """Returns a worker's connection to the stream. Raises `UserError` if the package is not installed."""
    import_optional("redis", "redis", needed_for="store=redis")
    from agentrl.experience.redis_transport import RedisTransport

    return RedisTransport(**options)


class GroupStream:
    """The driver's side of the stream.

    Args:
        folder: the run folder.
        alert: called with a message for the user when the run's server is restarted.
    """

    def __init__(self, recipe: Recipe, folder: Path, store: DriverStore, *, launcher: Launcher, alert: Callable[[str], None]) -> None:
        self.restarts = 0
        self._launcher = launcher
        self._folder, self._store, self._alert = folder / "redis", store, alert
        self._options = _options(recipe)

    @asynccontextmanager
    async def serving(self, deliver: Callable[[Delivery], Awaitable[None]], forget: Callable[[int], None]) -> AsyncIterator[dict[str, Any]]:
        """Receives groups during the block. Yields the options with which workers on any machine call `open_transport`.

        Args:
            deliver, forget: see `agentrl.experience.redis_transport.receive_groups`.

        Raises `InfrastructureError` if the run's server does not start or fails too often in a row, and the errors of `check_server` and
        `receive_groups`.
        """
        from agentrl.experience.redis_server import RedisServer
        from agentrl.experience.redis_transport import receive_groups

        server = None if self._options else RedisServer(self._launcher, self._folder)
        try:
            if server is not None:
                await server.start()
                await asyncio.to_thread(server.wait_ready)
            options = self._options or {"url": server.shared_url if server else ""}
            run = {"run": await asyncio.to_thread(self._prefix)}
            transport = open_transport(options | run | ({"url": server.url} if server else {}))
            try:
                await asyncio.to_thread(transport.check_server)
                async with asyncio.TaskGroup() as tasks:
                    receiving = [tasks.create_task(receive_groups(transport, self._store, deliver, forget))]
                    if server is not None:
                        receiving.append(tasks.create_task(self._keep(server)))
                    yield options | run
                    for task in receiving:
                        task.cancel()
            finally:
                transport.close()
        finally:
            if server is not None:
                await server.close()

    async def _keep(self, server: RedisServer) -> None:
        """Restarts the run's server whenever it exits or stops responding, until it fails too often in a row."""
        restarts, clock = Restarts(sound_s=_SOUND_S), asyncio.get_running_loop().time
        answered = clock()
        while True:
            await asyncio.sleep(_WATCH_S)
            if not await server.restart_if_dead():
                if await asyncio.to_thread(server.answers):
                    answered = clock()
                elif clock() - answered > _SILENT_S:
                    server.kill()
                continue
            restarts.progress()
            self.restarts += 1
            if (failures := restarts.failed()) > _RESTARTS:
                raise InfrastructureError(f"the Redis server failed {failures} times in a row: see {self._folder / 'redis.log'}")
            self._alert(RestartAlert("redis", "the Redis server was restarted and still has all groups that it had accepted"))
            await asyncio.to_thread(server.wait_ready)
            restarts.started()
            answered = clock()

    def _prefix(self) -> str:
        """Returns the prefix of the run's keys. The prefix is unique, so that a different run in a folder with the same name has different
        keys."""
        path = self._folder / "prefix"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"agentrl-{uuid.uuid4().hex}-")
        return path.read_text(encoding="utf-8")


class Outbox:
    """Sends the groups of one worker. Groups that are waiting at the same time are added in one transaction."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport = transport
        self._waiting: asyncio.Queue[tuple[str, Group, asyncio.Future[bool]]] = asyncio.Queue()

    async def send(self, lease: str, group: Group) -> bool:
        """Returns True when the group has been added durably, and False if it is too large for the stream. `run` must be active."""
        sent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((lease, group, sent))
        return await sent

    async def run(self) -> None:
        """Adds the waiting groups to the stream until the task is cancelled. Raises `StoreError` if a group cannot be added; the calls of
        `send` that wait for it then do not return."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                await self._add(batch)
            except GroupTooLarge:
                for group in batch:
                    try:
                        await self._add([group])
                    except GroupTooLarge:
                        _resolve(group[2], False)

    async def _add(self, batch: list[tuple[str, Group, asyncio.Future[bool]]]) -> None:
        groups, leases = [group for _, group, _ in batch], [lease for lease, _, _ in batch]
        await asyncio.to_thread(self._transport.append, groups, leases=leases)
        for _, _, sent in batch:
            _resolve(sent, True)


def _resolve(sent: asyncio.Future[bool], result: bool) -> None:
    if not sent.done():
        sent.set_result(result)


def _options(recipe: Recipe) -> dict[str, Any]:
    """Returns the options `url` and `password` if the run uses an existing server; empty if the run starts a server. Raises `UserError` if
    an option is invalid or its secret cannot be read."""
    options = secrets.resolve_options({name: value for name, value in recipe.store.options.items() if name != "keep_steps"})
    unknown = sorted(set(options) - {"url", "password"})
    if unknown or not all(isinstance(value, str) for value in options.values()) or ("password" in options and "url" not in options):
        raise UserError(
            f"store.options of store=redis: {'unknown ' + ', '.join(unknown) if unknown else 'a value is not a string, or url is missing'}",
            fix="use store.options.url=redis://HOST:PORT/DB, store.options.password=env:NAME, or no options to let the run start a server",
        )
    return options
