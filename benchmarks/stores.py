"""Measures durable groups per second: raw syncs of the disk, the SQLite store as the driver uses it, and the Redis transport.

    python benchmarks/stores.py                     # on the disk of the temporary folder
    python benchmarks/stores.py --folder /data      # on a different disk

Each group has 20 KiB after compression. The SQLite store is written by concurrent callers of `DriverStore`, whose groups share commits,
next to a process that reads the ledger and the newest groups. The rounds alternate between the subjects, because the speed of a shared
machine changes; the best and the median round are printed, with the load average. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agentrl.cluster.process_host import LocalLauncher
from agentrl.experience import DriverStore, SqliteStore, driver_store
from agentrl.experience.redis_server import RedisServer
from agentrl.experience.redis_transport import RedisTransport
from agentrl.records import Group
from agentrl.testing.store_contract import make_group

GROUP_BYTES = 20 << 10
BATCH = 16
CALLERS = 2 * BATCH
"""While one half of the callers waits for a commit, the other half waits for the next one."""
_READER = """
import sys
from agentrl.experience import SqliteStore
store = SqliteStore(sys.argv[1])
print("reading", flush=True)
while True:
    entries = store.entries()
    store.groups([entry.index for entry in entries[-16:]])
"""


class CountedStore(SqliteStore):
    """A SQLite store that counts its commits."""

    commits = 0

    def put_all(self, groups: Sequence[Group]) -> tuple[bool, ...]:
        self.commits += 1
        return super().put_all(groups)


def prepared_groups(count: int) -> list[Group]:
    """Groups with random text, which compresses to half of its length."""
    return [make_group(index, random.Random(index).randbytes(GROUP_BYTES).hex()) for index in range(count)]


def time_syncs(folder: Path, groups: Sequence[Group]) -> float:
    """Groups per second of a file that is appended to and synced after each batch, without a database or encoding."""
    batch, began = random.randbytes(GROUP_BYTES * BATCH), time.perf_counter()
    with (folder / "raw").open("wb", buffering=0) as file:
        for _ in range(0, len(groups), BATCH):
            file.write(batch)
            os.fdatasync(file.fileno())
    return len(groups) / (time.perf_counter() - began)


def time_sqlite(folder: Path, groups: Sequence[Group], *, callers: int) -> tuple[float, float]:
    """Groups per second and per commit, next to a reader."""
    path = folder / f"{time.monotonic_ns()}.sqlite"

    async def write() -> tuple[float, float]:
        store = await DriverStore.open(partial(CountedStore, path))
        with subprocess.Popen([sys.executable, "-c", _READER, str(path)], stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None and await asyncio.to_thread(reader.stdout.readline) == b"reading\n"
            began, waiting = time.perf_counter(), iter(groups)

            async def call() -> None:
                for group in waiting:
                    await store.put(group)

            async with asyncio.TaskGroup() as writing:
                for _ in range(callers):
                    writing.create_task(call())
            seconds = time.perf_counter() - began
            reader.kill()
        commits = store.store.commits  # type: ignore[attr-defined]
        await store.close()
        return len(groups) / seconds, len(groups) / commits

    return asyncio.run(write())


def time_redis(folder: Path, groups: Sequence[Group]) -> float:
    """Groups per second that a worker adds in transactions of `BATCH`, each on the server's disk when it is acknowledged."""
    server = RedisServer(LocalLauncher(folder), folder / f"redis-{time.monotonic_ns()}")
    asyncio.run(server.start())
    try:
        server.wait_ready()
        transport, began = RedisTransport(server.url), time.perf_counter()
        for first in range(0, len(groups), BATCH):
            transport.append(groups[first : first + BATCH])
        return len(groups) / (time.perf_counter() - began)
    finally:
        asyncio.run(server.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--groups", type=int, default=1600, help="groups per round and subject (default: 1600)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    args = parser.parse_args()
    driver_store.MAX_PER_COMMIT = BATCH
    folder, groups = Path(tempfile.mkdtemp(dir=args.folder)), prepared_groups(args.groups)
    raw, rates, per_commit, loads = list[float](), dict[str, list[float]](), list[float](), list[float]()
    subjects: dict[str, Callable[[], float]] = {
        "SQLite, one caller": lambda: time_sqlite(folder, groups[: len(groups) // 8], callers=1)[0],
        f"Redis, {BATCH} per transaction": lambda: time_redis(folder, groups),
    }
    try:
        for _ in range(args.rounds):
            loads.append(os.getloadavg()[0])
            raw.append(time_syncs(folder, groups))
            rate, shared = time_sqlite(folder, groups, callers=CALLERS)
            rates.setdefault(f"SQLite, {CALLERS} callers", []).append(rate)
            per_commit.append(shared)
            for name, measure in subjects.items():
                rates.setdefault(name, []).append(measure())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.groups} groups of {GROUP_BYTES >> 10} KiB a round, {args.rounds} rounds; load {min(loads):.1f} to {max(loads):.1f}")
    print(f"a commit of SQLite had {statistics.median(per_commit):.1f} groups\n")
    print("| subject | groups per second, best round | median | best, share of raw syncs |\n|---|---|---|---|")
    print(f"| fdatasync, {BATCH} per sync | {max(raw):,.0f} | {statistics.median(raw):,.0f} | |")
    for name, values in rates.items():
        print(f"| {name} | {max(values):,.0f} | {statistics.median(values):,.0f} | {max(values) / max(raw):.0%} |")


if __name__ == "__main__":
    main()
