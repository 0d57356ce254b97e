"""Waiting for sockets. A cancelled wait removes its watcher, so that the event loop never watches a closed socket."""

from __future__ import annotations

import asyncio
import socket


async def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a non-blocking listener. The caller sets the deadline."""
    await readable(listener)
    link, _ = listener.accept()
    link.setblocking(False)
    return link


async def readable(sock: socket.socket) -> None:
    """Waits until there is data to read or a connection to accept. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
