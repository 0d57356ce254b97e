"""Sends published weights to the server over NCCL.

The driver writes the server's address and key to `server.json`. A broken channel cannot be repaired in place, because the remaining
members are stuck in a collective: the learner ends with an error, restarts from its checkpoint and updates the server first.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httpx

from agentrl.config.recipe import Recipe
from agentrl.errors import LearnerError
from agentrl.learner.engine import PolicyEngine
from agentrl.serving.access import ServerAddress, announced_server
from agentrl.serving.access import auth_headers as access

log = logging.getLogger("agentrl.learner")
_POLL_S = 0.1
_ASK_S = 30.0


class Channel(Protocol):
    """The result of `agentrl.learner.nccl_source.connect`."""

    def send_weights(self) -> None:
        """Sends all weights. A collective."""


Connect = Callable[[PolicyEngine, ServerAddress, float], tuple[Any, Channel]]  # -> the client that carries the version, and the channel


class Broadcaster:
    """Sends versions from all ranks; every method is a collective. Only rank 0 talks to the server."""

    def __init__(self, run_dir: Path, recipe: Recipe, engine: PolicyEngine, *, connect: Connect | None = None) -> None:
        self._run_dir = run_dir
        self._serving = recipe.serving
        self._engine = engine
        self._connect = connect or _connect
        self._start = -1
        self._client: Any = None
        self._channel: Channel | None = None

    def send(self, number: int) -> None:
        """Sends the engine's weights as version `number`; returns when the server has loaded them.

        Raises `LearnerError` if no server appears within `serving.startup_timeout_s` or the transfer fails.
        """
        try:
            channel = self._connected()
            self._engine.ranks.report_progress("sending weights")
            self._client.version = number
            channel.send_weights()
        except (OSError, RuntimeError, httpx.HTTPError) as error:  # a TimeoutError is an OSError
            raise LearnerError(f"version {number} could not be sent to the server: {type(error).__name__}: {error}") from error

    def catch_up(self, number: int) -> None:
        """Sends version `number` after a restart, unless the server already has it."""
        behind = False
        if self._engine.ranks.is_first:
            server = self._server()
            try:
                reply = httpx.get(f"{server.url}/weight_info", headers=access(server.key), timeout=_ASK_S, trust_env=False)
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
            self._client, self._channel = self._connect(self._engine, server, self._serving.request_timeout_s)
            self._start = start
        return self._channel

    def _server(self) -> ServerAddress:
        deadline = time.monotonic() + self._serving.startup_timeout_s
        while (server := announced_server(self._run_dir)) is None:
            self._engine.ranks.report_progress("waiting for the server")
            if time.monotonic() > deadline:
                raise LearnerError(f"no inference server started within {self._serving.startup_timeout_s:g} s")
            time.sleep(_POLL_S)
        return server


def _connect(engine: PolicyEngine, server: ServerAddress, timeout_s: float) -> tuple[Any, Channel]:
    from agentrl.learner.nccl_source import PausedServerClient, connect

    def waiting() -> None:
        engine.ranks.report_progress("waiting for the server to pause")

    client = PausedServerClient(server.url, key=server.key, timeout_s=timeout_s, waiting=waiting)
    channel = connect(engine, client, master_address="127.0.0.1", master_port=_free_port(), server_ranks=1)
    return client, channel


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
