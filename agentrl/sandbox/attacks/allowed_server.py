"""The only server of the host that attacks on the proxy may reach: lax on purpose, and it records forbidden requests."""

from __future__ import annotations

import asyncio
import contextlib
import re

MAX_HEAD = 1 << 20
FORBIDDEN = b"/forbidden"
"""A path that attacks request in hidden requests, or after the end of one."""


class AllowedServer:
    """Answers request after request on a connection, and discards what comes after `PUT /sink`.

    `trouble` names requests that the proxy must not forward: hidden ones, and ones for another host.
    """

    def __init__(self) -> None:
        self.trouble: list[str] = []
        self.port = 0

    async def __aenter__(self) -> AllowedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\n\r\n")
                self._look(head)
                if head.startswith(b"PUT /sink"):
                    while await reader.read(1 << 16):
                        pass
                size = re.search(rb"(?im)^content-length:\s*(\d+)", head)
                if size is not None:
                    await reader.readexactly(int(size[1]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nallowed")
                await writer.drain()
        writer.transport.abort()

    def _look(self, head: bytes) -> None:
        hosts = re.findall(rb"(?im)^host:\s*(\S*)", head)
        if FORBIDDEN in head or hosts != [b"127.0.0.1:%d" % self.port]:
            self.trouble.append(f"the allowed server was sent {head[:200]!r}")
