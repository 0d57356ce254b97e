"""The Docker daemon of a run is not restarted by it; a person is shown that it does not answer, and that it does again."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from agentrl.liveness import Liveness
from agentrl.run import supervise
from agentrl.sandbox import engine
from tests.waiting import until


async def test_a_daemon_that_falls_silent_is_shown_once_and_so_is_its_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/daemon.sock")
    monkeypatch.setattr(supervise, "_PING_S", 0.02)
    monkeypatch.setattr(engine.answers, "__defaults__", (0.1,))
    silent, ended = threading.Event(), threading.Event()

    def daemon(door: socket.socket) -> None:
        held = []
        while not ended.is_set():
            link, _ = door.accept()
            if silent.is_set():
                held.append(link)  # it takes connections and gives no answer
                continue
            link.recv(1024)
            link.sendall(b"HTTP/1.0 200 OK\r\n\r\nOK")
            link.close()

    alerts: list[str] = []
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{tmp_path}/daemon.sock")
        door.listen(64)
        threading.Thread(target=daemon, args=(door,), daemon=True).start()
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
        await asyncio.to_thread(engine.answers)
