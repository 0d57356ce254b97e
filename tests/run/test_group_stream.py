"""The Redis stream of a run: checks before the start, and real groups of workers that pass through a server that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import redis

from agentrl.cluster.process_host import LocalLauncher
from agentrl.config.recipe import Recipe
from agentrl.errors import GroupTooLarge, RecipeError, UserError
from agentrl.experience import DriverStore, SqliteStore, redis_server, redis_transport
from agentrl.experience.redis_server import RedisServer
from agentrl.experience.redis_transport import RedisTransport
from agentrl.records import Group
from agentrl.run import group_stream
from agentrl.run.group_stream import GroupStream, Outbox, check_stream, open_transport
from agentrl.run.worker import Worker
from agentrl.session import opening
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from agentrl.testing.store_contract import make_group
from tests.driving import Family, make_recipe, make_task, opened
from tests.run.test_workers import Drive, driving


def with_stream(**options: str) -> Recipe:
    store = {"ref": "redis", "options": options} if options else "redis"
    data = make_recipe().model_dump(mode="json") | {"store": store}
    return Recipe.model_validate(data | {"rollout": data["rollout"] | {"workers": 2}})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("run")
    server = RedisServer(LocalLauncher(folder), folder / "redis")
    asyncio.run(server.start())
    try:
        server.wait_ready()
        yield server
    finally:
        asyncio.run(server.close())


def address(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options of a recipe for a server that the run does not start."""
    password, _, path = server.url.removeprefix("unix://:").partition("@")
    monkeypatch.setenv("TEST_REDIS_PASSWORD", password)
    return {"url": f"unix://{path}", "password": "env:TEST_REDIS_PASSWORD"}


def test_a_password_in_a_recipe_is_an_error_without_the_password() -> None:
    for options in ({"url": "redis://:hunter2hunter2@example.com:6379/0"}, {"url": "redis://h:1/0", "password": "hunter2hunter2"}):
        with pytest.raises((RecipeError, ValueError), match=r"store\.options\.(url|password) contains") as error:
            with_stream(**options)
        assert "hunter2" not in str(error.value)


def test_a_missing_package_or_program_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    check_stream(make_recipe())
    with monkeypatch.context() as patch:
        patch.setattr(redis_server, "_PROGRAMS", ("no-such-program",))
        with pytest.raises(UserError, match="the program redis-server is not installed") as error:
            check_stream(with_stream())
        assert "redis-tools" in error.value.fix
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UserError, match="store=redis needs the package redis") as error:
        check_stream(with_stream())
    assert "[redis]" in error.value.fix
    with pytest.raises(UserError, match="store=redis needs the package redis"):
        open_transport({"url": "redis://h:1/0"})


