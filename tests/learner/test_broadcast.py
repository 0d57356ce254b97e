"""How versions reach the server over NCCL: everything but NCCL itself, against a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import LearnerError
from agentrl.learner.broadcast import Broadcaster, ServerAddress
from agentrl.learner.driver_reports import SILENT
from agentrl.serving.access import NAME
from tests.learner.building import recipe


class OneRank:
    is_first, report_progress = True, SILENT

    def from_first(self, value: int) -> int:
        return value


class Engine:
    ranks = OneRank()


class Weights:
    """The server's control route and the channel to it; remembers who connected and what was sent."""

    def __init__(self) -> None:
        self.version = 0
        self.carried = "0"
        self.connected: list[int] = []
        self.sent: list[int] = []
        self.broken = False

    def send_weights(self) -> None:
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")
        self.sent.append(self.version)
        self.carried = str(self.version)

    def connect(self, engine: Any, server: ServerAddress, timeout_s: float) -> tuple[Any, Any]:
        self.connected.append(server.start)
        return self, self


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def url(weights: Weights) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"weight_version": weights.carried}).encode()
            self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def make(tmp_path: Path, weights: Weights, *, patience_s: float = 60.0) -> Broadcaster:
    made = recipe(serving={"startup_timeout_s": patience_s})
    return Broadcaster(tmp_path, made, Engine(), connect=weights.connect)  # type: ignore[arg-type]


def announce(tmp_path: Path, url: str, start: int) -> None:
    (tmp_path / NAME).write_text(json.dumps({"url": url, "key": "k", "start": start}))


def test_versions_reuse_a_connection_and_a_new_server_gets_a_new_one(tmp_path: Path, weights: Weights, url: str) -> None:
    made = make(tmp_path, weights)
    announce(tmp_path, url, 11)
    made.send(1)
    made.send(2)
    announce(tmp_path, url, 12)
    made.send(3)
    assert (weights.sent, weights.connected) == ([1, 2, 3], [11, 12])


def test_catch_up_sends_only_a_missing_version(tmp_path: Path, weights: Weights, url: str) -> None:
    announce(tmp_path, url, 1)
    weights.carried = "5"
    made = make(tmp_path, weights)
    made.catch_up(5)
    assert weights.connected == []
    made.catch_up(6)
    assert weights.sent == [6]


def test_a_missing_server_or_broken_channel_raises(tmp_path: Path, weights: Weights, url: str) -> None:
    with pytest.raises(LearnerError, match="no inference server started"):
        make(tmp_path, weights, patience_s=0.3).send(1)
    made = make(tmp_path, weights)
    announce(tmp_path, url, 1)
    weights.broken = True
    with pytest.raises(LearnerError, match="version 1 could not be sent to the server: RuntimeError: NCCL error"):
        made.send(1)
