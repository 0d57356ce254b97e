"""Starts of parts whose host is lost before it has answered. The hosts are objects of the test."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import ray_launcher
from agentrl.cluster.ray_launcher import RayLauncher
from agentrl.errors import LaunchError
from agentrl.protocols.cluster import PartCommand
from tests.cluster.ray_nodes import plan_of
from tests.cluster.test_ray_part import RUNS, RayError

LEASE_ENDS_S = 0.4


class LosingHosts:
    """An actor: the first start has effect, and then its node is lost. Until Ray has replaced the actor, calls fail."""

    def __init__(self, *, replaced_after: int) -> None:
        self.starts: list[float] = []
        self._calls, self._replaced_after = 0, replaced_after
        self.start = SimpleNamespace(remote=self._start)
        self.describe = SimpleNamespace(remote=self._describe)
        self.poll = SimpleNamespace(remote=self._start)

    def _describe(self) -> Any:
        self._calls += 1
        return self._answer(None if self._calls > self._replaced_after else RayError("the actor is restarting"))

    def _start(self, *_: Any) -> Any:
        self.starts.append(time.monotonic())
        return self._answer(RayError("the node is lost") if len(self.starts) == 1 else None)

    def _answer(self, error: Exception | None) -> Any:
        future: Future[Any] = Future()
        future.set_result(RUNS) if error is None else future.set_exception(error)
        return SimpleNamespace(future=lambda: future)


def launcher_of(actor: Any, folder: Path) -> RayLauncher:
    """A launcher whose hosts are `actor`."""
    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    errors = SimpleNamespace(RayError=RayError, RayTaskError=KeyError)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **_: None)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1", scheduling_strategies=strategies)
    ray = SimpleNamespace(util=util, exceptions=errors, remote=lambda _: actor_class)
    return RayLauncher(ray, plan_of("auto", "learner"), folder, root=folder, nodes=[])


@pytest.mark.parametrize("exclusive", [True, False])
async def test_a_second_learner_starts_only_after_the_host_of_a_lost_start_has_ended_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    monkeypatch.setattr(ray_launcher, "_LEASE_ENDS_S", LEASE_ENDS_S)
    monkeypatch.setattr(ray_launcher, "_RETRY_S", 0.01)
    hosts = LosingHosts(replaced_after=3)
    launcher = launcher_of(hosts, tmp_path)
    monkeypatch.setattr(launcher._poller, "add", lambda _: None)
    part = await launcher.start(PartCommand(name="learner", argv=("true",), log="log", exclusive=exclusive))
    assert part.returncode is None and len(hosts.starts) == 2
    assert (hosts.starts[1] - hosts.starts[0] >= LEASE_ENDS_S) == exclusive, "a server does not need to wait"


async def test_a_start_without_a_connection_to_the_cluster_is_an_error(tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise ConnectionError("GRPC connection failed")

    disconnected = SimpleNamespace(remote=broken)
    launcher = launcher_of(SimpleNamespace(start=disconnected, describe=disconnected), tmp_path)
    for earlier in ({}, {"learner": SimpleNamespace(lost="node n is gone")}):
        launcher._parts = dict(earlier)
        with pytest.raises(LaunchError, match="the connection to auto was lost: GRPC connection failed"):
            await launcher.start(PartCommand(name="learner", argv=("true",), log="log"))
