"""Parts on a Ray cluster whose nodes, drivers and hosts are lost. The nodes are processes of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.processes import read_stat
from agentrl.cluster import ray_launcher, ray_part
from agentrl.cluster.plan import ClusterPlan
from agentrl.cluster.process_host import free_port
from agentrl.cluster.ray_launcher import RayLauncher
from agentrl.cluster.run_service import HOST
from agentrl.errors import LaunchError, RunFolderBusy, UserError
from agentrl.protocols.cluster import PARENT, RUN
from tests.cluster import ray_nodes as ray_nodes_module
from tests.cluster import serving
from tests.cluster.ray_nodes import RayNodes, plan_of
from tests.cluster.test_launchers import SLEEPS, command
from tests.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0
# Dies with its parent, like the parts of a run.
BOUND = "import sys; from agentrl.base.processes import die_with_parent; die_with_parent(int(sys.argv[1])); " + SLEEPS


# Another job that takes the object store of a node: what a process has mapped cannot be spilled.
HOG = """
import sys, time, numpy, ray
ray.init(address=sys.argv[1], namespace="other", logging_level=40, log_to_driver=False)
@ray.remote(num_cpus=0, resources={"hog": 1})
class Hog:
    def fill(self, size):
        self.objects = [ray.put(numpy.ones(8 << 20, numpy.uint8)) for _ in range(size // (8 << 20) + 2)]
        self.mapped = [ray.get(reference) for reference in self.objects]
        return sum(array.nbytes for array in self.mapped)
hog = Hog.remote()
print(ray.get(hog.fill.remote(int(sys.argv[2]))), flush=True)
time.sleep(600)
"""


def on_spare_nodes(address: str, *names: str) -> ClusterPlan:
    """A plan whose parts each need one of the nodes that a test has added."""
    return plan_of(address, *names, custom={"spare": 1})


def node_of(part: Any, nodes: list[Any]) -> Any:
    return next(node for node in nodes if node.node_id == part.node_id)


async def test_a_part_of_a_killed_node_is_lost_within_seconds_and_restarts_on_another(
    ray_nodes: RayNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [ray_nodes.add(spare=1), ray_nodes.add(spare=1)]
    try:
        async with ray_nodes.launcher(on_spare_nodes(ray_nodes.address, "learner"), tmp_path) as launcher:
            part = await launcher.start(command(BOUND, PARENT, name="learner"))
            ray_nodes.kill(node_of(part, nodes))
            killed = time.monotonic()
            async with asyncio.timeout(LONG_S):
                assert await part.wait() == -signal.SIGKILL
            assert time.monotonic() - killed < 10.0 and part.lost.startswith(("its host on node", "node"))
            await until(lambda: read_stat(part.pid).has_ended)
            await part.kill()
            second = await launcher.start(command(BOUND, PARENT, name="learner"))
            assert second.node_id != part.node_id and second.returncode is None and second.pid != part.pid
            for node in nodes:
                ray_nodes.kill(node)
            await second.wait()
            assert not capfd.readouterr().out, "the output of a command is for its result"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ray_launcher, "START_S", 3.0)
                with pytest.raises(LaunchError, match=r"learner did not start on .*\n(.*\n)*part +count +CPUs(.*\n)*.*node +CPUs"):
                    await launcher.start(command(SLEEPS, name="learner"))
    finally:
        for node in nodes:
            ray_nodes.remove(node)


async def test_a_full_object_store_does_not_matter(ray_nodes: RayNodes, tmp_path: Path) -> None:
    """Parts do not use it: they start, report and end while another job uses all of it."""
    node = ray_nodes.add(spare=1, hog=1)
    size = ray_nodes_module.STORE_BYTES
    hog = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", HOG, ray_nodes.address, str(size), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert hog.stdout is not None
    try:
        printed = [b""]  # Ray may also print that an earlier node is gone
        async with asyncio.timeout(LONG_S):
            while not printed[-1].strip().isdigit():
                printed.append(await hog.stdout.readline())
                assert printed[-1], b"".join(printed).decode()
            assert int(printed[-1]) > size
        async with ray_nodes.launcher(on_spare_nodes(ray_nodes.address, "learner"), tmp_path) as launcher:
            async with asyncio.timeout(LONG_S):
                part = await launcher.start(command("print('x' * 300_000)", name="learner"))
                assert await part.wait() == 0
            await until(lambda: (tmp_path / "logs" / "learner.log").stat().st_size > 300_000)
            running = await launcher.start(command(BOUND, PARENT, name="learner"))
            await running.terminate(grace_s=0.0)
            assert read_stat(running.pid).has_ended
    finally:
        hog.kill()
        await hog.wait()
        ray_nodes.remove(node)


async def test_a_killed_host_process_loses_only_its_part(ray_nodes: RayNodes, tmp_path: Path) -> None:
    async with ray_nodes.launcher(plan_of(ray_nodes.address, "server", "worker-0"), tmp_path) as launcher:
        part, other = [await launcher.start(command(BOUND, PARENT, name=name)) for name in ("server", "worker-0")]
        os.kill(read_stat(part.pid).parent, signal.SIGKILL)
        async with asyncio.timeout(LONG_S):
            await part.wait()
        assert part.lost and other.returncode is None
        second = await launcher.start(command(BOUND, PARENT, name="server"))
        assert second.returncode is None and read_stat(part.pid).has_ended


async def test_a_stopped_host_is_replaced_and_its_part_ends_before_the_next_starts(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped host cannot end its processes when its lease ends."""
    monkeypatch.setattr(ray_part, "SILENT_S", 3.0)
    monkeypatch.setattr(ray_launcher, "_LEASE_ENDS_S", 3.0)
    monkeypatch.setattr(ray_launcher, "_DESCRIBE_S", 2.0)
    async with ray_nodes.launcher(plan_of(ray_nodes.address, "learner"), tmp_path) as launcher:
        exclusive = replace(command(BOUND, PARENT, name="learner"), exclusive=True)
        part = await launcher.start(exclusive)
        os.kill(read_stat(part.pid).parent, signal.SIGSTOP)
        async with asyncio.timeout(LONG_S):
            await part.wait()
            assert "has not answered" in part.lost
            second = await launcher.start(exclusive)
        assert second.returncode is None and read_stat(part.pid).has_ended


async def test_a_host_that_its_driver_does_not_call_ends_its_part(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver, which cannot reach the host, may have restarted the part elsewhere."""
    with_settings(monkeypatch, lease_s=5.0)
    async with ray_nodes.launcher(plan_of(ray_nodes.address, "part"), tmp_path) as launcher:
        part = await launcher.start(command(SLEEPS))
        await asyncio.sleep(8.0)
        assert not read_stat(part.pid).has_ended, "polls renew the lease"
        launcher._poller.close()
        await until(lambda: read_stat(part.pid).has_ended)


DRIVER = """
import asyncio, sys
from pathlib import Path
from agentrl.cluster.ray_launcher import RayLauncher
from tests.cluster.ray_nodes import plan_of
from tests.cluster.test_launchers import SLEEPS, command
async def drive():
    folder = Path(sys.argv[2])
    launcher = await RayLauncher.open(plan_of(sys.argv[1], "part"), folder, root=folder)
    print((await launcher.start(command(SLEEPS))).pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(drive())
"""


async def test_a_run_has_one_driver_and_the_next_ends_the_parts_of_a_killed_one(ray_nodes: RayNodes, tmp_path: Path) -> None:
    plan = plan_of(ray_nodes.address, "part")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, ray_nodes.address, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert driver.stdout is not None
        pid = int(await asyncio.to_thread(driver.stdout.readline))
        with pytest.raises(RunFolderBusy, match=rf"is in use by another agentrl on this cluster: process {driver.pid} on "):
            await RayLauncher.open(plan, tmp_path, root=tmp_path)
        assert not read_stat(pid).has_ended
    finally:
        driver.kill()
        driver.communicate()
    async with ray_nodes.launcher(plan, tmp_path) as launcher:
        part = await launcher.start(command(SLEEPS))
        assert read_stat(pid).has_ended and part.returncode is None


async def test_the_error_for_a_plan_that_does_not_fit_lists_the_nodes(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"1 x learner \(.*64 CPU.*\): room for 0\n(.*\n)*node +CPUs"):
        await RayLauncher.open(plan_of(ray_nodes.address, "learner", cpus=64), tmp_path, root=tmp_path)
    node = ray_nodes.add(spare=1)
    try:
        async with ray_nodes.launcher(on_spare_nodes(ray_nodes.address, "server"), tmp_path) as first:
            monkeypatch.setattr(ray_launcher, "RESERVE_S", 2.0)
            group, first._group = first._group, None  # one process can use one cluster once: another job holds the node
            with pytest.raises(UserError, match=r"room for 0"):
                await first._reserve()
            first._ray.util.remove_placement_group(first._group)
            first._group = group
    finally:
        ray_nodes.remove(node)


def with_settings(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Changes the settings of hosts that start from now on."""
    settings = ray_launcher.HostSettings
    monkeypatch.setattr(ray_launcher, "HostSettings", lambda **options: settings(**{**options, **changes}))


async def test_another_version_of_agentrl_on_a_node_is_an_error(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.__version__", "9.9.9")
    with pytest.raises(UserError, match=r"has agentrl \S+, but the driver has 9\.9\.9\n  fix: install the same version on every node"):
        async with ray_nodes.launcher(plan_of(ray_nodes.address, "part"), tmp_path):
            pass
    assert not [*tmp_path.iterdir()], "the folder is still empty"


async def test_a_node_without_the_run_folder_works_in_a_mirror_and_sends_its_log(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    for number in (0, 1):
        (run / "versions" / f"{number:06d}").mkdir(parents=True)
        (run / "versions" / f"{number:06d}" / "model.safetensors").write_text(f"weights {number}")
    (run / "project").mkdir()
    with_settings(monkeypatch, folder=str(disk))
    program = "import pathlib, sys, time; print(*sorted(pathlib.Path(sys.argv[1]).rglob('*.safetensors')), flush=True); " + SLEEPS
    with serving.driving(run) as driver:
        async with ray_nodes.launcher(plan_of(ray_nodes.address, "part"), run) as launcher:
            assert not launcher.shared_folder
            await launcher.use_driver(driver.url, driver.service.new_key(HOST))
            part = await launcher.start(replace(command(program, RUN), needs=("versions/000000",)))
            log, matches = run / "logs" / "part.log", str(disk / "versions" / "000000" / "model.safetensors")
            await until(lambda: log.exists() and matches in log.read_text(), 20.0)
            await part.fetch("versions/000001")
            assert (disk / "versions" / "000001" / "model.safetensors").read_text() == "weights 1" and part.folder == str(disk)
            with pytest.raises(LaunchError, match="versions/000007 does not exist"):
                await part.fetch("versions/000007")


async def test_the_signal_handlers_of_the_driver_are_kept(ray_nodes: RayNodes, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with ray_nodes.launcher(plan_of(ray_nodes.address, "part"), tmp_path):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_a_driver_outside_of_the_cluster_connects_through_the_client_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "RESERVE_S"):  # the client server starts another process for each connection
        monkeypatch.setattr(ray_launcher, name, ray_nodes_module.PATIENCE_S)
    port = free_port("127.0.0.1")
    with ray_nodes_module.running(client_port=port) as nodes:
        nodes.add()
        launcher = await RayLauncher.open(plan_of(f"ray://127.0.0.1:{port}", "part"), tmp_path, root=tmp_path)
        try:
            part = await launcher.start(command(SLEEPS))
            await until(lambda: part.processes())
            await part.terminate(grace_s=10.0)
            assert part.returncode == -signal.SIGTERM and read_stat(part.pid).has_ended
            part = await launcher.start(command(BOUND, PARENT))
            os.kill(read_stat(part.pid).parent, signal.SIGKILL)
            async with asyncio.timeout(LONG_S):
                await part.wait()
            assert part.lost
        finally:
            await launcher.close()
