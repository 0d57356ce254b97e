"""Sends published weights to the server over NCCL.

Rank 0 listens for the server's workers at the address that its host uses to reach the server, so the learner and the server may be on
different nodes. Every collective has a deadline, because its members would wait forever for a lost member. After the deadline, the
communicator is aborted. If the server is replaced, a new communicator is created. A broken communicator cannot be repaired in place,
because other ranks may be in a collective. Instead, the learner exits with an error. When the learner is restarted from its checkpoint, it
reconnects and updates the server before it continues.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from agentrl.config.recipe import Recipe
from agentrl.errors import LearnerError
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.launch import address_towards
from agentrl.serving.access import ServerAddress, auth_headers

log = logging.getLogger("agentrl.learner")
_POLL_S = 0.1
_REQUEST_S = 30.0
_ABORT_S = 15.0  # seconds that a collective has to return after its communicator is aborted


class Channel(Protocol):
    """The channel that `agentrl.learner.nccl_source.connect` returns."""

    def send_weights(self) -> None:
        """Sends all weights. A collective."""

    def shutdown(self) -> None:
        """Aborts the communicator, so that a collective waiting in a different thread returns."""


FindServer = Callable[[], ServerAddress | None]
Connect = Callable[[PolicyEngine, ServerAddress, float], tuple[Any, Channel]]  # -> the client that carries the version, and the channel


class Broadcaster:
    """Sends versions to the server. Every method is a collective, but only rank 0 communicates with the server."""

    def __init__(self, find_server: FindServer, recipe: Recipe, engine: PolicyEngine, *, connect: Connect | None = None) -> None:
        """`find_server`: returns the running server, or None. `connect`: opens the channel to the server."""
        self._find_server = find_server
        self._serving = recipe.serving
        self._engine = engine
        self._connect = connect or _connect
        self._start = -1
        self._client: Any = None
        self._channel: Channel | None = None

    def send(self, number: int) -> None:
        """Sends the engine's weights as version `number`; returns when the server has loaded them.

        Raises `LearnerError` if no server starts within `serving.startup_timeout_s`, if the connection or the transfer fails, if connecting
        takes longer than `serving.request_timeout_s`, or if the transfer takes longer than twice that time (the server must pause first).
        """
        try:
            channel = self._connected()
            self._engine.ranks.report_progress("sending weights")
            self._client.version = number
            with deadline(f"sending version {number}", 2 * self._serving.request_timeout_s, abort=channel.shutdown):
                channel.send_weights()
        except (OSError, RuntimeError, httpx.HTTPError) as error:  # a TimeoutError is an OSError
            raise LearnerError(f"version {number} could not be sent to the server: {type(error).__name__}: {error}") from error

    def catch_up(self, number: int) -> None:
        """Sends version `number` after a restart, unless the server already has it. Raises the errors of `send`, and `LearnerError` if the
        server does not return its version."""
        behind = False
        if self._engine.ranks.is_first:
            server = self._server()
            try:
                reply = httpx.get(f"{server.url}/weight_info", headers=auth_headers(server.key), timeout=_REQUEST_S, trust_env=False)
                answer = reply.raise_for_status().json()
            except (httpx.HTTPError, ValueError) as error:
                raise LearnerError(f"cannot read the weight version of the server at {server.url}: {error}") from error
            behind = answer.get("weight_version") != str(number)
        if self._engine.ranks.from_first(int(behind)):
            log.info("sending version %d to the server", number)
            self.send(number)

    def _connected(self) -> Channel:
        ranks = self._engine.ranks
        server = self._server() if ranks.is_first else ServerAddress(url="", key="", start=0)
        start = ranks.from_first(server.start)
        if self._channel is None or start != self._start:
            if self._channel is not None:
                self._channel.shutdown()  # its server is gone
                self._channel = None
            timeout_s = self._serving.request_timeout_s
            with deadline("connecting to the server", timeout_s, abort=lambda: None):  # there is no communicator yet
                self._client, self._channel = self._connect(self._engine, server, timeout_s)
            self._start = start
        return self._channel

    def _server(self) -> ServerAddress:
        until = time.monotonic() + self._serving.startup_timeout_s
        while (server := self._find_server()) is None:
            self._engine.ranks.report_progress("waiting for the server")
            if time.monotonic() > until:
                raise LearnerError(f"no inference server started within {self._serving.startup_timeout_s:g} s")
            time.sleep(_POLL_S)
        return server


def _connect(engine: PolicyEngine, server: ServerAddress, timeout_s: float) -> tuple[Any, Channel]:
    from agentrl.learner.nccl_source import PausedServerClient, connect

    def waiting() -> None:
        engine.ranks.report_progress("waiting for the server to pause")

    client = PausedServerClient(server.url, key=server.key, timeout_s=timeout_s, waiting=waiting)
    address, port = rendezvous(server) if engine.ranks.is_first else ("", 0)  # other ranks do not listen
    channel = connect(engine, client, master_address=address, master_port=port)
    return client, channel


def rendezvous(server: ServerAddress) -> tuple[str, int]:
    """Returns the address that this host uses to reach the server, and a free port at that address. Raises `OSError` if this host has no
    IPv4 route to the server."""
    address = address_towards(urlsplit(server.url).hostname or "")
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])


@contextmanager
def deadline(what: str, seconds: float, *, abort: Callable[[], None], grace_s: float = _ABORT_S) -> Iterator[None]:
    """Context manager for a collective, which its own thread cannot interrupt. Raises `LearnerError` if the block takes longer than
    `seconds`.

    After that time, `abort` is called in a different thread. If the block has not finished `grace_s` seconds later, the process exits with
    code 1.
    """
    expired, ended = threading.Event(), threading.Event()
    message = f"{what} did not finish within {seconds:g} s: the server, its node, or the network connection to it failed"

    def watch() -> None:
        if ended.wait(seconds):
            return
        expired.set()
        log.error("%s", message)
        threading.Thread(target=abort, daemon=True, name="abort of a collective").start()  # may raise, or hang as the collective does
        if not ended.wait(grace_s):
            log.error("the collective cannot be aborted, so this process exits")
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="deadline of a collective").start()
    try:
        yield
    except Exception as error:
        if not expired.is_set():
            raise
        raise LearnerError(message) from error
    finally:
        ended.set()
    if expired.is_set():
        raise LearnerError(message)