@pytest.mark.parametrize(
    "options", [{"host": "h"}, {"password": "env:TEST_REDIS_PASSWORD"}, {"url": "http://h:1"}, {"url": "redis://h:x/0"}]
)
def test_options_that_are_not_an_address_are_an_error_with_an_example(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REDIS_PASSWORD", "secret-of-the-test")
    with pytest.raises(UserError, match=r"store\.options") as error:
        check_stream(with_stream(**options))
    assert "redis://HOST:PORT/DB" in error.value.fix and "secret-of-the-test" not in str(error.value)


@pytest.mark.slow
def test_a_server_that_may_lose_groups_or_is_unreachable_is_an_error_before_the_run(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, client = with_stream(**address(server, monkeypatch)), redis.Redis.from_url(server.url)
    check_stream(recipe)
    client.config_set("appendfsync", "everysec")
    try:
        with pytest.raises(UserError, match="would be lost if the machine fails") as error:
            check_stream(recipe)
        assert "CONFIG SET appendfsync always" in error.value.fix
    finally:
        client.config_set("appendfsync", "always")
    monkeypatch.setattr(group_stream, "_CHECK_S", 0.1)
    with pytest.raises(UserError, match=r"store\.options\.url: the Redis server did not accept groups for 0\.1 s") as error:
        check_stream(with_stream(url="unix:///tmp/no-such-socket"))
    assert "to let the run start one" in error.value.fix
    monkeypatch.setenv("TEST_REDIS_PASSWORD", "a-wrong-password")
    with pytest.raises(UserError, match="password") as error:
        check_stream(recipe)
    assert "a-wrong-password" not in str(error.value)


ANSWERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "text": b"+OK\r\n",
    "version": b"$24\r\nredis_version:7.banana\r\n\r\n",
    "levels": b"*1\r\n" * 100_000,
    "bytes": b"\xff\xfe\0\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_address_of_another_server_is_an_error_before_the_run_starts(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_stream, "_CHECK_S", 1.0)

    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while request := self.request.recv(4096):
                self.request.sendall(answer if b"INFO" in request else b"+OK\r\n" * request.count(b"*"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,)).start()
        try:
            with pytest.raises(UserError, match="does not respond like a Redis server"):
                check_stream(with_stream(url=f"redis://127.0.0.1:{other.server_address[1]}/0"))
        finally:
            other.shutdown()


class Run:
    """The driver of a run whose groups arrive through a stream. It stores them as `Rollouts` does."""

    def __init__(self, drive: Drive, stack: AsyncExitStack, store: DriverStore, recipe: Recipe) -> None:
        self.drive, self.stack, self.store, self.recipe = drive, stack, store, recipe

    async def open(self) -> RedisTransport:
        """Starts to receive; returns another connection to the stream."""
        leases = self.drive.leases
        folder, launcher = self.drive.folder, LocalLauncher(self.drive.folder)
        stream = GroupStream(self.recipe, folder, self.store, launcher=launcher, alert=self.drive.alerts.append)
        self.options = await self.stack.enter_async_context(stream.serving(lambda new: leases.arrive(new.lease, new.group), leases.forget))
        return open_transport(self.options)

    async def group(self, index: int) -> Group:
        group = await self.drive.leases.run_group(index, make_task(index))
        assert await self.store.put(group), "stored once"
        return group

    async def worker(self, name: str) -> asyncio.Task[None]:
        connection = self.drive.connect(name)
        self.stack.callback(connection.close)
        worker = Worker(connection, 2, Outbox(open_transport(self.options)))
        recipe, sandboxes = make_recipe(), ScriptedSandboxes(printing("3"))
        run = await self.stack.enter_async_context(opened(self.drive.folder / name, worker, sandboxes, recipe, Family()))
        checkpoints = opening.FolderCheckpoints(self.drive.folder / "running")
        running = asyncio.create_task(worker.run(replace(run.groups, checkpoints=checkpoints, on_attempt=worker.record_attempt)))
        self.stack.callback(running.cancel)
        return running


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_groups_of_workers_survive_a_server_that_dies_or_stops_and_are_stored_once(
    tmp_path: Path, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_stream, "_SILENT_S", 1.0)
    monkeypatch.setattr(redis_server, "_ANSWER_S", 0.5)
    monkeypatch.setattr(redis_transport, "_CALL_S", 1.0)
    async with driving(tmp_path) as drive, AsyncExitStack() as stack, asyncio.timeout(60):
        store = await DriverStore.open(partial(SqliteStore, tmp_path / "experience.sqlite"))
        stack.push_async_callback(store.close)
        run = Run(drive, stack, store, with_stream())
        transport = await run.open()
        await run.worker("a")
        await run.worker("b")
        groups = [asyncio.create_task(run.group(index)) for index in range(12)]
        while not (await store.entries()):
            await asyncio.sleep(0.02)
        pid = int(transport._redis.info("server")["process_id"])
        os.kill(pid, fault)
        assert [(await group).index for group in groups] == list(range(12))
        async with asyncio.timeout(10):
            while transport._redis.xlen(transport._groups) or drive.leases._leased:
                await asyncio.sleep(0.05)
        assert transport._redis.info("server")["process_id"] != pid
        assert [alert for alert in drive.alerts if "the Redis server was restarted" in alert]
        transport.append([make_group(3)])  # a worker of an earlier driver returns
        while transport._redis.xlen(transport._groups):
            await asyncio.sleep(0.05)
        assert len(await store.entries()) == 12 and not drive.leases._early
        secret = run.options["url"].removeprefix("unix://:").partition("@")[0].encode()
        assert len(secret) == 64 and not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]


@pytest.mark.slow
async def test_a_group_that_an_earlier_driver_did_not_read_is_not_sampled_again(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "prefix").write_text("earlier-")
    task, group = make_task(0), make_group(0)
    episodes = tuple(replace(scored, episode=replace(scored.episode, task_id=task.id, task_key=task.key)) for scored in group.episodes)
    RedisTransport(server.url, run="earlier-").append([replace(group, task_id=task.id, task_key=task.key, episodes=episodes)])
    async with driving(tmp_path) as drive, AsyncExitStack() as stack, asyncio.timeout(20):
        store = await DriverStore.open(partial(SqliteStore, tmp_path / "experience.sqlite"))
        stack.push_async_callback(store.close)
        run = Run(drive, stack, store, with_stream(**address(server, monkeypatch)))
        stream = await run.open()
        assert (await run.group(0)).episodes == episodes and not drive.served.requested
        while stream._redis.xlen("earlier-groups"):
            await asyncio.sleep(0.05)


async def test_groups_that_wait_together_are_one_transaction_and_one_that_is_too_large_is_declined() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.batches: list[list[tuple[int, str]]] = []

        def append(self, groups: list[Group], *, leases: list[str]) -> None:
            if any(group.index == 5 for group in groups):
                raise GroupTooLarge("too large")
            self.batches.append([(group.index, lease) for group, lease in zip(groups, leases, strict=True)])

    transport = Recorded()
    outbox = Outbox(transport)  # type: ignore[arg-type]
    sending = [asyncio.create_task(outbox.send(f"lease {index}", make_group(index))) for index in range(20)]
    await asyncio.sleep(0)
    running = asyncio.create_task(outbox.run())
    assert await asyncio.gather(*sending) == [index != 5 for index in range(20)]
    assert sorted(sent for batch in transport.batches for sent in batch) == sorted(
        (index, f"lease {index}") for index in range(20) if index != 5
    )
    assert [len(batch) for batch in transport.batches][-1] == 4, "the groups that waited together"
    running.cancel()
    assert redis_transport.BATCH == group_stream.BATCH
