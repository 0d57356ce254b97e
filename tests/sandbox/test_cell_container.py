"""A cell as process 1 of a Docker container: attacks from its sandboxes, its memory, and its end. And a driver whose machine is lost."""

import contextlib
import io
import os
import secrets
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import codec
from agentrl.sandbox import docker_client, limits
from agentrl.sandbox.attacks import run_attacks
from agentrl.sandbox.cell import CellBackend, wire
from agentrl.sandbox.images import cache_folder
from tests.cluster.hosts import hosts
from tests.sandbox.building import DRIVER, KEY, SPEC
from tests.waiting import until, wait_until

pytestmark = [
    *(pytest.mark.slow, pytest.mark.bubblewrap, pytest.mark.usefixtures("no_orphans")),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]
ROOT = Path(__file__).resolve().parents[2]
MEMORY_MB = 1536
RIGHTS = ("SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "NET_ADMIN", "MKNOD", "CHOWN", "DAC_OVERRIDE", "FOWNER", *limits.server_capabilities())
ENVIRONMENT = {"AGENTRL_CELL_KEY": KEY, "AGENTRL_CACHE": str(cache_folder()), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}


@contextlib.contextmanager
def cell_container():
    """Name and address of a cell whose container sees the programs of this machine read-only."""
    api, name = docker_client.new_client(60.0), f"agentrl-test-{secrets.token_hex(4)}"
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    api.import_image_from_data(empty.getvalue(), repository="agentrl-empty", tag="test")
    programs = {"/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", sys.base_prefix, sys.prefix, str(ROOT)}
    programs |= {path for path in sys.path if os.path.isdir(path)}
    binds = [f"{path}:{path}:ro" for path in sorted(programs) if os.path.exists(path)] + [f"{cache_folder()}:{cache_folder()}"]
    host = {
        "NetworkMode": "host",
        "CapDrop": ["ALL"],
        "CapAdd": list(RIGHTS),
        "SecurityOpt": ["seccomp=unconfined", "apparmor=unconfined"],
        "LogConfig": {"Type": "json-file", "Config": {}},
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "CgroupnsMode": "private",
        "Memory": MEMORY_MB << 20,
        "Binds": binds,
        "Tmpfs": {"/tmp": "rw,exec", "/run": "rw"},
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "agentrl", "sandbox", "serve", "--listen", f"127.0.0.1:{port}"]
    variables = [f"{key}={value}" for key, value in ENVIRONMENT.items()]
    config = {"Image": "agentrl-empty:test", "Cmd": command, "Env": variables, "WorkingDir": str(ROOT), "HostConfig": host}
    api.create_container_from_config(config, name)
    try:
        api.start(name)
        wait_until(lambda: b"cell ready" in api.logs(name) or not api.inspect_container(name)["State"]["Running"])
        assert api.inspect_container(name)["State"]["Running"], api.logs(name).decode()
        yield name, f"127.0.0.1:{port}"
    finally:
        api.remove_container(name, force=True)
        api.close()


@pytest.mark.docker
async def test_cell_in_a_container(root):
    with cell_container() as (name, address):
        opened = CellBackend(run_label="test", root=root, addresses=[address], key=KEY)
        try:
            results = await run_attacks(opened, replace(SPEC, memory_mb=192, processes=48), only="cell_")
            results += await run_attacks(opened, replace(SPEC, memory_mb=192, processes=48), only="memory_bomb")
            assert len(results) == 4 and [result for result in results if result.verdict != "contained"] == []
            with pytest.raises(SandboxTimeout, match="room for 64 sandboxes and 1280 MiB"):
                await opened.open(replace(SPEC, memory_mb=MEMORY_MB), timeout_s=2.0)
            sandbox = await opened.open(SPEC)
            inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", name]
            first = psutil.Process(int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout))
            assert [child.status() == psutil.STATUS_ZOMBIE for child in first.children()] == [False], "it collects what sandboxes leave"
            subprocess.run(["docker", "kill", name], check=True, capture_output=True)
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"], timeout_s=20)
        finally:
            await opened.close()


async def test_sandboxes_of_a_lost_machine_end(root):
    """A host without a cable sends no end of connection. The cell notices the silence."""
    with hosts(2) as (near, far):
        cell = near.python(
            "-m", "agentrl", "sandbox", "serve", stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **ENVIRONMENT}
        )
        assert "cell ready" in cell.stdout.readline()
        arguments = (str(root), f"{near.address}:{wire.PORT}", KEY, codec.to_json(SPEC).decode())
        driver = far.python("-c", DRIVER, *arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert driver.stdout.readline() == "open\n"
        far.disconnect()
        await until(lambda: not _inside(cell.pid), patience_s=60)
        cell.terminate()
        assert cell.wait(timeout=30) == 0
        for process in (cell, driver):
            process.stdout.close()


def _inside(cell):
    """Whether the cell has processes below it."""
    return subprocess.run(["pgrep", "-P", str(cell)], capture_output=True, check=False).returncode == 0
