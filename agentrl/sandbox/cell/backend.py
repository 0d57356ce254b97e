"""The backend for drivers and workers whose sandboxes are in cells, and the driver's end of sandboxes with allow-lists."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base.error_text import one_line_error
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.records import SandboxSpec, codec
from agentrl.records.destinations import parse_destinations
from agentrl.sandbox import egress, images
from agentrl.sandbox.backend import ChannelBackend, ReadyImage
from agentrl.sandbox.builds import BuildContext
from agentrl.sandbox.cell import wire
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.waiting import spawn

log = logging.getLogger(__name__)

REACH_S = 20.0
"""Seconds within which `prepare` or an opening must reach a cell."""
CONNECT_S = 3.0
GREETING_S = 12.0
"""How long a cell may take to send its nonce. It first drops connections that have not shown the key within 10 s."""
PREPARE_S, OPEN_S = 100.0, 120.0
RELIEVE_S = 10.0
AVOID_S, MOST_AVOID_S = 5.0, 160.0
"""How long, at first and at most, a failed cell gets sandboxes only if all others failed or are full. Each failure in a row doubles it."""
FULL_S = 1.0
_RETRY_S = 0.25
_RESOLVE_S = 5.0
_STREAM_BYTES = 1 << 20
_MAX_FAILURES = 5  # maximum number of a sandbox's tunnels that fail in a row

Request = Callable[[Mapping[str, Any]], Awaitable[tuple[socket.socket, dict[str, Any]]]]


@dataclass(slots=True)
class CellState:
    """A driver's record of a cell."""

    address: tuple[str, int]
    open: int = 0  # open sandboxes of this driver
    avoided_until: float = 0.0
    failures: int = 0  # in a row: no answer, or an opening that was cancelled while it waited for an answer


