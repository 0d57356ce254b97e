"""Sessions at a real OpenEnv server on this machine: opened, closed and lost, and the memory of both sides. See `environments.py`.

Needs `agentrl env sync openenv`. In each wave all sessions are open at once, play an episode of three messages, and end.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Callable

from agentrl.environment.remote import RemoteOpener
from agentrl.records import EnvironmentSpec
from tests.environment.web_servers import real_server

SESSIONS, EPISODES = 1_000, 10_000


def memory(pid: int) -> str:
    """Returns the resident memory and the open files of a process."""
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    return f"{pages * os.sysconf('SC_PAGE_SIZE') >> 20} | {len(os.listdir(f'/proc/{pid}/fd'))}"


async def play(url: str, pid: int, report: Callable[[str], None]) -> RemoteOpener:
    """Plays the episodes."""
    opener, seeds, started = RemoteOpener(), iter(range(EPISODES)), time.monotonic()
    all_open, reported = asyncio.Barrier(SESSIONS), 0

    async def worker() -> None:
        nonlocal reported
        for seed in seeds:
            environment = await opener.open(EnvironmentSpec(ref=f"openenv:{url}/corridor", seed=seed, options={"sessions": SESSIONS}))
            action = "left" if json.loads((await environment.reset()).text)["goal"] < 0 else "right"
            await all_open.wait()
            step = await environment.step(action)
            while not step.done:
                step = await environment.step(action)
            assert step.reward == 1.0
            await environment.close()
            (server,) = opener.servers.values()
            if (ended := server.closed + server.lost) >= reported + EPISODES // 10:
                reported = ended
                row = f"{server.opened:,} | {server.closed:,} | {server.lost} | {memory(os.getpid())} | {memory(pid)}"
                report(f"| {time.monotonic() - started:.0f} | {row} |")

    await asyncio.gather(*(worker() for _ in range(SESSIONS)))
    return opener


def openenv() -> list[str]:
    """1,000 concurrent sessions over 10,000 episodes."""
    rows = ["| s | opened | closed | lost | MiB | files | MiB of the server | files |", "|---|---|---|---|---|---|---|---|"]
    with real_server("openenv_server.py", "0", str(SESSIONS)) as url:
        with urllib.request.urlopen(f"{url}/counts") as page:
            pid = json.load(page)["pid"]
        opener = asyncio.run(play(url, pid, rows.append))
        with urllib.request.urlopen(f"{url}/counts") as page:
            counts = json.load(page)
    (server,) = opener.servers.values()
    all_ended = server.opened == server.closed == EPISODES and counts["created"] == counts["ended"]
    return [*rows, f"- the server created {counts['created']:,} and ended {counts['ended']:,}: {'no leak' if all_ended else 'a leak'}"]
