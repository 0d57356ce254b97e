"""What a host guarantees about the processes that it starts. `tests/cluster/test_launchers.py` has what is the same on a cluster."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.base.processes import process_group, read_stat
from agentrl.base.run_lock import PARTS, drive_folder
from agentrl.cluster import process_host
from agentrl.cluster.process_host import ProcessHost
from agentrl.errors import LaunchError, UserError
from agentrl.protocols.cluster import PARENT, PYTHON, PartCommand
from tests.waiting import until, wait_until

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
# A process in its own session, like a rank that torchrun starts.
DETACHED = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {IGNORES!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def command(program: str, *arguments: str, name: str = "part") -> PartCommand:
    return PartCommand(name=name, argv=(PYTHON, "-c", program, *arguments), log=f"logs/{name}.log")


async def output(folder: Path, lines: int = 1, name: str = "part") -> list[str]:
    log = folder / "logs" / f"{name}.log"
    await until(lambda: log.exists() and log.read_text().count("\n") >= lines)
    return log.read_text().splitlines()


async def test_a_process_that_ignores_sigterm_and_its_detached_child_are_killed(tmp_path: Path) -> None:
    part = ProcessHost(tmp_path).start(command(DETACHED))
    child, _ = await output(tmp_path, 2)
    assert not read_stat(int(child)).has_ended and int(child) not in process_group(part.pid)
    await part.terminate(grace_s=0.1)
    assert part.returncode == -signal.SIGTERM and read_stat(int(child)).has_ended
    await part.kill()


async def test_a_part_is_killed_completely_as_soon_as_a_file_descriptor_is_free(tmp_path: Path) -> None:
    part = ProcessHost(tmp_path).start(command(DETACHED))
    child, _ = await output(tmp_path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_stat(int(child))
        assert part.processes() == {}
        killing = asyncio.create_task(part.kill())
        await asyncio.sleep(0.2)
        assert not killing.done()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await killing
    assert read_stat(int(child)).has_ended


async def test_a_file_descriptor_that_is_taken_in_between_does_not_stop_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = ProcessHost(tmp_path).start(command(DETACHED))
    child, _ = await output(tmp_path, 2)
    living, calls = process_host._living, itertools.count()

    def interrupted(members: Mapping[int, int]) -> dict[int, int]:
        if next(calls) in (1, 2):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return living(members)

    monkeypatch.setattr(process_host, "_living", interrupted)
    await part.kill()
    assert part.cleaned and read_stat(int(child)).has_ended and next(calls) > 2


async def test_the_remaining_group_of_a_dead_process_is_killed(tmp_path: Path) -> None:
    part = ProcessHost(tmp_path).start(command("import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"))
    (child,) = await output(tmp_path)
    assert await part.wait() == 0 and not read_stat(int(child)).has_ended and not part.processes()
    await part.kill()
    assert read_stat(int(child)).has_ended


async def test_a_process_that_does_not_end_after_sigkill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ProcessHost(tmp_path)
    part = host.start(command("import time; time.sleep(600)"))
    monkeypatch.setattr(process_host, "_GONE_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(process_host, "_kill", lambda members, group: None)
        with pytest.raises(LaunchError, match=rf"process {part.pid} of part did not exit after SIGKILL: a disk or GPU .*\n  fix: "):
            await part.kill()
    await host.close()
    assert part.returncode == -signal.SIGKILL


async def test_the_next_driver_waits_for_the_processes_of_the_last_one(tmp_path: Path) -> None:
    host = ProcessHost(tmp_path)
    host.start(command("import time; time.sleep(600)"))
    with pytest.raises(UserError, match="are still running after 0 s"), drive_folder(tmp_path, command="next", wait_s=0.0):
        pass
    await host.close()
    with drive_folder(tmp_path, command="next", wait_s=0.0):
        assert (tmp_path / PARTS).exists()


@pytest.mark.slow
def test_processes_die_with_a_killed_host(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from agentrl.base.processes import die_with_parent; die_with_parent(int(sys.argv[1]))\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    owner = (
        "import sys, time; from pathlib import Path; from agentrl.cluster.process_host import ProcessHost\n"
        "from tests.cluster.test_process_host import command; from agentrl.protocols.cluster import PARENT\n"
        f"ProcessHost(Path(sys.argv[1])).start(command({program!r}, PARENT)); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", owner, str(tmp_path)], cwd=Path(__file__).resolve().parents[2])
    try:
        pid = int(asyncio.run(output(tmp_path))[0])
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: read_stat(pid).has_ended)


def test_the_slot_of_the_parent_is_this_process(tmp_path: Path) -> None:
    part = ProcessHost(tmp_path).start(command("import sys; sys.exit(int(sys.argv[1]) != __import__('os').getppid())", PARENT))
    assert asyncio.run(part.wait()) == 0
