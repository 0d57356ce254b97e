"""Leases distinguish living drivers from dead ones."""

import os
import subprocess
import sys

from agentrl.sandbox import lease
from agentrl.sandbox.cleanup import lease_in_name


def test_lease_of_a_dead_process_is_not_alive():
    assert lease.alive(lease.lease())
    code = "from agentrl.sandbox.lease import lease; print(lease())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other != lease.lease() and not lease.alive(other)


def test_reused_pid_has_another_lease():
    boot, pid, start = lease.lease().split("-")
    assert int(pid) == os.getpid()
    assert not lease.alive(f"{boot}-{pid}-{int(start) - 1}")
    assert not lease.alive(f"00000000-{pid}-{start}")


def test_other_text_counts_as_alive():
    assert lease.alive("") and lease.alive("somebody-else")


def test_name_contains_its_lease():
    first, second = lease.sandbox_name(), lease.sandbox_name()
    assert first != second and lease_in_name(first) == lease_in_name(second) == lease.lease()
