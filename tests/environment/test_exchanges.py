"""The clients of remote environments, tested with recorded exchanges of real servers and with the real servers.

`exchanges/` has answers of openenv 0.10.0, ors-sdk 0.1.0 and nemo-gym 0.7.0. The real OpenEnv and ORS servers run in the environment
`openenv` (`agentrl env sync openenv`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from agentrl.environment.remote import RemoteOpener
from agentrl.records import EnvironmentSpec
from tests.environment import scenarios
from tests.environment.web_servers import HttpRequest, answer, http_server, real_server, reply

RECORDED = sorted((Path(__file__).parent / "exchanges").glob("*.json"))


@pytest.fixture
async def opener() -> AsyncIterator[RemoteOpener]:
    opened = RemoteOpener()
    yield opened
    await opened.close()
    for server in opened.servers.values():
        assert (server.closed, server.lost) == (server.opened, 0)


def expected(path: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    recorded = json.loads(path.read_text())
    return [tuple(result) for result in recorded["results"]], recorded["exchanges"]


@pytest.mark.parametrize("path", [path for path in RECORDED if not path.stem.startswith("openenv")], ids=lambda path: path.stem)
async def test_the_client_sends_the_recorded_http_requests(opener: RemoteOpener, path: Path) -> None:
    results, exchanges = expected(path)
    remaining = iter(exchanges)

    async def respond(request: HttpRequest, _: asyncio.StreamWriter) -> bytes:
        exchange = next(remaining)
        session = request.headers.get("x-session-id") or request.headers.get("cookie", "")
        sent = (request.method, request.path, request.body.decode(), session)
        assert sent == tuple(exchange[name] for name in ("method", "path", "body", "session"))
        return answer(exchange["answer"].encode(), exchange["status"], **exchange["headers"])

    async with http_server(respond) as url:
        assert await getattr(scenarios, path.stem)(opener, url) == results
    assert next(remaining, None) is None


@pytest.mark.parametrize("path", [path for path in RECORDED if path.stem.startswith("openenv")], ids=lambda path: path.stem)
async def test_the_client_sends_the_recorded_web_socket_messages(opener: RemoteOpener, path: Path) -> None:
    results, exchanges = expected(path)
    remaining = iter(exchanges)

    async def session(socket: ServerConnection) -> None:
        async for message in socket:
            if json.loads(message)["type"] == "close":
                return
            exchange = next(remaining)
            assert message == exchange["sent"]
            await socket.send(exchange["answer"])

    def page(_: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        exchange = next(remaining)
        assert request.path == exchange["path"]
        return reply(exchange["answer"].encode(), exchange["status"])

    async with serve(session, "127.0.0.1", 0, process_request=page) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        assert await getattr(scenarios, path.stem)(opener, url) == results
    assert next(remaining, None) is None


DRIVER = """
import asyncio, sys
from agentrl.environment.remote import RemoteOpener
from agentrl.records import EnvironmentSpec

async def main():
    opener = RemoteOpener()
    environments = [await opener.open(EnvironmentSpec(ref=sys.argv[1])) for _ in range(3)]
    print("open", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def all_ended(url: str) -> None:
    """Returns when the server has ended all environments that it created."""

    def counts() -> dict[str, int]:
        with urllib.request.urlopen(f"{url}/counts", timeout=10) as page:
            return dict(json.load(page))

    async with asyncio.timeout(20):
        while (now := await asyncio.to_thread(counts))["ended"] < now["created"]:
            await asyncio.sleep(0.05)
    assert now["created"] > 0


@pytest.fixture(scope="module")
def openenv() -> Iterator[str]:
    with real_server("openenv_server.py", "0", "4") as url:
        yield url


@pytest.mark.environments
@pytest.mark.parametrize("name", ["corridor", "board", "tools", "echo"])
async def test_a_real_openenv_server_answers_as_recorded(openenv: str, opener: RemoteOpener, name: str) -> None:
    path = next(path for path in RECORDED if path.stem == f"openenv_{name}")
    assert await getattr(scenarios, path.stem)(opener, f"{openenv}/{name}") == expected(path)[0]
    await opener.close()
    await all_ended(openenv)


@pytest.mark.environments
async def test_a_real_ors_server_answers_as_recorded(opener: RemoteOpener) -> None:
    with real_server("ors_server.py", "0") as url:
        assert await scenarios.ors_sums(opener, url) == expected(next(path for path in RECORDED if path.stem == "ors_sums"))[0]
        await opener.close()
        await all_ended(f"{url}/sums")


@pytest.mark.environments
async def test_a_killed_driver_leaves_no_session_at_a_real_server(openenv: str, opener: RemoteOpener) -> None:
    ref = f"openenv:{openenv}/few"  # it allows three sessions
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, ref], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "open\n"
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    await all_ended(openenv)
    environments = [await opener.open(EnvironmentSpec(ref=ref)) for _ in range(3)]
    for environment in environments:
        await environment.close()


@pytest.mark.environments
async def test_more_episodes_than_a_real_server_has_sessions_wait(openenv: str, opener: RemoteOpener) -> None:
    async def episode(seed: int) -> float:
        environment = await opener.open(EnvironmentSpec(ref=f"openenv:{openenv}/few", seed=seed))
        action = "left" if '"goal": -2' in (await environment.reset()).text else "right"
        await environment.step(action)
        step = await environment.step(action)
        await environment.close()
        return step.reward

    assert await asyncio.gather(*map(episode, range(30))) == [1.0] * 30
    await opener.close()
    await all_ended(openenv)