class CellBackend(ChannelBackend):
    """Opens sandboxes in the cells at `addresses` (`HOST:PORT`; a host name may resolve to several cells). See `SandboxBackend` and
    `ChannelBackend`.

    Each sandbox is opened in the cell with the fewest sandboxes of this driver. If a cell dies, its sandboxes raise `SandboxError`, and
    later sandboxes are opened in other cells. Raises `UserError` if `key` has fewer than 16 characters or an address is invalid.
    """

    name = "cell"
    reach_s = REACH_S
    most_warm = 1  # in a pool, because sandboxes that wait take slots from other drivers

    def __init__(
        self, *, run_label: str, root: Path, addresses: Sequence[str], key: str, progress: images.Progress = images.no_progress
    ) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        if len(key) < wire.SHORTEST_KEY:
            raise UserError("sandbox.backend=cell: the option key is too short", fix="set key to env:NAME or file:PATH of the cells' key")
        self._key = key.encode()
        self._names = [wire.parse_address(text) for text in addresses]
        self._cells: dict[tuple[str, int], CellState] = {}
        self._resolved_at = -_RESOLVE_S
        self._problem = "no address"

    async def prepare(self, spec: SandboxSpec) -> None:
        """Checks that a cell responds and has the image. Raises `SandboxUnavailable` if no cell responds within `reach_s` seconds, a cell
        refuses the request, or `spec` names a container runtime, and `UserError` if the image is missing or invalid."""
        if spec.runtime:
            raise SandboxUnavailable(f"sandbox runtime {spec.runtime!r} needs Docker", fix="leave runtime empty")
        async with self._preparing[spec.image]:
            if spec.image in self._images:
                return
            image = await asyncio.to_thread(self._load, spec.image)
            message = {"op": "prepare", **self._describe(spec, image.recipe.key)}
            try:
                _, sock, _ = await self._ask_cells(message, timeout_s=PREPARE_S)
            except SandboxError as error:
                fix = "start a cell with `agentrl sandbox serve`, or correct sandbox.backend"
                raise SandboxUnavailable(f"no cell can open sandboxes of image {spec.image}: {error}", fix=fix) from None
            sock.close()
            dockerfile = isinstance(image.recipe, BuildContext)
            self._images[spec.image] = ReadyImage(tree=image.recipe.key, server=image.folder, fills_workdir=dockerfile)

    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        async with self._startup(spec) as start:
            program = await asyncio.to_thread(image.replacement.read_bytes) if image.replacement else b""
            message = {"op": "open", **self._describe(spec, image.tree), "program_bytes": len(program)}
            cell, sock, reply = await self._ask_cells(message, program, timeout_s=OPEN_S)
            token = str(reply.get("token"))
            cell.open += 1
            start.undo.callback(self._leave, cell)
            streams = await asyncio.open_connection(sock=sock, limit=_STREAM_BYTES)
            start.undo.callback(streams[1].transport.abort)
            if isinstance(start.listener, TunnelListener):
                start.listener.request = partial(self._request, cell.address, {"op": "tunnel", "token": token})

        async def relieve() -> bool:
            with contextlib.suppress(SandboxError, OSError):
                async with asyncio.timeout(RELIEVE_S):
                    sock, answer = await self._request(cell.address, {"op": "relieve", "token": token})
                sock.close()
                return answer.get("relieved") is True
            return False

        async def end(ended: bool) -> None:
            self._leave(cell)

        return await self._greeted(start, streams, relieve, end)

    def ways(self) -> dict[str, Any]:
        """Returns the cells' addresses and their key. The attack `cell_key` searches for the key in sandboxes."""
        return {"cells": [_show(address) for address in self._cells], "cell_key_backwards": self._key.decode()[::-1]}

    def _leave(self, cell: CellState) -> None:
        cell.open -= 1

    def _describe(self, spec: SandboxSpec, key: str) -> dict[str, Any]:
        return {"code": wire.code_version(), "spec": codec.to_data(replace(spec, image=key))}

    def _listener(self, name: str, spec: SandboxSpec, folder: Path) -> egress.Listener:
        return TunnelListener(name, spec)

    async def _ensure(self, image: images.Image) -> str:
        return image.recipe.key

    def _delay(self) -> str:
        return f": {self._problem}"

    # Cells ------------------------------------------------------------------------------------------------------------

    async def _ask_cells(
        self, message: Mapping[str, Any], body: bytes = b"", *, timeout_s: float
    ) -> tuple[CellState, socket.socket, dict[str, Any]]:
        """Sends a request to one cell after another until a cell accepts the request. Returns (cell, connection, reply).

        Waits while all cells are full; the caller sets the deadline. Raises `SandboxError` if a cell refuses the request or no cell
        responds within `reach_s` seconds.
        """
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            for cell in await self._candidates():
                try:
                    async with asyncio.timeout(timeout_s):
                        sock, reply = await self._request(cell.address, message, body)
                except (OSError, SandboxError) as error:
                    self._avoid_silent(cell, one_line_error(error))
                    continue
                except asyncio.CancelledError:  # the opening's deadline passed
                    self._avoid_silent(cell, "it did not answer in time")
                    raise
                cell.failures = 0
                if reply.get("ok") is True:
                    return cell, sock, reply
                sock.close()
                answered_at = loop.time()
                text = "".join(character for character in str(reply.get("message"))[:1000] if character.isprintable())
                self._avoid(cell, text, FULL_S if reply.get("why") == "full" else AVOID_S)
                if reply.get("why") != "full":
                    raise SandboxError(self._problem)
            if loop.time() - answered_at > self.reach_s - CONNECT_S:
                raise SandboxError(f"no cell answers; {self._problem}")
            await asyncio.sleep(_RETRY_S)

    async def _candidates(self) -> list[CellState]:
        """Returns the cells in the order in which they are tried: cells that are not avoided first, and among them those with the fewest
        sandboxes."""
        await self._resolve()
        now = asyncio.get_running_loop().time()
        return sorted(self._cells.values(), key=lambda cell: (cell.avoided_until > now, cell.open, random.random()))

    def _avoid(self, cell: CellState, problem: str, seconds: float = AVOID_S) -> None:
        self._problem = f"cell {_show(cell.address)}: {problem}"
        cell.avoided_until = asyncio.get_running_loop().time() + seconds

    def _avoid_silent(self, cell: CellState, problem: str) -> None:
        """Avoids a cell that did not respond: for `AVOID_S`, doubled with each consecutive failure, up to `MOST_AVOID_S`.
        Such a cell has the fewest sandboxes, so each opening would try it first."""
        cell.failures += 1
        self._avoid(cell, problem, min(AVOID_S * 2 ** min(cell.failures - 1, 10), MOST_AVOID_S))

    async def _resolve(self) -> None:
        """Resolves the host names of the cells, at most every 5 s. Removes cells whose addresses are no longer listed, unless no address
        is. Records the error if a name cannot be resolved."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._resolved_at + _RESOLVE_S:
            return
        self._resolved_at = loop.time()
        addresses: set[tuple[str, int]] = set()
        for name, port in self._names:
            try:
                async with asyncio.timeout(CONNECT_S):
                    listed = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                addresses |= {(str(entry[4][0]), port) for entry in listed}
            except (OSError, UnicodeError) as error:  # UnicodeError: the name is not a host name, such as `a..b`
                self._problem = f"{name}: {one_line_error(error)}"
        self._cells = {address: self._cells.get(address) or CellState(address) for address in sorted(addresses)} or self._cells

    async def _request(
        self, address: tuple[str, int], message: Mapping[str, Any], body: bytes = b""
    ) -> tuple[socket.socket, dict[str, Any]]:
        """Connects to a cell. Returns (connection, reply). Raises `OSError` if the connection fails, and `SandboxError` if the cell
        violates the protocol. The caller sets the deadline."""
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            wire.prepare_socket(sock)
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, address)
            async with asyncio.timeout(GREETING_S):
                other = await wire.greeting(sock)
            return sock, await wire.request(sock, self._key, other, message, body)
        except BaseException:
            sock.close()
            raise


class TunnelListener:
    """The driver's end of a sandbox with an allow-list. After five consecutive failures to reach the cell, the sandbox has no network.

    A connection to the cell waits until a program connects, and the proxy serves that program. So the rules for sandboxes on this machine
    apply, and `127.0.0.1` in an allow-list means this machine.
    """

    def __init__(self, name: str, spec: SandboxSpec) -> None:
        bounds = egress.Bounds()
        self.request: Callable[[], Awaitable[tuple[socket.socket, dict[str, Any]]]] | None = None
        self._name = name
        self._proxy = egress.Proxy(name, parse_destinations(spec.network), bounds)
        self._slots = asyncio.Semaphore(bounds.connections)
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        """Starts serving."""
        spawn(self._offer(), self._tasks, name=f"egress {self._name}")

    async def close(self) -> None:
        """Closes every connection. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._proxy.log_refusals()

    def discard(self) -> None:
        """Does nothing, because there is no connection before `receive`."""

    async def _offer(self) -> None:
        assert self.request is not None
        failures = 0
        while failures < _MAX_FAILURES:
            await self._slots.acquire()
            try:
                sock, reply = await self.request()
            except (OSError, SandboxError) as error:
                log.info("sandbox %s: cannot open a tunnel to its cell: %s", self._name, one_line_error(error))
                failures += 1
                self._slots.release()
                await asyncio.sleep(_RETRY_S)
                continue
            if reply.get("ok") is not True:
                sock.close()
                self._slots.release()
                break
            failures = 0
            serving = spawn(self._proxy.serve(sock), self._tasks, name=f"egress {self._name}")
            serving.add_done_callback(lambda _: self._slots.release())


def _show(address: tuple[str, int]) -> str:
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def open_cells(*, root: Path, run_label: str, addresses: Sequence[str] = (), key: str = "") -> CellBackend:
    """Returns the backend for the recipe's option `sandbox.backend=cell`. Raises `UserError` if the option `addresses` or `key` is missing
    or invalid."""
    if not addresses or not key:
        fix = 'write Part("cell", options={"addresses": ["HOST:7423"], "key": "env:AGENTRL_CELL_KEY"})'
        raise UserError("sandbox.backend=cell requires the options addresses and key", fix=fix)
    return CellBackend(root=root, run_label=run_label, addresses=addresses, key=key)
