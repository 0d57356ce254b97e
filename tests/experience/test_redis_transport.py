"""The path from a rollout worker through a real Redis server to the ledger. Tests kill or stop parts of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from agentrl.cluster.process_host import LocalLauncher
from agentrl.errors import StoreError, UserError
from agentrl.experience import DriverStore, SqliteStore, redis_transport
from agentrl.experience.redis_server import RedisServer
from agentrl.experience.redis_transport import BATCH, RedisTransport, receive_groups
from agentrl.protocols.experience import Delivery
from agentrl.records import Group
from agentrl.testing.store_contract import StoreContract, make_group
from tests.experience.redis_parts import padded_group
from tests.ledgers import indices

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from _running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """A server without entries. The tests kill it, so it is started if it is dead."""
    asyncio.run(shared.restart_if_dead())
    shared.wait_ready()
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


def _running(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(LocalLauncher(folder), folder / "redis")
    asyncio.run(server.start())
    try:
        server.wait_ready()
        yield server
    finally:
        asyncio.run(server.close())


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.experience.redis_parts", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(ready: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def assert_stored_once(path: Path, groups: int) -> None:
    store = SqliteStore(path)
    assert indices(store) == tuple(range(groups))
    assert store.groups([0, groups - 1]) == (padded_group(0), padded_group(groups - 1))
    store.close()


def stored(path: Path) -> int:
    if not path.exists():
        return 0
    store = SqliteStore(path)
    try:
        return len(indices(store))
    finally:
        store.close()


@pytest.mark.parametrize("fault", ["worker", "server", "driver", "silence"])
def test_a_part_that_dies_loses_and_duplicates_nothing(server: RedisServer, tmp_path: Path, fault: str) -> None:
    """Each part is killed twice while groups are delivered. `silence` stops the server for longer than a call may take."""
    path, groups, client = tmp_path / "experience.sqlite", 16 * BATCH, redis.Redis.from_url(server.url)
    with ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(started(*arguments))

        driver = start("driver", server.url, str(path))
        assert read_line(driver) == "driving\n"
        worker = start("worker", server.url, str(groups))
        for batches in (2, 3):
            assert [read_line(worker) for _ in range(batches)] == ["appended\n"] * batches
            assert worker.poll() is None and driver.poll() is None, "groups are being delivered"
            if fault == "worker":
                worker.kill()
                worker = start("worker", server.url, str(groups))
            elif fault == "server":
                os.kill(server.pid, signal.SIGKILL)
                wait_until(lambda: asyncio.run(server.restart_if_dead()))
            elif fault == "driver":
                driver.kill()
                os.kill(worker.pid, signal.SIGSTOP)  # until the next driver reads
                driver = start("driver", server.url, str(path))
                assert read_line(driver) == "driving\n"
                os.kill(worker.pid, signal.SIGCONT)
            elif batches == 2:
                os.kill(server.pid, signal.SIGSTOP)
                time.sleep(2.5)
                os.kill(server.pid, signal.SIGCONT)
        assert worker.wait(60) == 0
        wait_until(lambda: stored(path) == groups and client.xlen("groups") == 0)
    assert_stored_once(path, groups)
    assert not client.exists("damaged") and client.xpending("groups", "driver")["pending"] == 0


def test_a_worker_killed_before_it_reads_the_answer_repeats_its_batch(server: RedisServer, tmp_path: Path) -> None:
    path, client = tmp_path / "experience.sqlite", redis.Redis.from_url(server.url)
    with started("unanswered", server.url, str(BATCH)) as worker:
        assert worker.wait(60) == -signal.SIGKILL and read_line(worker) == ""
    assert client.xlen("groups") == BATCH, "the server has the batch"
    with started("worker", server.url, str(BATCH)) as worker:
        assert worker.wait(60) == 0
    assert client.xlen("groups") == 2 * BATCH
    with started("driver", server.url, str(path)):
        wait_until(lambda: stored(path) == BATCH and client.xlen("groups") == 0)
    assert_stored_once(path, BATCH)


def test_a_driver_killed_between_commit_and_acknowledgement_stores_nothing_twice(server: RedisServer, tmp_path: Path) -> None:
    path, client = tmp_path / "experience.sqlite", redis.Redis.from_url(server.url)
    RedisTransport(server.url).append([padded_group(index) for index in range(BATCH)])
    with started("unacknowledged", server.url, str(path)):
        wait_until(lambda: stored(path) == BATCH)
    assert client.xlen("groups") == BATCH and client.xpending("groups", "driver")["pending"] == BATCH
    with started("driver", server.url, str(path)):
        wait_until(lambda: client.xlen("groups") == 0)
    assert_stored_once(path, BATCH)


async def test_a_full_server_makes_workers_wait_and_loses_nothing(server: RedisServer, tmp_path: Path) -> None:
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
    try:
        impatient = RedisTransport(server.url, give_up_s=0.3)
        with pytest.raises(StoreError, match=r"did not accept groups for 0.3 s: .*maxmemory"):
            for first in range(0, 1000, BATCH):
                impatient.append([padded_group(index) for index in range(first, first + BATCH)])
        assert client.xlen("groups") == first, "an interrupted transaction adds none of its groups"
        late = [padded_group(index) for index in range(first, first + BATCH)]
        waiting = asyncio.create_task(asyncio.to_thread(RedisTransport(server.url).append, late))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        store = DriverStore(lambda: SqliteStore(tmp_path / "experience.sqlite"))

        async def deliver(delivery: Delivery) -> None:
            await store.put(delivery.group)

        receiving = asyncio.create_task(receive_groups(RedisTransport(server.url), store, deliver))
        await waiting
        while len(await store.entries()) < first + BATCH:
            await asyncio.sleep(0.02)
        receiving.cancel()
        await asyncio.wait([receiving])
        await store.close()
        assert_stored_once(tmp_path / "experience.sqlite", first + BATCH)
    finally:
        client.config_set("maxmemory", 1 << 30)


def test_damaged_entries_are_moved_with_the_reason(server: RedisServer) -> None:
    client, transport = redis.Redis.from_url(server.url), RedisTransport(server.url)
    valid = redis_transport.compress(redis_transport.codec.to_json(make_group(7)))
    torn = valid[:-1]
    bodies: list[dict[Any, Any]] = [
        {"x": "y"},
        {"group": 0, "body": os.urandom(500)},
        {"group": 7, "body": torn},
        {"group": 8, "body": valid},
        {"group": -2, "body": redis_transport.compress(redis_transport.codec.to_json(make_group(-2)))},
    ]
    for body in bodies:
        client.xadd("groups", body)
    client.xadd("groups", {"group": 7, "body": redis_transport.compress(b'{"index": 7}')})
    transport.append([make_group(1)])
    (delivery,) = transport.claim()
    assert delivery.group == make_group(1) and transport.damaged == 6
    reasons = [fields[b"reason"].decode() for _, fields in client.xrange("damaged")]
    assert len(reasons) == 6 and "the entry contains group 7, but" in reasons[3] and "task_id" in reasons[5]
    assert "group -2 is a residual" in reasons[4], "it would count as a residual, or be held forever"
    transport.acknowledge([delivery.id])
    assert client.xlen("groups") == 0
    with pytest.raises(redis.RedisError):  # an entry that is too large for any driver
        client.xadd("groups", {"group": 1, "body": bytes(redis_transport.MAX_ENTRY_BYTES + 1)})


def test_entries_of_a_reader_that_died_are_delivered_to_the_next(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = RedisTransport(server.url), RedisTransport(server.url)
    first.append([make_group(index) for index in range(3)])
    assert [delivery.group.index for delivery in first.claim(limit=2)] == [0, 1]
    assert [delivery.group.index for delivery in second.claim()] == [0, 1], "a new driver takes over"
    assert [delivery.group.index for delivery in second.claim()] == [2]
    assert second.claim(wait_s=0.01) == ()
    monkeypatch.setattr(redis_transport, "IDLE_S", 0.0)
    assert [delivery.group.index for delivery in second.claim(wait_s=0.01)] == [0, 1, 2], "unacknowledged entries are delivered again"


def test_entries_in_a_response_that_was_lost_are_delivered_by_the_next_call(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = RedisTransport(server.url)
    assert transport.claim(wait_s=0.01) == ()
    read = transport._redis.xreadgroup

    def lose_once(*arguments: Any, **options: Any) -> Any:
        read(*arguments, **options)
        monkeypatch.setattr(transport._redis, "xreadgroup", read)
        raise redis.ConnectionError("the connection was lost")

    monkeypatch.setattr(transport._redis, "xreadgroup", lose_once)
    transport.append([make_group(0)])
    assert transport.claim(wait_s=0.01) == ()
    assert [delivery.group.index for delivery in transport.claim(wait_s=0.01)] == [0], "not only after IDLE_S"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("appendonly", "no", "would not survive a restart"),
        ("appendfsync", "everysec", "would be lost if the machine fails within a second"),
        ("maxmemory-policy", "allkeys-lru", "would delete entries"),
        ("proto-max-bulk-len", str(512 << 20), "fills? the driver's memory|could fill the driver's memory"),
    ],
)
def test_a_server_that_may_lose_groups_is_rejected_with_the_fix(server: RedisServer, name: str, value: str, message: str) -> None:
    transport, client = RedisTransport(server.url), redis.Redis.from_url(server.url)
    transport.check_server()
    before = client.config_get(name)[name]
    client.config_set(name, value)
    try:
        with pytest.raises(UserError, match=message) as error:
            transport.check_server()
        command = error.value.fix.removeprefix("redis-cli: ").partition(";")[0].split()
        client.execute_command(*command)
        transport.check_server()
    finally:
        client.config_set(name, before)


def test_a_wrong_password_and_an_old_server_are_errors_at_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the Redis server rejects the password"):
        RedisTransport(server.url.replace("unix://:", "unix://:x")).claim()
    monkeypatch.setattr(redis_transport, "_OLDEST", (99, 0))
    with pytest.raises(UserError, match=r"the Redis server has version 7\.") as error:
        RedisTransport(server.url).check_server()
    assert "install Redis" in error.value.fix


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time; from pathlib import Path; from agentrl.cluster.process_host import LocalLauncher\n"
        "from agentrl.experience.redis_server import RedisServer\n"
        "folder = Path(sys.argv[1]); server = RedisServer(LocalLauncher(folder), folder / 'redis'); asyncio.run(server.start())\n"
        "server.wait_ready(); print(server.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(read_line(owner))
    assert Path(f"/proc/{pid}/comm").read_text().strip() in ("redis-server", "redis-check-rdb")
    password_in_files = [path for path in tmp_path.rglob("*") if path.is_file() and b"requirepass" in path.read_bytes()]
    assert not password_in_files and b"requirepass" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    owner.kill()
    owner.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3])


class RelayedStore(SqliteStore):
    """A SQLite store whose groups arrive through Redis."""

    def __init__(self, run_dir: Path, recipe: Any) -> None:
        super().__init__(run_dir / "experience.sqlite")
        self._transport = RedisTransport(os.environ["TEST_REDIS_URL"], run=str(run_dir))

    def put(self, group: Group) -> bool:
        self._transport.append([group])
        new: dict[int, bool] = {}
        while group.index not in new:
            deliveries = self._transport.claim(wait_s=0.05)
            for delivery, stored_now in zip(deliveries, self.put_all([delivery.group for delivery in deliveries]), strict=True):
                new[delivery.group.index] = stored_now or new.get(delivery.group.index, False)
            self._transport.acknowledge([delivery.id for delivery in deliveries])
        return new[group.index]


class TestRelayedStore(StoreContract):
    store = "tests.experience.test_redis_transport:RelayedStore"
    test_an_index_is_stored_once = None  # there is one driver

    @pytest.fixture(autouse=True)
    def _with_server(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEST_REDIS_URL", server.url)


async def test_entries_of_groups_that_the_run_does_not_sample_end_it_instead_of_stalling_it(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_transport, "MAX_HELD", 3)
    monkeypatch.setattr(redis_transport, "_STALLED_S", 0.5)
    monkeypatch.setattr(redis_transport, "IDLE_S", 0.1)
    transport, store = RedisTransport(server.url), await DriverStore.open(partial(SqliteStore, tmp_path / "experience.sqlite"))
    monkeypatch.setattr(transport, "claim", partial(transport.claim, wait_s=0.01))

    async def deliver(delivery: Delivery) -> None:
        if delivery.group.index < 9:
            await store.put(delivery.group)

    transport.append([make_group(index) for index in (0, 1, *range(9_000, 9_005))])
    with pytest.raises(StoreError, match="3 groups that this run does not sample, such as group 9000"):
        async with asyncio.timeout(30):
            await receive_groups(transport, store, deliver)
    assert [entry.index for entry in await store.entries()] == [0, 1]
    await store.close()
