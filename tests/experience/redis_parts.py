"""The processes of the path from a rollout worker to the ledger, for tests that kill them.

python -m tests.experience.redis_parts worker URL GROUPS      appends groups in batches
python -m tests.experience.redis_parts unanswered URL GROUPS  dies when the server has a batch and before it reads the answer
python -m tests.experience.redis_parts driver URL FILE        stores the groups in a SQLite file
python -m tests.experience.redis_parts unacknowledged URL FILE  the same, and acknowledges nothing
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import redis

from agentrl.experience import DriverStore, SqliteStore, redis_transport
from agentrl.experience.redis_transport import BATCH, RedisTransport, receive_groups
from agentrl.protocols.experience import Delivery
from agentrl.records import Group
from agentrl.testing.store_contract import make_group


def padded_group(index: int) -> Group:
    """Returns a group of 20 KiB after compression."""
    return make_group(index, random.Random(index).randbytes(20 << 10).hex())


def work(transport: RedisTransport, groups: int) -> None:
    for first in range(0, groups, BATCH):
        transport.append([padded_group(index) for index in range(first, min(first + BATCH, groups))])
        print("appended", flush=True)
        time.sleep(random.uniform(0, 0.1))


def die_unanswered(url: str) -> None:
    """Kills this process after the server has received a batch and before its answer is read."""
    execute = redis.client.Pipeline._execute_transaction

    def die(pipeline: Any, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        observer = redis.Redis.from_url(url)
        before = observer.xlen("groups")

        def read_response(*args: Any, **options: Any) -> Any:
            while observer.xlen("groups") == before:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        connection.read_response = read_response
        return execute(pipeline, connection, commands, raise_on_error)

    redis.client.Pipeline._execute_transaction = die  # type: ignore[method-assign]


async def drive(transport: RedisTransport, path: Path) -> None:
    store, storing = await DriverStore.open(partial(SqliteStore, path)), set[asyncio.Task[bool]]()

    async def deliver(delivery: Delivery) -> None:
        storing.add(asyncio.create_task(store.put(delivery.group)))

    print("driving", flush=True)
    await receive_groups(transport, store, deliver)


def main(role: str, url: str, rest: str) -> None:
    redis_transport._CALL_S = 1.0
    transport = RedisTransport(url, give_up_s=60)
    if role == "unanswered":
        die_unanswered(url)
    if role == "unacknowledged":
        transport.acknowledge = lambda ids: time.sleep(60) if ids else None  # type: ignore[method-assign]
    if role in ("worker", "unanswered"):
        work(transport, int(rest))
    else:
        asyncio.run(drive(transport, Path(rest)))


if __name__ == "__main__":
    main(*sys.argv[1:])
