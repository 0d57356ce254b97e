"""A server whose start fails or is cancelled leaves its port free."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from agentrl.errors import InfrastructureError
from agentrl.gateway import http_server
from agentrl.gateway.http_server import HttpServer


async def app(scope: Any, receive: Any, send: Any) -> None:
    """An application that no test calls."""


async def starts(port: int) -> int:
    """Starts and stops a server. Returns its port."""
    server = HttpServer(app=app, name="test server", host="127.0.0.1", port=port)
    await server.start()
    await server.stop()
    return server.port


async def test_an_address_that_is_in_use_is_an_error_with_a_fix() -> None:
    server = HttpServer(app=app, name="test server", host="192.0.2.1")
    with pytest.raises(
        InfrastructureError, match=r"the test server cannot listen on 192\.0\.2\.1:0: .*\n  fix: use a different host or port"
    ):
        await server.start()


@pytest.mark.parametrize("cause", ["slow", "cancelled"])
async def test_a_server_that_did_not_start_leaves_its_port_free(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await starts(0)
    server = HttpServer(app=app, name="test server", host="127.0.0.1", port=port)
    if cause == "slow":
        with monkeypatch.context() as patch, pytest.raises(InfrastructureError, match="the test server did not start within 0 s"):
            patch.setattr(http_server, "START_S", 0.0)
            await server.start()
    else:
        starting = asyncio.create_task(server.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    await asyncio.sleep(0.05)
    assert await starts(port) == port


@pytest.mark.parametrize("cancellations", [0, 1, 2])
async def test_a_server_whose_start_hangs_leaves_neither_its_task_nor_its_port(cancellations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(server: uvicorn.Server, sockets: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)

    port = await starts(0)
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "serve", hang)
        patch.setattr(http_server, "START_S", 60.0 if cancellations else 0.01)
        patch.setattr(http_server, "CLOSE_S", 60.0 if cancellations > 1 else 0.2)
        starting = asyncio.create_task(HttpServer(app=app, name="test server", host="127.0.0.1", port=port).start())
        for _ in range(cancellations):
            await asyncio.sleep(0.01)
            starting.cancel()
        await asyncio.wait({starting})
    if cancellations > 1:
        await asyncio.sleep(0.2)  # the task is cancelled, but the second cancellation does not wait for it
    assert starting.cancelled() == (cancellations > 0) and (cancellations or isinstance(starting.exception(), InfrastructureError))
    assert "test server" not in {task.get_name() for task in asyncio.all_tasks()}
    assert await starts(port) == port
