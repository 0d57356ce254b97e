"""The pause check with a sandbox and a clock that a test controls, and a backend that is incomplete."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from agentrl.records import ExecResult, SandboxSpec
from agentrl.sandbox.conformance import basics, check_conformance
from agentrl.sandbox.conformance.bench import ConformanceError


class Clock:
    def __init__(self):
        self.now = 100.0

    async def sleep(self, seconds):
        await asyncio.sleep(0)
        self.now += seconds


class PausableSandbox:
    """Starts programs `delay_s` late. `obeys` is whether a pause stops them. Results are sent only while it is not paused."""

    def __init__(self, clock, *, delay_s=0.0, obeys=True):
        self.clock, self.delay_s, self.obeys = clock, delay_s, obeys
        self.paused_at, self.resumed, self.runs = 0.0, asyncio.Event(), 0

    async def pause(self):
        self.paused_at = self.clock.now
        self.resumed.clear()

    async def resume(self):
        self.resumed.set()

    async def python(self, code, *, timeout_s, output_bytes):
        self.runs += 1
        self.resumed.clear()
        start = self.clock.now + self.delay_s
        times = [start + 0.1 * (n + 1) for n in range(int(re.search(r"range\((\d+)\)", code)[1]))]
        await self.resumed.wait()
        if self.obeys:
            times = [t if t <= self.paused_at else t + self.clock.now - self.paused_at for t in times]
        self.clock.now = max(self.clock.now, times[-1]) + 0.05
        return ExecResult(exit_code=0, stdout="".join(f"{t}\n" for t in times), stderr="", wall_s=times[-1] - start)


async def check_pause(monkeypatch, **options):
    clock = Clock()
    monkeypatch.setattr(basics, "asyncio", SimpleNamespace(sleep=clock.sleep, create_task=asyncio.create_task))
    monkeypatch.setattr(basics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    sandbox = PausableSandbox(clock, **options)
    await basics.check_pause_and_resume(None, sandbox)
    return sandbox.runs


async def test_pause_check_passes_for_programs_that_stop(monkeypatch):
    assert await check_pause(monkeypatch) == 1


@pytest.mark.parametrize("delay_s, runs", [(0.6, 2), (1.2, 2), (3.0, 3)])
async def test_pause_check_waits_for_a_program_that_starts_late(monkeypatch, delay_s, runs):
    assert await check_pause(monkeypatch, delay_s=delay_s) == runs


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 1.0, 3.0])
async def test_pause_check_fails_for_programs_that_continue(monkeypatch, delay_s):
    with pytest.raises(ConformanceError, match="the program continued while it was paused"):
        await check_pause(monkeypatch, delay_s=delay_s, obeys=False)


async def test_pause_check_fails_for_a_program_that_never_starts_in_time(monkeypatch):
    with pytest.raises(ConformanceError, match=r"the program had not started within 4\.5 s"):
        await check_pause(monkeypatch, delay_s=20.0)


async def test_any_exception_of_a_backend_fails_its_check():
    async def done(*_, **options):
        return SimpleNamespace(close=done)  # has no `exec`

    (result,) = await check_conformance(SimpleNamespace(prepare=done, open=done), SandboxSpec(image="image"), only="exec_result")
    assert not result.ok and result.detail.startswith("AttributeError: ")
