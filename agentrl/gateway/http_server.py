"""An HTTP server within this process, for untrusted clients, with bounded connections and without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import InfrastructureError
from agentrl.gateway.connections import bounded

if TYPE_CHECKING:
    from uvicorn import Server

START_S = 10.0
CLOSE_S = 2.0


@dataclass(slots=True, eq=False)
class HttpServer:
    """Serves an ASGI application on one address, from `start` to `stop`.

    Args:
        name: name of the server in error messages.
        host: an address of this machine.
        port: 0 means any free port.
        connections: maximum number of concurrent connections. Requests on additional connections receive status 503.
    """

    app: Any
    name: str
    host: str
    port: int = 0
    connections: int = 64
    _server: Server | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address of a started server, without a path."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listens and serves. Raises `InfrastructureError` if the address is not available or the server does not start in time."""
        import uvicorn

        listener = self._listen()
        config = uvicorn.Config(
            self.app,
            http=bounded(),
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=self.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        server = _quiet_server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name=self.name)
        try:
            async with asyncio.timeout(START_S):
                while not server.started:
                    if task.done():
                        raise InfrastructureError(f"the {self.name} did not start: {task.exception()!r}")
                    await asyncio.sleep(0.002)
        except BaseException as error:
            server.should_exit = True
            try:
                await asyncio.wait({task}, timeout=CLOSE_S)
            finally:  # also if this call is cancelled a second time
                task.cancel()
                for started in getattr(server, "servers", ()):  # uvicorn closes them only if it has started completely
                    started.close()
                listener.close()
            await asyncio.wait({task}, timeout=CLOSE_S)
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"the {self.name} did not start within {START_S:g} s") from None
            raise
        self._server, self._task, (self.host, self.port) = server, task, listener.getsockname()[:2]

    async def wait(self) -> None:
        """Waits until a started server exits, and raises its error, if any. Returns at once if the server is not running."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stops serving. Requests in progress have one second to finish. Does nothing if the server is not running."""
        server, task = self._server, self._task
        self._server = self._task = None
        if server is None or task is None:
            return
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await task

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With an explicit protocol, asyncio disables Nagle's algorithm, which would cost 40 ms per request.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            failed = f"the {self.name} cannot listen on {self.host}:{self.port}: {error.strerror or error}"
            raise InfrastructureError(f"{failed}\n  fix: use a different host or port") from error
        return listener


def _quiet_server(config: Any) -> Server:
    """Returns a uvicorn server that does not handle the process's signals."""
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet(config)
