"""What a launcher guarantees, on this machine and on a Ray cluster. The nodes of the cluster are processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.liveness import StoppedProcesses
from agentrl.base.processes import read_stat
from agentrl.cluster.process_host import LocalLauncher
from agentrl.errors import LaunchError
from agentrl.protocols import Launcher, PartCommand
from agentrl.protocols.cluster import HOST, PORT, PROGRESS, PYTHON, REASONS, ROOT, RUN, SCRATCH
from tests.cluster.ray_nodes import RayNodes, plan_of
from tests.waiting import until

SLEEPS = "import time; time.sleep(600)"
DUMP = "import json, os, sys; print(json.dumps([sys.argv[1:], sys.stdin.read(), dict(os.environ), os.listdir(sys.argv[5])]), flush=True)"


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    if request.param == "local":
        local = LocalLauncher(tmp_path, root=tmp_path / "project")
        yield local
        await local.close()
    else:
        nodes: RayNodes = request.getfixturevalue("ray_nodes")
        async with nodes.launcher(plan_of(nodes.address, "part", "other"), tmp_path) as on_ray:
            yield on_ray


def command(program: str, *arguments: str, name: str = "part", **options: Any) -> PartCommand:
    return PartCommand(name=name, argv=(PYTHON, "-c", program, *arguments), log=f"logs/{name}.log", **options)


async def test_slots_are_filled_in_arguments_environment_and_input(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "3f9a8b7c6d5e4f3a2b1c")
    slots = (RUN, ROOT, HOST, PORT, SCRATCH, '{"versions": "' + RUN + '/versions"}')
    part = await launcher.start(command(DUMP, *slots, environment={"SOCKET": f"{SCRATCH}/socket"}, stdin=f"bind {HOST}"))
    assert await part.wait() == 0
    arguments, stdin, environment, entries = json.loads((tmp_path / "logs" / "part.log").read_text())
    assert arguments[:2] == [str(tmp_path), str(tmp_path / "project")] == [part.folder, arguments[1]]
    scratch = Path(arguments[4])
    assert arguments[2:4] == [part.host, str(part.port)] and part.port > 0 and scratch.is_absolute()
    assert json.loads(arguments[5]) == {"versions": f"{tmp_path}/versions"} and stdin == f"bind {part.host}"
    assert environment["SOCKET"] == f"{scratch}/socket" and "SOME_API_KEY" not in environment and not entries
    await part.kill()
    assert not scratch.exists()


async def test_the_end_of_a_part_is_reported_with_its_code(launcher: Launcher, tmp_path: Path) -> None:
    exiting, killed = await asyncio.gather(
        launcher.start(command("print('done'); raise SystemExit(7)")), launcher.start(command(SLEEPS, name="other"))
    )
    assert killed.returncode is None and killed.pid in [*await wait_for_processes(killed)]
    killed.send_kill()
    assert (await exiting.wait(), await killed.wait()) == (7, -signal.SIGKILL) and (exiting.lost, killed.lost) == ("", "")
    assert (tmp_path / "logs" / "part.log").read_text() == "done\n" and not killed.processes()
    for part in (exiting, killed):
        await part.kill()


async def wait_for_processes(part: Any) -> dict[int, str]:
    """The processes of a part, once they are known."""
    await until(lambda: part.processes())
    return dict(part.processes())


async def test_reports_of_a_part_arrive_and_its_reasons_outlive_it(launcher: Launcher) -> None:
    writes = (
        "import os, sys, time\npipe = os.open(sys.argv[1], os.O_WRONLY)\nos.write(pipe, b'one'); time.sleep(0.7); os.write(pipe, b'two')\n"
        "open(sys.argv[2], 'ab').write(str(time.monotonic()).encode())"
    )
    part, progress = await launcher.start(command(writes, PROGRESS, REASONS)), b""
    while progress != b"onetwo":
        assert b"onetwo".startswith(progress)
        progress += part.read_progress()
        await asyncio.sleep(0.01)
    assert await part.wait() == 0
    assert abs(float(part.reasons()) + part.clock_offset_s - time.monotonic()) < 60.0 and part.read_progress() == b""


async def test_a_signal_reaches_the_children_only(launcher: Launcher, tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; raise SystemExit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    part = await launcher.start(command(parent))
    log = tmp_path / "logs" / "part.log"
    await until(lambda: log.exists() and log.read_text() == "up\n")
    await part.signal_children(signal.SIGUSR1)
    assert await part.wait() == 5


async def test_a_part_that_ignores_sigterm_is_killed_after_its_grace(launcher: Launcher, tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    part = await launcher.start(command(program))
    log = tmp_path / "logs" / "part.log"
    await until(lambda: log.exists() and log.read_text() == "up\n")
    await part.terminate(grace_s=0.2)
    assert part.returncode == -signal.SIGKILL and read_stat(part.pid).has_ended


async def test_a_stopped_process_is_visible(launcher: Launcher) -> None:
    part = await launcher.start(command(SLEEPS))
    stopped = StoppedProcesses("the part", states=lambda _: part.processes())
    stopped.least_s = 0.0
    os.kill(part.pid, signal.SIGSTOP)
    await until(lambda: f"a signal has stopped process {part.pid}" in stopped.overdue(part.pid))
    await part.kill()
    assert part.returncode == -signal.SIGKILL


async def test_running_parts_end_with_the_launcher(launcher: Launcher) -> None:
    parts = [await launcher.start(command(SLEEPS, name=name)) for name in ("part", "other")]
    await launcher.close()
    assert all(read_stat(part.pid).has_ended for part in parts)
    await launcher.close()


async def test_a_program_that_does_not_exist_is_an_error(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match="no-such-program"):
        await launcher.start(PartCommand(name="part", argv=("/no-such-program",), log="logs/part.log"))
    part = await launcher.start(command("print(1)"))
    assert await part.wait() == 0


def test_on_one_machine_each_part_gets_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    async def devices() -> list[str]:
        launcher = LocalLauncher(tmp_path, devices={"server-1": "2"})
        for name in ("server-1", "learner"):
            await (await launcher.start(command("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", name=name))).wait()
        return [(tmp_path / "logs" / f"{name}.log").read_text() for name in ("server-1", "learner")]

    assert asyncio.run(devices()) == ["2\n", "0,1,2\n"]
