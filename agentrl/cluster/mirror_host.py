"""Hosts processes of a run on a machine that does not share the driver's disk. The processes use a mirror of the run folder.

The host serves the chunks of its mirror to other mirrors, even while chunks are still arriving.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cluster.link import Link, LinkLost
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.process_host import HostedProcess, ProcessHost
from agentrl.cluster.run_service import bytes_response
from agentrl.errors import InfrastructureError, LaunchError, UserError
from agentrl.gateway.http_server import HttpServer
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import check_source, is_key, json_response, key_of
from agentrl.protocols.cluster import PartCommand

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

WAIT_S = 8.0
"""Seconds to wait for a chunk that is arriving. Shorter than the deadline of the requesting mirror."""
_POLL_S = 0.01
_CONNECTIONS = 256
_READS = 8


class MirrorHost:
    """A `ProcessHost` whose processes use a mirror, and which serves the mirror's chunks to other hosts until `close`."""

    def __init__(self, mirror: Mirror, *, root: Path | None, host: str) -> None:
        self.folder, self._mirror, self._host = mirror.folder, mirror, host
        self._processes = ProcessHost(mirror.folder, root=root, host=host)
        self._stack = AsyncExitStack()

    @classmethod
    async def open(cls, folder: Path, link: Link, *, root: Path | None, host: str) -> MirrorHost:
        """Returns a host that serves chunks to other mirrors. Raises `InfrastructureError` if the address is not available.

        Args:
            folder: the mirror; created if absent. Parts of a run that are on the same host may share this mirror.
            link: the driver.
            host: address of this machine, for servers and for other mirrors.
        """
        opened = cls(Mirror(folder, link), root=root, host=host)
        await opened._stack.enter_async_context(relaying(opened._mirror, host=host))
        return opened

    async def start(self, command: PartCommand) -> HostedProcess:
        """Fetches the files that a part needs into the mirror, then starts the part. Raises `LaunchError` if the files cannot be fetched or
        no port is free, and `OSError` if the program cannot be executed."""
        await self.fetch(*command.needs)
        process = self._processes.start(command)
        process.fetch = self.fetch  # type: ignore[method-assign]
        return process

    async def fetch(self, *paths: str) -> None:
        """Fetches these files and folders of the run into the mirror. Deletes versions that the driver has deleted.

        Raises `LaunchError` if a file cannot be fetched.
        """
        try:
            for path in paths:
                await asyncio.to_thread(self._mirror.fetch, path)
            if paths:
                keep = [path.removeprefix("versions/") for path in paths if path.startswith("versions/")]
                await asyncio.to_thread(self._mirror.drop_extra, "versions", keep=keep, unsent=False)
        except (LinkLost, LookupError, InfrastructureError, UserError) as error:
            fix = "check the disk of that host, and its network to the driver"
            raise LaunchError(f"{', '.join(paths)} cannot be fetched to {self._host}: {error}\n  fix: {fix}") from error

    async def close(self) -> None:
        """Kills the processes that are still running and stops serving other mirrors. Raises the errors of `ProcessHost.close`."""
        await self._processes.close()
        await self._stack.aclose()


@asynccontextmanager
async def relaying(mirror: Mirror, *, host: str) -> AsyncIterator[None]:
    """During the block, serves the chunks of a mirror at an address of this host, so that mirrors on other hosts can fetch them."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    key, reads = secrets.token_urlsafe(32), asyncio.Semaphore(_READS)

    async def chunk(request: Request) -> Response:
        try:
            check_source(request.headers)
            if not is_key(key_of(request.headers), key):
                raise RequestError("wrong_key", "the key is missing or wrong")
        except RequestError as refused:
            return json_response({"error": refused.message}, refused.status)
        sha256, waited = request.path_params["sha256"], 0.0
        while not mirror.index.has(sha256) and sha256 in mirror.expected and waited < WAIT_S:
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
        async with reads:
            data = await asyncio.to_thread(mirror.index.read, sha256)
        if data is None:
            return json_response({"error": "this host does not have the chunk"}, 404)
        return bytes_response(data, kind="application/octet-stream")

    app = Starlette(routes=[Route("/chunks/{sha256}", chunk, methods=["GET"])])
    server = HttpServer(app=app, name="relay of a mirror", host=host, connections=_CONNECTIONS)
    await server.start()
    mirror.relay = server.url, key
    try:
        yield
    finally:
        mirror.relay = None
        await server.stop()
