"""Restarts of the learner are counted. External parts are reported when they stop answering and when they answer again."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.base.liveness import AnswerLiveness, Liveness
from agentrl.errors import LearnerError, LearnerHalted
from agentrl.run import supervise
from agentrl.sandbox import docker_client
from agentrl.testing.clock import run_virtually
from tests.waiting import until


@pytest.mark.slow
async def test_a_silent_daemon_is_reported_once_and_so_is_its_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/daemon.sock")
    monkeypatch.setattr(supervise, "_PING_S", 0.02)
    monkeypatch.setattr(docker_client.daemon_answers, "__defaults__", (0.1,))
    silent, ended = threading.Event(), threading.Event()

    def daemon(listener: socket.socket) -> None:
        unanswered = []
        while not ended.is_set():
            connection, _ = listener.accept()
            if silent.is_set():
                unanswered.append(connection)  # accepts connections but never answers
                continue
            connection.recv(1024)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nOK")
            connection.close()

    alerts: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/daemon.sock")
        listener.listen(64)
        threading.Thread(target=daemon, args=(listener,), daemon=True).start()
        watching = asyncio.create_task(supervise.watch_daemon(alerts.append, Liveness("the Docker daemon", first_s=60.0, least_s=0.5)))
        await asyncio.sleep(0.3)
        assert not alerts
        silent.set()
        await until(lambda: alerts)
        await asyncio.sleep(0.5)
        assert len(alerts) == 1 and "the Docker daemon has made no progress for" in alerts[0] and "fix: restart it" in alerts[0]
        silent.clear()
        await until(lambda: len(alerts) > 1)
        assert alerts[1] == "the Docker daemon answers again"
        watching.cancel()
        ended.set()
        await asyncio.to_thread(docker_client.daemon_answers)


class Learner:
    """A learner that publishes some versions after each start, then fails."""

    def __init__(self, registry: Registry, versions_per_life: list[int], *, error_type: type[LearnerError] = LearnerError) -> None:
        self.registry, self.versions_per_life, self.error_type, self.started = registry, versions_per_life, error_type, 0

    async def start(self) -> None:
        self.started += 1

    async def wait(self) -> None:
        await asyncio.sleep(3600.0)
        if self.started > len(self.versions_per_life):
            return
        self.registry.number = max(0, self.registry.number + self.versions_per_life[self.started - 1])
        raise self.error_type(f"life {self.started}")


class Registry:
    number = 0

    def latest(self) -> Any:
        return SimpleNamespace(number=self.number)


def watch(versions_per_life: list[int], **options: Any) -> tuple[Learner, list[str], Exception | None]:
    alerts: list[str] = []
    registry = Registry()
    learner = Learner(registry, versions_per_life, **options)
    try:
        run_virtually(supervise.watch_learner(learner, registry, alerts.append))  # type: ignore[arg-type]
    except LearnerError as error:
        return learner, alerts, error
    return learner, alerts, None


def test_a_learner_that_makes_progress_may_fail_any_number_of_times() -> None:
    learner, alerts, error = watch([1, 2, 0, 0, 1, 0, 0, 1, 5, 1])
    assert error is None and learner.started == 11
    assert [alert.rpartition("restart ")[2].split()[0] for alert in alerts] == list("1123123111")


@pytest.mark.parametrize("versions_per_life", [[0] * 9, [5, *[0] * 9], [3, -2, 2, -2, 2, 0, 0]])
def test_a_learner_without_progress_is_not_restarted_again(versions_per_life: list[int]) -> None:
    """In the last case, it returns to a checkpoint and fails at the same step each time."""
    learner, alerts, error = watch(versions_per_life)
    assert error is not None and len(alerts) == learner.started - 1
    assert "restart 3 of at most 3 without a new version" in alerts[-1]


def test_a_learner_that_halts_is_not_restarted() -> None:
    learner, alerts, error = watch([1], error_type=LearnerHalted)
    assert isinstance(error, LearnerHalted) and learner.started == 1 and alerts == ["halted: life 1"]


def test_a_silent_external_server_is_reported_once_and_so_is_its_return() -> None:
    alerts: list[str] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        live = AnswerLiveness("MCP server search", fix="check the server", first_s=60.0, clock=loop.time)
        quiet = AnswerLiveness("MCP server other", fix="", first_s=60.0, clock=loop.time)
        watching = asyncio.create_task(supervise.watch_external_servers(alerts.append))
        with live.question(), quiet.question():
            await asyncio.sleep(50.0)
            quiet.answered(50.0)
            assert alerts == []
            await asyncio.sleep(100.0)
        assert len(alerts) == 1 and alerts[0].startswith("MCP server search has not answered for ")
        assert alerts[0].endswith("\n  fix: check the server")
        await asyncio.sleep(1000.0)
        live.answered(3.0)
        await asyncio.sleep(10.0)
        assert alerts[1:] == ["MCP server search answers again"]
        watching.cancel()

    run_virtually(play())
