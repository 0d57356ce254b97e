"""Both backends with real sandboxes: the conformance checks, and what happens when parts are killed from outside."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.records import SandboxSpec
from agentrl.sandbox import WarmPool, bubblewrap, limits, list_open, open_sandboxes, prune, select_backend
from agentrl.sandbox.conformance import CHECKS, check_conformance
from agentrl.sandbox.lease import lease, runtime_folder
from tests.sandbox.building import BOTH, SPEC, inner_pid, lease_of_process, our_processes, processes_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def test_conformance(backend):
    assert [(result.name, result.detail) for result in await check_conformance(backend, SPEC)] == [(name, "") for name in CHECKS]


async def test_many_at_once(backend):
    sandboxes = await asyncio.gather(*(backend.open(SPEC, files={"n": str(n).encode()}) for n in range(12)))
    results = await asyncio.gather(*(sandbox.python("print(open('n').read())", timeout_s=60) for sandbox in sandboxes))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(12)]
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_sandbox_killed_from_outside_is_a_typed_error(backend):
    sandbox = await backend.open(SPEC)
    running = asyncio.create_task(sandbox.python("import time; time.sleep(60)", timeout_s=90))
    await asyncio.sleep(0.3)
    for pid in processes_of("exec_server.py"):
        if lease_of_process(pid) in sandbox.id:
            with contextlib.suppress(ProcessLookupError):  # it ended with process 1
                os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="ended"):
        await running
    await sandbox.close()
    new_sandbox = await backend.open(SPEC)
    assert (await new_sandbox.python("print(1)", timeout_s=60)).stdout == "1\n"


async def test_waiting_child_may_die_or_be_paused(backend):
    """The child that waits for the next program is replaced if it is killed from outside, and continues after a pause."""

    def waiting(sandbox):
        return [pid for pid in processes_of("exec_server") if lease_of_process(pid) in sandbox.id and inner_pid(pid) > 1]

    async with asyncio.timeout(300):
        sandbox = await backend.open(SPEC)
        for _ in range(3):
            assert (await sandbox.python("print(1)", timeout_s=60)).stdout == "1\n"
            await until(lambda: len(waiting(sandbox)) == 1)
            (pid,) = waiting(sandbox)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: inner_pid(pid) <= 1)
            assert (await sandbox.exec(["echo", "2"], timeout_s=60)).stdout == "2\n"
        await sandbox.pause()
        await sandbox.resume()
        assert (await sandbox.exec(["echo", "3"], timeout_s=60)).stdout == "3\n"
        await sandbox.snapshot()
        assert (await sandbox.exec(["echo", "4"], timeout_s=60)).stdout == "4\n"


async def test_work_larger_than_a_pipe(backend):
    """Code and standard input reach the waiting child in pieces, and their rest never reaches the next program."""
    sandbox = await backend.open(SPEC)
    text = "x" * 300_000
    for session in ("", "s"):
        assert (await sandbox.python(f"print(len('{text}'))", timeout_s=60, session=session)).stdout == "300000\n"
    assert (await sandbox.exec(["head", "-c", "3"], stdin=text.encode(), timeout_s=60)).stdout == "xxx"
    assert (await sandbox.exec(["wc", "-c"], timeout_s=60)).stdout == "0\n"
    assert (await sandbox.exec(["true"], env={"LONG": text[:100_000]}, stdin=b"y", timeout_s=60)).ok
    assert (await sandbox.exec(["echo", text], timeout_s=60)).exit_code == 127  # no kernel takes an argument that long
    assert (await sandbox.python("print(1)", timeout_s=60)).stdout == "1\n"


async def test_exhausted_process_limit_is_blamed_on_the_program(backend):
    sandbox = await backend.open(SPEC)
    fill = "import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(600)\nexcept OSError: print('full')"
    assert (await sandbox.python(fill, timeout_s=60)).stdout == "full\n"
    fork = "import os\nos.waitpid(os.fork() or os._exit(0), 0)"
    for session in ("", "s"):
        result = await sandbox.python(fork, timeout_s=60, session=session)  # the slot of the program that has ended is free
        assert result.exit_code == 1 and "BlockingIOError" in result.stderr
    result = await sandbox.python("print(1)", timeout_s=60)
    assert (result.exit_code, result.stderr) == (126, "agentrl: cannot start: Resource temporarily unavailable\n")
    assert (await sandbox.python("1", timeout_s=60, session="s")).stdout == "1\n"
    result = await sandbox.python("1", timeout_s=60, session="other")
    assert result.exit_code == 126 and result.session_ended and not result.restarted


async def test_cancelled_call_leaves_nothing(backend):
    opening = [asyncio.create_task(backend.open(SPEC)) for _ in range(4)]
    await asyncio.sleep(0.15)
    for task in opening:
        task.cancel()
    for outcome in await asyncio.gather(*opening, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            await outcome.close()
    sandbox = await backend.open(SPEC)
    running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=90))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"], timeout_s=60)
    await sandbox.close()


async def test_leftovers_of_a_killed_driver_are_removed(backend, root):
    code = (
        "import asyncio, sys, pathlib\n"
        "from agentrl.records import SandboxSpec\n"
        "from agentrl.sandbox import select_backend\n"
        "async def main():\n"
        f"    backend = select_backend({backend.name!r}, run_label='doomed', root=pathlib.Path({str(root)!r}))\n"
        "    sandbox = await backend.open(SandboxSpec(image='image'))\n"
        "    print(sandbox.id, flush=True)\n"
        "    await sandbox.exec(['sleep', '600'], timeout_s=900)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        name = driver.stdout.readline().strip()
        assert [s.run for s in list_open() if s.name == name and s.driver_alive] == ["doomed"]
        driver.kill()
    own_sandbox = await backend.open(SPEC)
    await asyncio.to_thread(prune)
    await until(lambda: all(sandbox.name != name for sandbox in list_open()))
    assert not (runtime_folder() / name.removeprefix("agentrl-").rpartition("-")[0]).exists()
    assert (await own_sandbox.python("print(1)", timeout_s=60)).ok


async def test_warm_pool_over_a_real_backend(backend):
    pool = WarmPool(backend, warm=2, max_open=4)
    await pool.prepare(SPEC)
    for _ in range(5):
        sandbox = await pool.open(SPEC, files={"f": b"warm"})
        assert (await sandbox.python("print(open('f').read())", timeout_s=60)).stdout == "warm\n"
        await sandbox.close()
    await pool.close()


async def test_wrong_image_or_runtime_is_a_user_error(backend):
    with pytest.raises(UserError, match=r"neither .*image\.toml nor a Dockerfile exists"):
        await backend.open(SandboxSpec(image="missing"))
    with pytest.raises((SandboxError, SandboxUnavailable), match="no-such-runtime"):
        await backend.open(SandboxSpec(image="image", runtime="no-such-runtime"))


async def test_opening_has_a_deadline(backend):
    start = time.monotonic()
    for timeout_s in (0.001, 0.004, 0.01):
        with pytest.raises(SandboxError):
            await backend.open(SPEC, timeout_s=timeout_s)
    assert time.monotonic() - start < 120.0  # otherwise each missing greeting would take 60 s


@pytest.mark.bubblewrap
async def test_opening_cancelled_at_any_moment_leaves_no_process(root, monkeypatch):
    monkeypatch.setattr(bubblewrap, "ENDING_S", 300.0)  # so that a process that is not killed fails the test
    backend = select_backend("bubblewrap", run_label="test", root=root)
    await backend.prepare(SPEC)
    before = our_processes()
    start = time.monotonic()
    for step in range(60):
        with contextlib.suppress(SandboxError):
            sandbox = await backend.open(SPEC, timeout_s=0.001 * (1 + step % 30))
            await sandbox.close()
    took = time.monotonic() - start
    assert our_processes() - before == set()
    assert [sandbox for sandbox in list_open() if lease() in sandbox.name] == []
    control_groups = limits.find_control_groups()
    assert control_groups is None or [name for name in control_groups.names() if lease() in name] == []
    await backend.close()
    assert took < 200.0


@pytest.mark.parametrize("name", BOTH)
async def test_open_sandboxes(name, root):
    pool = await open_sandboxes(SandboxConfig(backend=name), warm=1, run_label="test", root=root)
    assert pool.name == name
    sandbox = await pool.open(SPEC)
    assert (await sandbox.python("print(6 * 7)", timeout_s=60)).stdout == "42\n"
    await pool.close()


def test_without_any_backend_the_error_names_the_command_to_run(root, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("auto", "docker", "bubblewrap"):
        with pytest.raises(SandboxUnavailable, match=r"fix: (.|\n)*apt-get install"):
            select_backend(name, run_label="test", root=root)
