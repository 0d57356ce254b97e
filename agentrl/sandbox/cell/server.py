"""The cell: a process in a container or pod that opens bubblewrap sandboxes for drivers on other machines.

Each sandbox has one connection to its driver, over which the cell forwards the bytes of the exec server unread. The sandbox ends with the
connection: when the driver closes it or dies, or when the driver's machine is silent for 30 s. Drivers do not see each other's sandboxes:
only the driver that opened a sandbox receives the token that other requests about the sandbox require.

A cell does not access a network for a program. The cell joins a program's connection to the proxy with a waiting connection from the
driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from agentrl.base.error_text import one_line_error
from agentrl.base.processes import available_memory
from agentrl.errors import AgentRLError, SandboxError, SandboxUnavailable, UserError
from agentrl.records import SandboxSpec
from agentrl.sandbox import cleanup, egress, images, limits, server_code
from agentrl.sandbox.bubblewrap import BubblewrapBackend, unavailable_reason
from agentrl.sandbox.cell import wire
from agentrl.sandbox.frames import encode
from agentrl.sandbox.inside.isolation import Groups
from agentrl.sandbox.waiting import ClosesOnce, spawn

log = logging.getLogger(__name__)

MAX_SANDBOXES = 64
HANDSHAKE_S = 10.0
OWN_MEMORY_MB = 256
"""Memory reserved for the cell's process, which sandboxes do not get."""
_MAX_STRANGERS = 64  # maximum number of connections that have not shown the key yet
_BACKLOG = 1024
_MAX_TUNNELS = 4  # maximum number of one sandbox's tunnels that wait for a program
_TUNNEL_S = 15.0
_BUFFER_BYTES = 1 << 18
_PIECE = 1 << 16
_MEBIBYTE = 1 << 20


@dataclass(slots=True)
class _Tunnel:
    """A driver's connection that waits for a program's connection."""

    sock: socket.socket
    proof: bytes
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class _Tunnels:
    """Joins each connection that a program opens to the proxy with the next waiting tunnel (see `agentrl.sandbox.egress.Server`)."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[_Tunnel] = asyncio.Queue(_MAX_TUNNELS)

    async def serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            async with asyncio.timeout(_TUNNEL_S):
                tunnel = await self._take()
            try:
                for sock, option in ((link, socket.SO_RCVBUF), (tunnel.sock, socket.SO_SNDBUF)):
                    sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)  # or the kernel lets them grow to megabytes
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(link, tunnel.sock))
                    group.create_task(_copy(tunnel.sock, link))
            except* OSError:
                pass
            finally:
                tunnel.ended.set()

    def add(self, tunnel: _Tunnel) -> None:
        """Adds a waiting tunnel. If too many tunnels wait, closes the oldest tunnel: a driver offers one tunnel at a time, so it must have
        lost the oldest."""
        if self.waiting.full():
            self.waiting.get_nowait().ended.set()
        self.waiting.put_nowait(tunnel)

    async def _take(self) -> _Tunnel:
        """Waits for a tunnel whose driver is still connected, sends the reply to that driver, and returns the tunnel."""
        while True:
            tunnel = await self.waiting.get()
            try:
                if _has_ended(tunnel.sock):
                    raise ConnectionResetError
                await asyncio.get_running_loop().sock_sendall(tunnel.sock, tunnel.proof + wire.packed({"ok": True}))
                return tunnel
            except OSError:
                tunnel.ended.set()
            except BaseException:
                tunnel.ended.set()
                raise

    def log_refusals(self) -> None:
        """Does nothing, because the driver's proxy logs the rejected requests."""

    def close(self) -> None:
        """Closes the waiting tunnels."""
        while not self.waiting.empty():
            self.waiting.get_nowait().ended.set()


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end, which must not have sent anything, has closed the connection. Raises `OSError` if the connection was lost."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _PIECE):
        await loop.sock_sendall(target, data)
    target.shutdown(socket.SHUT_WR)


