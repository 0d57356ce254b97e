"""What tests of real sandboxes have in common: an image, what may be used of the machine, and whose processes are whose."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.records import SandboxSpec
from agentrl.sandbox.lease import lease

IMAGE = 'suite = "bookworm"\npackages = ["python3"]\n'
SPEC = SandboxSpec(image="image", memory_mb=128, processes=16, disk_mb=16)
ALONE = replace(SPEC, runtime="runc")
"""A container for each sandbox, as for every spec that names a runtime. Every daemon knows this one."""
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


def processes_of(word):
    """Pids of processes with `word` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def holds_open(pid, end):
    """Whether a process has a file open whose path ends so."""
    with contextlib.suppress(OSError):
        return any(os.readlink(fd).endswith(end) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def our_processes():
    """Pids of what this process has started, and of exec servers of its sandboxes whoever their parent is; not those of other runs."""
    servers = {pid for pid in processes_of("exec_server") if lease_of_process(pid) == lease()}
    return servers | {child.pid for child in psutil.Process().children(recursive=True)}


def inner_pid(pid):
    """The pid of a process in its own namespace."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])
    except (OSError, IndexError):
        return 0


def lease_of_process(pid):
    """The lease of the driver that a server process belongs to: bwrap's parent, or what is mounted into the container."""
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return "?"
    return lease() if lease() in mounts else "?"
