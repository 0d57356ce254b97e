"""A host in another Python: real processes with scripts that answer, fail, die, block and send invalid data."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.environment import host as hosting
from agentrl.environment.host import INSIDE, Host, HostDied, HostSpec, describe
from agentrl.errors import InfrastructureError, PolicyFault, TaskError, UserError

SCRIPT = f"""
import asyncio, json, os, subprocess, sys, tempfile, time
sys.path.insert(0, {str(INSIDE)!r})
from host_channel import Channel, Fault, main

def describe(config):
    exec(config.get("describe", "pass"))
    return config

async def serve(channel, config):
    print("ready", config, flush=True)
    await asyncio.Event().wait()

async def echo(params, caller): return params
async def pid(params, caller): return os.getpid()
async def number(params, caller): return float(params["value"])
async def fail(params, caller): raise Fault(params["blame"], "it is " + params["blame"])
async def raises(params, caller): raise {{"KeyError": KeyError, "SystemExit": SystemExit}}[params["what"]]("gone")
async def block(params, caller): time.sleep(params["s"])
async def child(params, caller): return subprocess.Popen(["sleep", "600"]).pid
async def keep(params, caller): return tempfile.mkstemp()[1]
async def ask(params, caller): return await caller.request("answer", **params)
async def die(params, caller):
    print("last words", flush=True)
    os._exit(3)

async def sleep(params, caller):
    try:
        await asyncio.sleep(params["s"])
    except asyncio.CancelledError:
        open(params["file"], "w").close()
        raise

async def late(params, caller):
    asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(later(caller)))

async def later(caller):
    try:
        await caller.request("answer")
    except Fault as fault:
        print("refused:", fault, flush=True)
        open("refused", "w").close()

async def send(params, caller):
    caller._channel._writer.write(eval(params["line"]))
    await asyncio.sleep(30)

