"""A server that computes no tokens is dead even if its routes answer. A slow, paused or idle server is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.base import liveness
from agentrl.base.liveness import Liveness
from agentrl.base.processes import process_tree
from agentrl.serving import process
from agentrl.serving.control import ControlPlane
from agentrl.serving.process import ServerProcess
from tests.serving.scripted_server import HANG, Call, scripted_server

SHORT_S = 0.4  # instead of a minute
METRIC = 'vllm:generation_tokens_total{{engine="0"}} {}\n'


class Engine:
    """A scripted engine behind the routes of a vLLM server."""

    def __init__(self) -> None:
        self.tokens, self.stopped, self.silent, self.dead, self.busy = 0, False, False, False, False

    def answer(self, call: Call) -> Any:
        if self.silent:
            return HANG
        if call.path == "/health":
            return (503, {}) if self.dead else {}
        if call.path == "/metrics":
            self.tokens += self.busy and not self.stopped
            return (200, METRIC.format(self.tokens).encode())
        if call.path == "/token":
            if self.stopped or self.busy:  # busy: every slot is taken by a long completion
                return HANG
            self.tokens += 1
            return {}
        return {}


class Server(ServerProcess):
    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        raise NotImplementedError

    max_tokens = 100

    async def _token(self, control: ControlPlane, *, tokens: int, timeout_s: float) -> None:
        await control.request("POST", "/token", timeout_s=timeout_s)


def running(pid: int) -> Any:
    """The handle of a process that no host has started."""
    return SimpleNamespace(returncode=None, pid=pid, lost="", processes=lambda: process_tree(pid))


@asynccontextmanager
async def serving(tmp_path: Path, engine: Engine) -> AsyncIterator[Server]:
    """A server that has started to compute tokens."""
    async with scripted_server(engine.answer) as script:
        server = Server("the server", folder=tmp_path, name="server", log="server.log")
        server._process, server._control = running(os.getpid()), ControlPlane(script.url)
        server.liveness = Liveness("the server", first_s=SHORT_S, least_s=SHORT_S)
        server.liveness.begin("computing tokens")
        try:
            yield server
        finally:
            control, server._process = server._control, None
            if server._token_task is not None:
                server._token_task.cancel()
            await control.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CHECK_S", 0.02)
    monkeypatch.setattr(process, "HEALTH_TIMEOUT_S", 0.1)


async def alive_for(server: Server, seconds: float) -> bool:
    """Whether every check within `seconds` finds the server alive."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        if not await server.alive():
            return False
        await asyncio.sleep(0.01)
    return True


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("busy", [False, True])
async def test_a_stuck_engine_with_healthy_routes_is_dead(tmp_path: Path, busy: bool) -> None:
    engine = Engine()
    engine.busy = busy
    async with serving(tmp_path, engine) as server:
        assert await alive_for(server, 3 * SHORT_S), "idle servers are sent a token request, busy ones are only observed"
        engine.stopped = True
        assert not await alive_for(server, 20 * SHORT_S)
        assert "the server has made no progress for" in server.end_reason and "computing tokens" in server.end_reason


async def test_a_silent_server_is_dead_after_the_deadline(tmp_path: Path) -> None:
    """A machine under load may delay one answer; a stopped process delays all."""
    engine = Engine()
    async with serving(tmp_path, engine) as server:
        assert await server.alive()
        engine.silent = True
        assert await server.alive(), "one late answer is not a death"
        assert not await alive_for(server, 20 * SHORT_S)
        assert "no progress" in server.end_reason


async def test_a_dead_engine_is_detected_at_once(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path, engine) as server:
        engine.dead = True
        assert not await server.alive() and server.end_reason == "its engine died"


@pytest.mark.slow
async def test_a_paused_server_is_alive(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path, engine) as server:
        assert await alive_for(server, 2 * SHORT_S)
        await server.control.pause()
        engine.stopped = True
        assert await alive_for(server, 4 * SHORT_S)
        engine.stopped = False
        await server.control.resume()
        assert await alive_for(server, 2 * SHORT_S)
        engine.stopped = True
        assert not await alive_for(server, 20 * SHORT_S)


async def test_a_server_that_is_stuck_after_resume_is_dead(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path, engine) as server:
        await server.control.pause()
        assert await alive_for(server, 2 * SHORT_S)
        await server.control.resume()
        engine.silent = True
        assert not await alive_for(server, 20 * SHORT_S)


@pytest.mark.slow
async def test_answers_to_clients_are_progress_if_the_other_routes_are_too_slow(tmp_path: Path) -> None:
    """Thousands of concurrent requests may delay /health and /metrics for long while completions arrive."""
    engine = Engine()
    async with serving(tmp_path, engine) as server:
        engine.silent = True

        async def completions() -> None:
            while True:
                server.answered()
                await asyncio.sleep(0.05)

        answering = asyncio.create_task(completions())
        assert await alive_for(server, 5 * SHORT_S)
        answering.cancel()
        assert not await alive_for(server, 20 * SHORT_S)


async def test_a_stopped_process_is_dead_although_its_routes_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_STOPPED_LOOK_S", 0.0)
    child = subprocess.Popen(["sleep", "600"])
    try:
        async with serving(tmp_path, Engine()) as server:
            server._process = running(child.pid)
            server.stopped.least_s = SHORT_S
            assert await alive_for(server, 3 * SHORT_S)
            os.kill(child.pid, signal.SIGSTOP)
            assert not await alive_for(server, 20 * SHORT_S)
            assert server.end_reason.endswith(f"a signal has stopped process {child.pid}")
    finally:
        child.kill()
        child.wait()
