"""Versions sent to the server over NCCL: everything except NCCL, against a real HTTP server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import LearnerError
from agentrl.learner.broadcast import Broadcaster, ServerAddress, deadline, rendezvous
from agentrl.learner.driver_reports import SILENT
from agentrl.serving.access import NAME, announced_server
from tests.cluster.hosts import hosts
from tests.learner.building import build_recipe


class OneRank:
    is_first, report_progress = True, SILENT

    def from_first(self, value: int) -> int:
        return value


class Engine:
    ranks = OneRank()


class Weights:
    """The server's control route and the channel to it; records the connections and the versions sent."""

    def __init__(self) -> None:
        self.version = 0
        self.weight_version = "0"
        self.connected: list[int] = []
        self.sent: list[int] = []
        self.broken = self.hangs = False
        self.shutdowns, self.aborted = 0, threading.Event()

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.aborted.set()

    def send_weights(self) -> None:
        if self.hangs:
            assert self.aborted.wait(30)
            raise RuntimeError("NCCL communicator was aborted")
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")
        self.sent.append(self.version)
        self.weight_version = str(self.version)

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
            body = json.dumps({"weight_version": weights.weight_version}).encode()
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


def build_broadcaster(tmp_path: Path, weights: Weights, *, patience_s: float = 60.0) -> Broadcaster:
    recipe = build_recipe(serving={"startup_timeout_s": patience_s, "request_timeout_s": 0.2})
    return Broadcaster(lambda: announced_server(tmp_path), recipe, Engine(), connect=weights.connect)  # type: ignore[arg-type]


def announce(tmp_path: Path, url: str, start: int) -> None:
    (tmp_path / NAME).write_text(json.dumps({"url": url, "key": "k", "start": start}))


def test_versions_reuse_a_connection_and_a_new_server_gets_a_new_one(tmp_path: Path, weights: Weights, url: str) -> None:
    broadcaster = build_broadcaster(tmp_path, weights)
    announce(tmp_path, url, 11)
    broadcaster.send(1)
    broadcaster.send(2)
    announce(tmp_path, url, 12)
    broadcaster.send(3)
    assert (weights.sent, weights.connected) == ([1, 2, 3], [11, 12])
    assert weights.shutdowns == 1, "the communicator with the lost server is freed"


def test_catch_up_sends_only_a_missing_version(tmp_path: Path, weights: Weights, url: str) -> None:
    announce(tmp_path, url, 1)
    weights.weight_version = "5"
    broadcaster = build_broadcaster(tmp_path, weights)
    broadcaster.catch_up(5)
    assert weights.connected == []
    broadcaster.catch_up(6)
    assert weights.sent == [6]


def test_a_missing_server_or_broken_channel_raises(tmp_path: Path, weights: Weights, url: str) -> None:
    with pytest.raises(LearnerError, match="no inference server started"):
        build_broadcaster(tmp_path, weights, patience_s=0.3).send(1)
    broadcaster = build_broadcaster(tmp_path, weights)
    announce(tmp_path, url, 1)
    weights.broken = True
    with pytest.raises(LearnerError, match="version 1 could not be sent to the server: RuntimeError: NCCL error"):
        broadcaster.send(1)


def test_a_collective_that_hangs_is_aborted_at_its_deadline(tmp_path: Path, weights: Weights, url: str) -> None:
    broadcaster = build_broadcaster(tmp_path, weights)
    announce(tmp_path, url, 1)
    weights.hangs = True
    message = r"sending version 1 did not finish within 0\.4 s: the server, its node, or the network connection to it failed"
    with pytest.raises(LearnerError, match=message):
        broadcaster.send(1)
    assert weights.shutdowns == 1 and weights.sent == []


@pytest.mark.slow
@pytest.mark.parametrize("abort", ["lambda: None", "lambda: time.sleep(60)", "lambda: 1 / 0"])
def test_a_collective_that_cannot_be_aborted_ends_the_process(abort: str) -> None:
    """The process also ends if the abort hangs or raises."""
    program = "import time; from agentrl.learner.broadcast import deadline\n"
    program += f"with deadline('connecting', 0.1, abort={abort}, grace_s=0.1): time.sleep(20)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1 and "connecting did not finish within 0.1 s" in result.stderr and "this process exits" in result.stderr


def test_a_deadline_has_no_effect_after_its_block_ended() -> None:
    aborts: list[int] = []
    with pytest.raises(KeyError), deadline("it", 0.05, abort=lambda: aborts.append(1)):
        raise KeyError("its own error")
    with deadline("it", 0.05, abort=lambda: aborts.append(1)):
        pass
    time.sleep(0.2)
    assert not aborts


def test_the_rendezvous_uses_the_address_that_reaches_the_server() -> None:
    """The loopback address on one machine; the address of this node if the server runs on another one."""
    assert rendezvous(ServerAddress(url="http://127.0.0.1:8000", key="", start=1))[0] == "127.0.0.1"
    with hosts(2) as (learner, server):
        address, port = learner.inside(lambda: rendezvous(ServerAddress(url=f"http://{server.address}:8000", key="", start=1)))
    assert address == learner.address and port > 0


PEER = """
import sys
from vllm.distributed.utils import StatelessProcessGroup
group = StatelessProcessGroup.create(host=sys.argv[1], port=int(sys.argv[2]), rank=int(sys.argv[3]), world_size=2)
print(group.broadcast_obj("the id of a communicator" if group.rank == 0 else None, src=0), flush=True)
group.barrier()
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_on_another_node_joins_the_learners_rendezvous() -> None:
    """The steps of `connect` up to the communicator, which needs GPUs."""
    with hosts(2) as (learner, server):
        address, port = learner.inside(lambda: rendezvous(ServerAddress(url=f"http://{server.address}:8000", key="", start=1)))
        peers = [
            host.python("-c", PEER, address, str(port), str(rank), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank, host in enumerate((learner, server))
        ]
        for peer in peers:
            out, errors = peer.communicate(timeout=120)
            assert (peer.returncode, out.splitlines()[-1:]) == (0, ["the id of a communicator"]), errors[-2000:]
