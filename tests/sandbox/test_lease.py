"""Leases tell living drivers from dead ones; the reaper goes by them."""

import os
import subprocess
import sys

from agentrl.sandbox import lease
from agentrl.sandbox.reaper import lease_in_name


def test_this_process_is_alive_and_a_dead_one_is_not():
    assert lease.alive(lease.lease())
    code = "from agentrl.sandbox.lease import lease; print(lease())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other != lease.lease() and not lease.alive(other)


def test_a_reused_pid_is_not_the_same_driver():
    boot, pid, start = lease.lease().split("-")
    assert int(pid) == os.getpid()
    assert not lease.alive(f"{boot}-{pid}-{int(start) - 1}")
    assert not lease.alive(f"00000000-{pid}-{start}")


def test_what_is_no_lease_is_left_alone():
    assert lease.alive("") and lease.alive("somebody-else")


def test_a_name_tells_its_lease():
    first, second = lease.sandbox_name(), lease.sandbox_name()
    assert first != second and lease_in_name(first) == lease_in_name(second) == lease.lease()
