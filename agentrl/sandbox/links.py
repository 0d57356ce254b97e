"""Waiting for a socket, and leaving nothing behind when the wait is given up: the event loop never watches one that is closed."""

from __future__ import annotations

import asyncio
import socket


async def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a listener that does not block. The caller bounds the wait."""
    await readable(listener)
    link, _ = listener.accept()
    link.setblocking(False)
    return link


async def readable(sock: socket.socket) -> None:
    """Returns once there is something to read, or somebody to accept. The caller bounds the wait."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
