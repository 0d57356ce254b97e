"""Helpers for tests with real sandboxes: an image, specs, cells, and the processes of a sandbox."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.records import SandboxSpec
from agentrl.sandbox import limits, list_open
from agentrl.sandbox.cell import CellBackend
from agentrl.sandbox.cell.server import Cell
from agentrl.sandbox.lease import lease

IMAGE = 'suite = "bookworm"\npackages = ["python3"]\n'
SPEC = SandboxSpec(image="image", memory_mb=128, processes=16, disk_mb=16)
ALONE = replace(SPEC, runtime="runc")
"""Gives each sandbox its own container, as every spec with a runtime does. Every daemon has this runtime."""
KEY = "0123456789abcdef" * 2
FETCH = "import urllib.request as r\nprint(r.urlopen('http://127.0.0.1:{}/', timeout=10).read().decode())"
DRIVER = """
import asyncio, sys
from pathlib import Path
from agentrl.records import codec, SandboxSpec
from agentrl.sandbox.cell import CellBackend
async def main():
    backend = CellBackend(run_label="test", root=Path(sys.argv[1]), addresses=[sys.argv[2]], key=sys.argv[3])
    sandbox = await backend.open(codec.from_json(SandboxSpec, sys.argv[4]))
    print("open", flush=True)
    await sandbox.exec(["sleep", "1000"], timeout_s=1000)
asyncio.run(main())
"""
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


def processes_of(word):
    """Pids of processes with `word` in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def holds_open(pid, suffix):
    """Whether a process has a file open whose path ends with `suffix`."""
    with contextlib.suppress(OSError):
        return any(os.readlink(fd).endswith(suffix) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def leftovers():
    """Names of the control groups and sandboxes of this process that still exist."""
    control_groups = limits.find_control_groups()
    groups = control_groups.names() if control_groups is not None else []
    return [name for name in [*groups, *(sandbox.name for sandbox in list_open())] if lease() in name]


def our_processes():
    """Pids of the processes that this process has started, and of the exec servers of its sandboxes. Excludes other runs."""
    servers = {pid for pid in processes_of("exec_server") if lease_of_process(pid) == lease()}
    return servers | {child.pid for child in psutil.Process().children(recursive=True)}


def inner_pid(pid):
    """The pid of a process in its own namespace."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
    except (OSError, IndexError):
        return 0


def lease_of_process(pid):
    """The lease of the driver to which an exec server belongs, if it is this process; otherwise `?`."""
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return "?"
    return lease() if lease() in mounts else "?"


@contextlib.asynccontextmanager
async def cell(**options):
    """A cell in this process, and its address."""
    cell_server = Cell(KEY, **options)
    port = await cell_server.start("127.0.0.1", 0)
    try:
        yield cell_server, f"127.0.0.1:{port}"
    finally:
        await cell_server.close()
        assert leftovers() == []


@contextlib.asynccontextmanager
async def driver(root, *addresses, key=KEY):
    cell_backend = CellBackend(run_label="test", root=root, addresses=addresses, key=key)
    try:
        yield cell_backend
    finally:
        await cell_backend.close()