class _Sandboxes(BubblewrapBackend):
    """Bubblewrap sandboxes whose images are in the cache. A spec names an image by its key."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tunnels: WeakValueDictionary[str, _Tunnels] = WeakValueDictionary()  # by the name of the sandbox

    def _load(self, image: str) -> images.Image:
        stored = images.Image(name=image, recipe=images.StoredImage(key=image), cache=images.cache_folder())
        if not stored.rootfs.exists() and not stored.tarball.exists():
            raise SandboxUnavailable(f"the cell has no sandbox image {image}", fix="rebuild the cell's container image from this project")
        return stored

    def _listener(self, name: str, spec: SandboxSpec, folder: Path) -> egress.Listener:
        tunnels = self.tunnels[name] = _Tunnels()
        return egress.EgressListener(name, spec, folder, server=tunnels)


@dataclass(frozen=True, slots=True)
class _Running:
    """A sandbox of this cell."""

    relieve: Callable[[], Awaitable[bool]]
    tunnels: _Tunnels | None


class Cell(ClosesOnce):
    """Opens sandboxes for drivers that have `key`: at most `sandboxes` at a time, and only while `memory_mb` is enough for their limits.
    By default, `memory_mb` is the container's memory minus `OWN_MEMORY_MB`. Raises `UserError` if `key` has fewer than 16 characters.

    `replaceable`: drivers may send a replacement for the exec server, as the attack suite does. The replacement starts with the rights that
    the exec server needs to isolate itself, so a driver that sends one controls the cell and the sandboxes of all other drivers.
    """

    def __init__(self, key: str, *, sandboxes: int = MAX_SANDBOXES, memory_mb: int = 0, replaceable: bool = False) -> None:
        if len(key) < wire.SHORTEST_KEY:
            raise UserError(f"the cell's key has only {len(key)} characters", fix=f"use at least {wire.SHORTEST_KEY}: openssl rand -hex 32")
        _open_control_groups()
        self._key, self._replaceable = key.encode(), replaceable
        self._free, self._free_mb = sandboxes, memory_mb or available_memory() // _MEBIBYTE - OWN_MEMORY_MB
        self._backend = _Sandboxes(run_label="cell", root=Path("/"))
        self._running: dict[str, _Running] = {}  # by token
        self._strangers = asyncio.Semaphore(_MAX_STRANGERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def __str__(self) -> str:
        return f"room for {self._free} sandboxes and {self._free_mb} MiB"

    async def start(self, host: str, port: int) -> int:
        """Starts serving and returns the port. Raises `UserError` if the address cannot be used."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise UserError(
                f"the cell cannot listen at {host}:{port}: {error.strerror}", fix="choose a different address with --listen"
            ) from None
        self._listener.setblocking(False)
        spawn(self._accept(self._listener), self._tasks)
        return int(self._listener.getsockname()[1])

    async def _close(self) -> None:
        """Closes every connection, which also closes every sandbox."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._backend.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._strangers.acquire()
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # no descriptor is free
                log.warning("cannot accept a connection: %s", error)
                self._strangers.release()
                await asyncio.sleep(1.0)
                continue
            spawn(self._serve(sock), self._tasks)

    async def _serve(self, sock: socket.socket) -> None:
        """Serves a connection and closes it."""
        with sock:
            try:
                try:
                    wire.prepare_socket(sock)
                    async with asyncio.timeout(HANDSHAKE_S):
                        message, proof = await wire.admit(sock, self._key)
                finally:
                    self._strangers.release()
                await self._answer(sock, message, proof)
            except (OSError, SandboxError, ValueError) as error:  # a TimeoutError is an OSError
                log.info("a connection ended: %s", one_line_error(error))

    async def _answer(self, sock: socket.socket, message: dict[str, Any], proof: bytes) -> None:
        operation, running = message.pop("op", None), self._running.get(str(message.get("token")))
        reply: dict[str, Any] = {"ok": True}
        if operation == "open":
            await self._open(sock, wire.OpenRequest.parse(message), proof)
            return
        if operation == "prepare":
            reply = await self._prepare(wire.OpenRequest.parse(message))
        elif running is None:
            reply = _failure("gone", "the cell has no such sandbox")
        elif operation == "relieve":
            reply["relieved"] = await running.relieve()
        elif operation == "tunnel" and running.tunnels is not None:
            tunnel = _Tunnel(sock, proof)
            running.tunnels.add(tunnel)  # `_Tunnels.serve` replies, once a program connects
            await tunnel.ended.wait()
            return
        else:
            reply = _failure("refused", "the sandbox does not support this operation")
        await _send(sock, proof, reply)

    async def _prepare(self, request: wire.OpenRequest) -> dict[str, Any]:
        """Prepares the image. Returns the reply."""
        if request.code != wire.code_version():
            return _failure("refused", "the cell has a different version of agentrl: use one image for driver and cells")
        try:
            await self._backend.prepare(request.spec)
        except (AgentRLError, OSError) as error:
            return _failure("refused" if isinstance(error, UserError) else "failed", one_line_error(error))
        return {"ok": True}

    async def _open(self, sock: socket.socket, request: wire.OpenRequest, proof: bytes) -> None:
        """Opens a sandbox for a connection, and forwards bytes until the driver or the exec server closes the connection. Returns when
        nothing of the sandbox is left."""
        async with asyncio.timeout(HANDSHAKE_S):
            program = await wire.receive_exactly(sock, request.program_bytes)
        if program and not self._replaceable:
            await _send(sock, proof, _failure("refused", "the cell does not accept a replacement of the exec server"))
            return
        reply, memory = await self._prepare(request), request.spec.memory_mb
        if reply["ok"] and (self._free < 1 or self._free_mb < memory):
            reply = _failure("full", str(self))
        if not reply["ok"]:
            await _send(sock, proof, reply)
            return
        self._free, self._free_mb, token = self._free - 1, self._free_mb - memory, secrets.token_hex(16)
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    server = stack.enter_context(server_code.as_file(program)) if program else None
                    sandbox = await self._backend.open(request.spec, server=server)
                    stack.push_async_callback(sandbox.close)
                    reader, writer, relieve = await sandbox.detach()
                except (AgentRLError, OSError) as error:
                    await _send(sock, proof, _failure("failed", one_line_error(error)))
                    return
                stack.callback(writer.transport.abort)
                running = self._running[token] = _Running(relieve, self._backend.tunnels.get(sandbox.id))
                if running.tunnels is not None:
                    stack.callback(running.tunnels.close)
                stack.callback(self._running.pop, token)  # runs first, so that no tunnel arrives after `close`
                await _send(sock, proof, {"ok": True, "token": token}, encode({"id": 0, "ok": True, "version": 1}))
                await _pass_on(sock, reader, writer)
        finally:
            self._free, self._free_mb = self._free + 1, self._free_mb + memory


async def _send(sock: socket.socket, proof: bytes, reply: wire.Message, more: bytes = b"") -> None:
    async with asyncio.timeout(HANDSHAKE_S):
        await asyncio.get_running_loop().sock_sendall(sock, proof + wire.packed(reply) + more)


def _failure(why: str, message: str) -> dict[str, Any]:
    return {"ok": False, "why": why, "message": message[:1000]}


async def _pass_on(sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes between a driver's connection and an exec server until one of them closes the connection."""
    loop = asyncio.get_running_loop()

    async def inwards() -> None:
        while data := await loop.sock_recv(sock, _PIECE):
            writer.write(data)
            await writer.drain()

    async def outwards() -> None:
        while data := await reader.read(_PIECE):
            await loop.sock_sendall(sock, data)

    tasks = [asyncio.create_task(copy()) for copy in (inwards, outwards)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _open_control_groups() -> None:
    """Remounts the control groups of a container as writable, so that root can limit each sandbox."""
    groups = Groups(str(limits.CGROUPS))
    if os.geteuid() == 0 and not os.access(groups.folder("memory"), os.W_OK):
        with contextlib.suppress(OSError):  # if the container has no right to do this, limits are per process
            groups.open_up()


def run_cell(key: str, listen: str, *, sandboxes: int = MAX_SANDBOXES, memory_mb: int = 0) -> None:
    """Runs `serve_cell`. If this process is process 1 of a container, runs `serve_cell` in a child process, reaps the orphaned processes of
    sandboxes, and exits with the child's status."""
    child = os.fork() if os.getpid() == 1 else 0
    if not child:
        asyncio.run(serve_cell(key, listen, sandboxes=sandboxes, memory_mb=memory_mb))
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        ended, status = os.wait()
        if ended == child:
            raise SystemExit(os.waitstatus_to_exitcode(status) or 0)


async def serve_cell(key: str, listen: str, *, sandboxes: int = MAX_SANDBOXES, memory_mb: int = 0) -> None:
    """Serves until SIGTERM or SIGINT, then closes all sandboxes. Raises `UserError` if the key or the address cannot be used, and
    `SandboxUnavailable` if bubblewrap does not work."""
    if problem := await asyncio.to_thread(unavailable_reason):
        raise SandboxUnavailable(
            f"a cell needs bubblewrap: {problem}",
            fix="install bubblewrap; a pod needs hostUsers: false, procMount: Unmasked and seccompProfile: Unconfined",
        )
    try:
        await asyncio.to_thread(cleanup.prune)  # what killed cells left on this host
    except SandboxError as error:
        log.warning("cannot remove the sandboxes of dead cells: %s", error)
    cell, stop = Cell(key, sandboxes=sandboxes, memory_mb=memory_mb), asyncio.Event()
    host, port = wire.parse_address(listen, least_port=0)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = await cell.start(host, port)
    try:
        print(f"cell ready on port {port}: {cell}", flush=True)
        await stop.wait()
    finally:
        await cell.close()
