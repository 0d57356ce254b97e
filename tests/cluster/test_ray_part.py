"""The driver's view of a part whose host answers late, wrongly or not at all. `tests/cluster/test_ray_launcher.py` has real hosts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import ray_part
from agentrl.cluster.ray_host import LEASE_S, PartState
from agentrl.cluster.ray_part import REFUSED_S, SILENT_S, PartPoller, RayPart
from agentrl.errors import LaunchError

RUNS = PartState(
    **{"node": "n", "node_id": "1", "host": "127.0.0.1", "pid": 7, "port": 0, "watch_port": 1, "folder": "/run"},
    **{"returncode": None, "processes": {7: "S"}, "progress": b"", "reasons": b"", "log": b"", "clock": 0.0},
)


class RayError(Exception):
    pass


RAY: Any = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError))


def answering(answer: Callable[[], Any]) -> Any:
    """A method of an actor."""

    def remote(*_: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(answer())
        except RayError as error:
            future.set_exception(error)
        return SimpleNamespace(future=lambda: future)

    return SimpleNamespace(remote=remote)


def part_of(end: Callable[[], Any] = lambda: RUNS, log: Path | None = None, state: PartState = RUNS) -> RayPart:
    return RayPart(RAY, SimpleNamespace(end=answering(end)), "start", "learner", state, log=log)


@pytest.mark.parametrize(
    ("silent_s", "refused_s", "dead", "lost"),
    [
        (SILENT_S - 1, None, False, ""),
        (SILENT_S + 1, None, False, "node n has not answered for"),
        (1, REFUSED_S - 1, False, ""),
        (REFUSED_S + 1, REFUSED_S + 1, False, "its host on node n died"),
        (1, None, True, "node n died"),
    ],
)
async def test_a_silent_part_is_lost_after_a_time_limit_or_with_its_node(
    silent_s: float, refused_s: float | None, dead: bool, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of()
    monkeypatch.setattr(ray_part.time, "monotonic", lambda: 1000.0)
    part.answered_at, part.refused_at = 1000.0 - silent_s, None if refused_s is None else 1000.0 - refused_s
    part.check_silence(node_is_dead=dead)
    assert part.lost.startswith(lost) and bool(part.lost) == bool(lost)
    assert part.returncode == (-signal.SIGKILL if lost else None)
    if lost:
        assert await part.wait() == -signal.SIGKILL and not part.processes()
        part.answered(replace(RUNS, returncode=0))
        assert part.returncode == -signal.SIGKILL, "the late answer of a lost host changes nothing"
        await part.kill()


def test_a_part_counts_as_lost_only_after_its_host_has_ended_it() -> None:
    assert SILENT_S > LEASE_S


async def test_a_restarted_host_does_not_know_the_part() -> None:
    part = part_of()
    part.answered(None)
    assert part.lost == "its host on node n ended" and await part.wait() == -signal.SIGKILL


async def test_a_part_that_its_host_cannot_end_is_an_error_and_a_dead_host_is_a_loss() -> None:
    stuck = part_of(lambda: "process 7 of learner did not exit after SIGKILL")
    with pytest.raises(LaunchError, match="process 7 of learner did not exit after SIGKILL, on n"):
        await stuck.kill()

    def actor_died() -> Any:
        raise RayError("the actor died")

    lost = part_of(actor_died)
    await lost.terminate(grace_s=0.1)
    assert lost.lost == "node n does not answer: RayError" and lost.returncode == -signal.SIGKILL


async def test_output_and_reports_arrive_once_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_part, "_PROGRESS_BYTES", 6)
    part = part_of(log=tmp_path / "part.log", state=replace(RUNS, log=b"one\n", progress=b"123"))
    part.answered(replace(RUNS, log=b"two\n", progress=b"4567"))
    assert part.read_progress() == b"234567" and part.read_progress() == b""
    part.answered(replace(RUNS, returncode=3, reasons=b"why"))
    assert (await part.wait(), part.reasons(), part.lost) == (3, b"why", "")
    assert (tmp_path / "part.log").read_text() == "one\ntwo\n"
    await asyncio.sleep(0)


async def test_parts_are_lost_when_the_connection_to_the_cluster_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client then raises errors of the system, which must not end the thread that notices lost parts."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ConnectionError("GRPC connection failed")

    monkeypatch.setattr(ray_part, "REFUSED_S", 0.05)
    monkeypatch.setattr(ray_part, "_POLL_S", 0.01)
    sent, dead = SimpleNamespace(remote=lambda *_: SimpleNamespace()), SimpleNamespace(remote=broken)
    for poll in (dead, sent):
        part = RayPart(RAY, SimpleNamespace(poll=poll), "start", "learner", RUNS)
        poller = PartPoller(SimpleNamespace(exceptions=RAY.exceptions, wait=broken, get=broken, nodes=broken))
        poller.add(part)
        async with asyncio.timeout(5):
            assert await part.wait() == -signal.SIGKILL and part.lost == "its host on node n died"
        await asyncio.to_thread(poller.close)

    lost = RayPart(RAY, SimpleNamespace(end=dead, signal_children=dead, fetch=dead), "start", "learner", RUNS, driver=("http://a:1", "key"))
    lost.send_kill()
    await lost.signal_children(signal.SIGTERM)
    with pytest.raises(LaunchError, match="node n does not answer: ConnectionError"):
        await lost.fetch("versions/000001")
    await lost.kill()
    assert lost.lost == "node n does not answer: ConnectionError"
