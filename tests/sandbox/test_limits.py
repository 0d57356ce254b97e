"""A spec turned into numbers for the kernel."""

import os

from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.records import SandboxSpec
from agentrl.sandbox import limits
from agentrl.sandbox.limits import MEBIBYTE

specs = st.builds(
    SandboxSpec,
    image=st.just("image"),
    memory_mb=st.integers(16, 65536),
    processes=st.integers(1, 4096),
    cpus=st.floats(0.1, 64),
    disk_mb=st.integers(1, 65536),
    open_files=st.integers(1, 65536),
)


@given(specs)
def test_full_disks_leave_memory_to_go_on(spec):
    files = 2 * limits.disk_bytes(spec) + limits.shared_memory_bytes(spec)
    empty_files = len(limits.WRITABLE_FOLDERS) * limits.max_inodes(spec) * limits.INODE_BYTES
    assert 0 < limits.disk_bytes(spec) <= spec.disk_mb * MEBIBYTE
    assume(spec.memory_mb >= 80)  # of smaller ones the disk may take more
    assert files + empty_files + limits.RESERVED_BYTES <= spec.memory_mb * MEBIBYTE


@given(specs)
def test_cores_are_real_and_as_many_as_the_time_fills(spec):
    cores = limits.cores(spec)
    usable = os.sched_getaffinity(0)
    assert set(cores) <= usable and len(set(cores)) == len(cores)
    assert len(cores) == min(len(usable), -(-spec.cpus // 1))


def test_cores_take_turns():
    spec = SandboxSpec(image="image", cpus=1.0)
    usable = os.sched_getaffinity(0)
    assert {core for _ in range(2 * len(usable)) for core in limits.cores(spec)} == usable


@given(st.text(max_size=40), st.text(max_size=40))
def test_users_belong_to_one_sandbox(name, other):
    spec = SandboxSpec(image="image")
    first, second = [limits.server_options(text, spec) for text in (name, other)]
    assert 0x70000000 <= first["agent"] < 0x78000000 <= first["server"] < 0x80000000
    assert (name == other) == (first["agent"] == second["agent"]) == (first["server"] == second["server"])


def test_programs_are_told_who_they_are(tmp_path):
    options = limits.server_options("sandbox", SandboxSpec(image="image", cpus=1.0))
    shown = limits.write_system_files(tmp_path, options)
    assert f"agent:x:{options['agent']}:" in shown["/etc/passwd"].read_text()
    assert shown[limits.CORES_FILE].read_text() == f"{options['cores'][0]}\n"