main(describe, serve, echo, pid, number, fail, raises, block, child, keep, ask, die, sleep, late, send)
"""

Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(hosting, "RESTART_S", 0.001)
    (tmp_path / "script.py").write_text(SCRIPT)

    def started(**config: Any) -> Host:
        spec = HostSpec(name="fake", python=sys.executable, script=str(tmp_path / "script.py"), config=config, folder=tmp_path)
        return Host(spec)

    yield started
    assert not [child for child in psutil.Process().children(recursive=True) if "script.py" in " ".join(child.cmdline())]


async def test_a_host_answers_many_calls_at_once_and_keeps_running(start: Start) -> None:
    host = start(size=3)
    values = await asyncio.gather(*(host.call("echo", {"value": [number, "é\n", None]}, timeout_s=20) for number in range(50)))
    assert [value["value"][0] for value in values] == list(range(50))
    assert len({await host.call("pid", {}, timeout_s=20) for _ in range(3)}) == 1
    await host.close()


@pytest.mark.parametrize(("blame", "kind"), [("task", TaskError), ("policy", PolicyFault), ("infrastructure", InfrastructureError)])
async def test_a_fault_of_the_host_has_the_blame_that_it_reports(start: Start, blame: str, kind: type[Exception]) -> None:
    host = start()
    with pytest.raises(kind, match=f"fake: it is {blame}"):
        await host.call("fail", {"blame": blame}, timeout_s=20)
    for what in ("KeyError", "SystemExit"):
        with pytest.raises(InfrastructureError, match=f"{what}: .*gone"):
            await host.call("raises", {"what": what}, timeout_s=20)
    with pytest.raises(InfrastructureError, match="KeyError"):
        await host.call("no such method", {}, timeout_s=20)
    assert await host.call("echo", {"alive": 1}, timeout_s=20) == {"alive": 1}
    await host.close()


@pytest.mark.parametrize("value", ["nan", "inf"])
async def test_a_result_that_is_not_strict_json_is_an_error_at_once(start: Start, value: str) -> None:
    host = start()
    with pytest.raises(InfrastructureError, match="ValueError: Out of range float values"):
        await host.call("number", {"value": value}, timeout_s=20)
    await host.close()


async def test_requests_of_the_host_are_answered_only_while_their_call_runs(start: Start, tmp_path: Path) -> None:
    async def serve(method: str, params: Any) -> Any:
        if params.get("fail"):
            raise TaskError("no sandbox")
        return [method, params]

    host = start()
    assert await host.call("ask", {"a": 1}, timeout_s=20, serve=serve) == ["answer", {"a": 1}]
    with pytest.raises(TaskError, match="no sandbox"):
        await host.call("ask", {"fail": 1}, timeout_s=20, serve=serve)
    with pytest.raises(InfrastructureError, match="the episode has ended"):
        await host.call("ask", {}, timeout_s=20)
    await host.call("late", {}, timeout_s=20, serve=serve)
    async with asyncio.timeout(10):
        while not (tmp_path / "refused").exists():
            await asyncio.sleep(0.01)
    await host.close()


async def test_a_call_that_is_late_or_cancelled_is_cancelled_in_the_host(start: Start, tmp_path: Path) -> None:
    host = start()
    await host.call("echo", {}, timeout_s=20)
    with pytest.raises(InfrastructureError, match="sleep returned no result within"):
        await host.call("sleep", {"s": 60, "file": "late"}, timeout_s=0.2)
    cancelled = asyncio.create_task(host.call("sleep", {"s": 60, "file": "cancelled"}, timeout_s=60))
    await asyncio.sleep(0.2)
    cancelled.cancel()
    async with asyncio.timeout(10):
        while not ((tmp_path / "late").exists() and (tmp_path / "cancelled").exists()):
            await asyncio.sleep(0.01)
    assert await host.call("echo", {}, timeout_s=20) == {}
    await host.close()


@pytest.mark.slow
async def test_a_killed_host_fails_its_calls_and_is_restarted(start: Start) -> None:
    host = start()
    old = await host.call("pid", {}, timeout_s=20)
    calls = [asyncio.create_task(host.call("sleep", {"s": 60, "file": "x"}, timeout_s=60)) for _ in range(5)]
    await asyncio.sleep(0.1)
    os.kill(old, signal.SIGKILL)
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, HostDied) and "status -9" in str(error) for error in errors), errors
    assert await host.call("pid", {}, timeout_s=20) != old and host.deaths == 0
    await host.close()


@pytest.mark.slow
@pytest.mark.parametrize("pings", [False, True])
async def test_a_host_that_keeps_dying_is_not_started_again(start: Start, pings: bool) -> None:
    host = start()
    for _ in range(hosting.MAX_DEATHS + 1):
        if pings:  # as before each episode
            await host.call("ping", {}, timeout_s=20)
        with pytest.raises(HostDied, match=r"(?s)status 3.*last words"):
            await host.call("die", {}, timeout_s=20)
    with pytest.raises(HostDied, match="died 6 times in a row"):
        await host.call("echo", {}, timeout_s=20)
    await host.close()


LINES = {
    "text": 'b"hello\\n"',
    "too deep": 'b"[" * 100000 + b"]" * 100000 + b"\\n"',
    "a list": 'b"[1]\\n"',
    "no id": "b'{\"result\": 1}\\n'",
    "NaN": 'b\'{"id": 1, "result": {"value": NaN}}\\n\'',
    "a huge number": 'b\'{"id": 1, "result": \' + b"9" * 5000 + b"}\\n"',
    "not UTF-8": 'b"\\xff\\xfe\\n"',
    "no end": 'b"x" * (1 << 21)',
    "too many requests": 'b"".join(b\'{"id": %d, "for": 9, "method": "exec", "params": {}}\\n\' % at for at in range(100_000))',
    "a request of nobody": 'b\'{"id": 1, "method": "exec", "params": {}}\\n\'',
}


@pytest.mark.parametrize("line", LINES)
async def test_an_invalid_message_ends_the_host_and_nothing_else(start: Start, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "MAX_MESSAGE", 1 << 20)
    host = start()
    with pytest.raises(HostDied, match="it sent an invalid message"):
        await host.call("send", {"line": LINES[line]}, timeout_s=20)
    assert await host.call("echo", {}, timeout_s=20) == {}
    await host.close()


async def test_a_reply_to_an_unknown_call_is_ignored(start: Start) -> None:
    host = start()
    call = asyncio.create_task(host.call("send", {"line": 'b\'{"id": 77, "result": 1}\\n\''}, timeout_s=20))
    await asyncio.sleep(0.3)
    assert await host.call("echo", {}, timeout_s=20) == {} and not call.done()
    call.cancel()
    await host.close()


async def test_code_that_blocks_the_event_loop_ends_the_host(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "PING_S", 0.1)
    monkeypatch.setattr(hosting, "SILENT_S", 0.3)
    host = start()
    await host.call("echo", {}, timeout_s=20)
    with pytest.raises(HostDied, match="blocks the event loop"):
        await host.call("block", {"s": 60}, timeout_s=20)
    await host.close()


async def test_child_processes_end_with_the_host(start: Start) -> None:
    host = start()
    child = await host.call("child", {}, timeout_s=20)
    await host.close()
    async with asyncio.timeout(5):
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_temporary_files_are_deleted_with_the_host(start: Start) -> None:
    host = start()
    file = Path(await host.call("keep", {}, timeout_s=20))
    assert file.is_file()
    await host.close()
    assert not file.exists() and not file.parent.exists()


def test_a_host_dies_with_its_driver_even_if_its_loop_is_blocked(start: Start, tmp_path: Path) -> None:
    host = start()

    async def drive() -> int:
        number: int = await host.call("pid", {}, timeout_s=20)
        blocked = asyncio.create_task(host.call("block", {"s": 60}, timeout_s=60))
        await asyncio.sleep(0.2)
        os.write(pipe[1], json.dumps(number).encode())
        assert not blocked.done()
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    pipe = os.pipe()
    if (driver := os.fork()) == 0:
        asyncio.run(drive())
    os.waitpid(driver, 0)
    number = json.loads(os.read(pipe[0], 100))
    for _ in range(500):
        if not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.01)
    pytest.fail("the host outlives its driver")


def test_a_host_ends_with_its_event_loop(start: Start) -> None:
    async def use() -> int:
        number: int = await start().call("pid", {}, timeout_s=20)
        return number

    assert not psutil.pid_exists(asyncio.run(use()))


def test_an_unusable_python_is_an_error_with_its_path(tmp_path: Path) -> None:
    spec = HostSpec(name="fake", python="/nowhere/python", script="x.py", config={})
    with pytest.raises(UserError, match="/nowhere/python cannot be started"):
        describe(spec)
    with pytest.raises(HostDied, match="/nowhere/python cannot be started"):
        asyncio.run(Host(spec).call("echo", {}, timeout_s=5))


def test_a_description_is_read_whatever_the_script_prints(start: Start) -> None:
    assert describe(start(describe="print('x' * 100000)").spec) == {"describe": "print('x' * 100000)"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise Fault('task', 'no such task')", "fake: no such task"),
        ("raise ValueError('bad')", "ValueError: bad"),
        ("sys.exit(4)", "SystemExit"),
        ("json.dump({'error': 'no licence'}, open(sys.argv[2], 'w')); os._exit(0)", "fake: no licence"),
        ("print('out', flush=True); os._exit(4)", "(?s)status 4 and did not describe the tasks.*out"),
        ("time.sleep(60)", "took more than 0.5 s"),
    ],
)
def test_a_script_that_describes_nothing_is_an_error(start: Start, code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in code:
        monkeypatch.setattr(hosting, "DESCRIBE_S", 0.5)
    with pytest.raises(UserError, match=message):
        describe(start(describe=code).spec)


def test_the_host_gets_no_secret_and_no_python_setting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    spec = HostSpec(name="fake", python="python3", script="x.py", config={}, environment={"MINE": "1"})
    variables = spec.variables("/its")
    assert (variables["MINE"], variables["TMPDIR"]) == ("1", "/its") and not {"HF_TOKEN", "PYTHONPATH"} & set(variables)
