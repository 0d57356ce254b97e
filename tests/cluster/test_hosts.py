"""A driver and mirrors on separate hosts: separate folders and addresses, latency, lost packets, partitions and kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.base.files import folder_manifest
from agentrl.cluster.link import KEY_VARIABLE
from agentrl.cluster.run_service import HOST
from agentrl.sandbox.attacks import arena
from tests.cluster.hosts import Host, hosts
from tests.cluster.serving import Driver, driving

pytestmark = pytest.mark.slow  # it moves megabytes through a wire in user space
NAME = "versions/000001"

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from agentrl.cluster.link import Link, take_key
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.mirror_host import relaying

async def main(folder, url, address, operation, name):
    mirror = Mirror(Path(folder), Link(url, take_key(), silence_s=2.0))
    async with relaying(mirror, host=address):
        await asyncio.to_thread(mirror.fetch if operation == "fetch" else mirror.push, name)
        print("done", flush=True)
        await asyncio.sleep(float(os.environ.get("STAY_S", "0")))

asyncio.run(main(*sys.argv[1:]))
"""


def transfer(host: Host, driver: Driver, folder: Path, operation: str, *, stay_s: float = 0.0) -> subprocess.Popen[str]:
    key = driver.start_learner() if operation == "push" else driver.service.new_key(HOST)
    environment = {**os.environ, KEY_VARIABLE: key, "STAY_S": str(stay_s)}
    arguments = ("-c", PROGRAM, str(folder), driver.url, host.address, operation, NAME)
    return host.python(*arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_version(folder: Path, megabytes: int) -> dict[str, str]:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(megabytes << 20))
    (folder / "config.json").write_text("{}")
    return folder_manifest(folder)


def wait_ended(process: subprocess.Popen[str]) -> None:
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "done\n"), errors


def test_an_attack_suite_does_not_report_the_mounts_of_hosts() -> None:
    before = arena._mounts()
    with hosts(1) as network:
        assert len(network) == 1 and "/run/netns/" in Path("/proc/self/mountinfo").read_text()
        assert arena._mounts() == before


def test_versions_reach_hosts_through_latency_loss_kills_and_a_partition(tmp_path: Path) -> None:
    """Three hosts fetch a version at once; one is killed repeatedly, one is cut off for a while. Then one pushes it back."""
    with hosts(4, delay_ms=3.0, loss=0.003) as network, ExitStack() as stack:
        first, *others = network
        driver = stack.enter_context(driving(tmp_path / "run", host=first.address, within=first.enter))
        assert driver.url.startswith("http://10.77.0.1:")
        assert subprocess.run(["curl", "-s", "-m", "1", driver.url], check=False).returncode != 0, "not reachable from this host"
        expected = write_version(driver.folder / NAME, 12)
        copies = [tmp_path / f"host{number}" for number in range(3)]
        processes = [transfer(host, driver, copy, "fetch", stay_s=1.0) for host, copy in zip(others, copies, strict=True)]
        others[1].disconnect()
        for _ in range(3):
            time.sleep(1.0)
            os.killpg(processes[2].pid, signal.SIGKILL)
            processes[2].wait()
            copy = copies[2] / NAME
            assert not copy.exists() or folder_manifest(copy) == expected
            processes[2] = transfer(others[2], driver, copies[2], "fetch")
        others[1].reconnect()
        for process in processes:
            wait_ended(process)
        assert [folder_manifest(copy / NAME) for copy in copies] == [expected] * 3
        (driver.folder / NAME).rename(tmp_path / "removed")
        killed = transfer(others[0], driver, copies[0], "push")
        time.sleep(1.5)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        wait_ended(transfer(others[0], driver, copies[0], "push"))
        assert folder_manifest(driver.folder / NAME) == expected
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert first.name.rpartition("-")[0] not in namespaces
