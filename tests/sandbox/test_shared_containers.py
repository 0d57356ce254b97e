"""Containers that several sandboxes share: isolation between neighbours, allocation, and failures."""

import asyncio
import logging
import os
import re
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import DockerBackend, docker_client, limits, list_open, shared_containers
from agentrl.sandbox.attacks import run_attacks, suite
from agentrl.sandbox.conformance import CHECKS, check_conformance
from agentrl.sandbox.inside.isolation import PERIOD_US, Groups
from agentrl.sandbox.lease import lease
from tests.sandbox.building import ALONE, SPEC, inner_pid, processes_of
from tests.waiting import until

pytestmark = pytest.mark.docker

TRY_LOCKS = """
import errno, fcntl, os
for path in ("/usr/bin/env", "/dev/null", "/dev/zero", "/etc/passwd", "/etc/hosts"):
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        print(path, errno.errorcode[error.errno])
"""


@asynccontextmanager
async def opened(root, kind=DockerBackend):
    backend = kind(run_label="test", root=root)
    try:
        await backend.prepare(SPEC)
        yield backend
    finally:
        await backend.close()
        assert [sandbox for sandbox in list_open() if lease() in sandbox.name] == []


@pytest.fixture
async def backend(root):
    async with opened(root) as backend:
        yield backend


def containers():
    """Names of this process's containers, shared or not."""
    return set(docker_client.containers(f"{docker_client.LABEL_LEASE}={lease()}"))


def first_process(sandbox):
    """Pid on this machine of the sandbox's exec server."""
    (pid,) = (pid for pid in processes_of("exec_server") if sandbox.id in mounts_of(pid).split() and inner_pid(pid) == 1)
    return pid


def mounts_of(pid):
    try:
        return Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return ""


# Neighbours ----------------------------------------------------------------------------------------------------------


async def test_neighbours_share_no_namespace_user_group_or_lock(backend):
    """They share no inodes either, because a file lock would be visible to both."""
    first, second = await backend.open(SPEC), await backend.open(SPEC)
    assert len(containers()) == 1
    await first.python("import fcntl, os\n" + TRY_LOCKS, timeout_s=60, session="holder")
    assert (await first.python(TRY_LOCKS, timeout_s=60)).stdout.count("EAGAIN") == 5  # a lock is visible in its own sandbox
    assert (await second.python(TRY_LOCKS, timeout_s=60)).stdout == ""
    pids = [first_process(sandbox) for sandbox in (first, second)]
    for name in ("pid", "mnt", "net", "ipc", "uts", "cgroup"):
        assert len({os.readlink(f"/proc/{pid}/ns/{name}") for pid in [*pids, os.getpid()]}) == 3, name
    users = [re.search(r"^Uid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1] for pid in pids]
    groups = [set(Path(f"/proc/{pid}/cgroup").read_text().splitlines()) for pid in pids]
    assert len(set(users)) == 2 and min(map(int, users)) >= limits.SERVER_USERS
    limited = [line for line in groups[0] ^ groups[1] if line.split(":")[1] in ("memory", "pids", "cpu", "cpu,cpuacct", "")]
    assert all(any(sandbox.id in line for sandbox in (first, second)) for line in limited) and len(limited) in (2, 6)


async def test_exec_server_keeps_no_rights_or_descriptors_of_its_container(backend):
    sandbox = await backend.open(replace(SPEC, network=("127.0.0.1:9",)))
    pid = first_process(sandbox)
    (keeper,) = (
        other
        for other in processes_of("keep:/agentrl/link")
        if lease() in mounts_of(other) and "/agentrl/link" not in mounts_of(pid) and sandbox.id not in mounts_of(other)
    )
    status = Path(f"/proc/{pid}/status").read_text()
    capabilities = sum(1 << number for number in limits.server_capabilities().values())
    for name in ("CapPrm", "CapEff"):
        assert int(re.search(rf"{name}:\t(\w+)", status)[1], 16) == capabilities
    for name in ("CapInh", "CapBnd", "CapAmb"):
        assert int(re.search(rf"{name}:\t(\w+)", status)[1], 16) == 0
    assert re.search(r"NoNewPrivs:\t1", status) and re.search(r"Seccomp:\t2", status)
    server_links, keeper_links = ({os.readlink(path) for path in Path(f"/proc/{owner}/fd").iterdir()} for owner in (pid, keeper))
    assert server_links & keeper_links <= {"/dev/null", "anon_inode:[eventpoll]"}
    mount_points = [line.split()[4] for line in mounts_of(pid).splitlines()]
    assert "/sys/fs/cgroup" not in mount_points and not any(path.startswith("/tmp/") for path in mount_points)
    assert not any("/run/agentrl" in line for line in mounts_of(pid).splitlines())


async def test_each_sandbox_has_its_own_limits(backend):
    first, second = await backend.open(SPEC), await backend.open(replace(SPEC))
    fill_memory = "kept = b'x' * (90 << 20)\nprint(len(kept))"
    results = await asyncio.gather(*(sandbox.python(fill_memory, timeout_s=60, session="s") for sandbox in (first, second)))
    assert [result.stdout for result in results] == [f"{90 << 20}\n"] * 2  # together more than one sandbox may have
    second_block = await first.python("b'x' * (90 << 20)", timeout_s=60)
    after = await first.python("print(len(kept))", timeout_s=60, session="s")
    assert second_block.reason == "memory" or after.restarted  # the kernel has ended one of the two
    assert (await second.python("print(len(kept))", timeout_s=60, session="s")).stdout == f"{90 << 20}\n"


# Allocation ----------------------------------------------------------------------------------------------------------


async def test_sandboxes_of_one_spec_share_and_others_do_not(backend):
    for number, spec in enumerate([SPEC, replace(SPEC, memory_mb=256), replace(SPEC, network=("127.0.0.1:9",)), ALONE, ALONE], start=1):
        for _ in range(1 if spec is ALONE else 2):
            assert (await (await backend.open(spec)).python("print(1)", timeout_s=60)).stdout == "1\n"
        assert len(containers()) == number


async def test_image_that_is_not_built_from_packages_is_not_shared(backend):
    backend._images[SPEC.image] = replace(backend._images[SPEC.image], from_packages=False)
    sandboxes = [await backend.open(SPEC) for _ in range(2)]
    assert containers() == {sandbox.id for sandbox in sandboxes}


async def test_full_or_used_up_container_is_replaced(backend, monkeypatch):
    monkeypatch.setattr(shared_containers, "SLOTS", 2)
    monkeypatch.setattr(shared_containers, "LIFETIME", 3)
    sandbox_1, sandbox_2, sandbox_3 = [await backend.open(SPEC) for _ in range(3)]
    first_container, *_ = sorted(containers(), key=lambda name: int(name.rpartition("-")[2]))
    assert len(containers()) == 2
    await sandbox_1.close()
    sandbox_4 = await backend.open(SPEC)  # the third and last of the first container
    for sandbox in (sandbox_2, sandbox_4):
        assert first_container in containers()
        await sandbox.close()
    await until(lambda: first_container not in containers())
    assert (await sandbox_3.python("print(1)", timeout_s=60)).stdout == "1\n"


async def test_number_of_idle_containers_is_limited(backend, monkeypatch):
    monkeypatch.setattr(shared_containers, "MAX_IDLE", 1)
    sandboxes = [await backend.open(replace(SPEC, memory_mb=128 + number)) for number in range(3)]
    names = [name for name in containers()]
    assert len(names) == 3
    for sandbox in sandboxes:
        await sandbox.close()
    await until(lambda: len(containers()) == 1)
    await (await backend.open(replace(SPEC, memory_mb=130))).close()  # the most recently used one is kept
    assert len(containers()) == 1 and containers() <= set(names)


# Failures ------------------------------------------------------------------------------------------------------------


async def test_container_that_dies_ends_only_its_own_sandboxes(backend, monkeypatch):
    monkeypatch.setattr(shared_containers, "SLOTS", 2)
    sandboxes = [await backend.open(SPEC) for _ in range(2)]
    (first,) = containers()
    sandboxes += [await backend.open(SPEC) for _ in range(2)]
    docker_client.remove(first)
    for number, sandbox in enumerate(sandboxes):
        if number < 2:
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"], timeout_s=60)
        else:
            assert (await sandbox.exec(["true"], timeout_s=60)).ok
        await sandbox.close()
    assert (await (await backend.open(SPEC)).exec(["true"], timeout_s=60)).ok


async def test_sandbox_that_does_not_end_is_killed(backend):
    sandbox, neighbour = await backend.open(SPEC), await backend.open(SPEC)
    pid = first_process(sandbox)
    os.kill(pid, signal.SIGSTOP)
    await sandbox.close()
    assert not Path(f"/proc/{pid}").exists() and not list(Path("/sys/fs/cgroup").glob(f"*/*/*/{sandbox.id}"))
    assert (await neighbour.exec(["true"], timeout_s=60)).ok and len(containers()) == 1


class WithoutSysAdmin(DockerBackend):
    def _shared_container(self, *arguments):
        container = super()._shared_container(*arguments)
        rights = [right for right in container["HostConfig"]["CapAdd"] if right != "SYS_ADMIN"]
        return {**container, "HostConfig": {**container["HostConfig"], "CapAdd": rights}}


class WithoutDevices(DockerBackend):
    def _shared_container(self, *arguments):
        container = super()._shared_container(*arguments)
        rights = [right for right in container["HostConfig"]["CapAdd"] if right != "MKNOD"]
        return {**container, "HostConfig": {**container["HostConfig"], "CapAdd": rights}}


class Silent(DockerBackend):
    def _shared_container(self, *arguments):
        return {**super()._shared_container(*arguments), "Entrypoint": ["python3", "-c", "pass"]}


class FirstFails(DockerBackend):
    """The first failure ends the shared container before the other openings learn why they failed."""

    calls = 0

    async def _start_compiler(self, spec, image):
        return await self._start_alone(spec, image)

    async def _start_shared(self, *_):
        self.calls += 1
        if self.calls == 1:
            await until(lambda: self.calls == 3)
            raise shared_containers.CannotShare("not here")
        await until(lambda: self._sharing_problem)
        raise SandboxError("the exec server ended")


@pytest.mark.parametrize("kind", [WithoutSysAdmin, WithoutDevices, Silent, FirstFails])
async def test_if_containers_cannot_be_shared_each_sandbox_gets_its_own(kind, root, caplog):
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        async with opened(root, kind) as backend:
            sandboxes = await asyncio.gather(*(backend.open(SPEC) for _ in range(3)))
            await until(lambda: containers() == {sandbox.id for sandbox in sandboxes})
            assert (await sandboxes[0].python("print(1)", timeout_s=60)).stdout == "1\n"
    assert any("cannot share a container" in message for message in caplog.messages)


# One container for each ----------------------------------------------------------------------------------------------


async def test_conformance_with_one_container_per_sandbox(backend):
    assert [(result.name, result.detail) for result in await check_conformance(backend, ALONE)] == [(name, "") for name in CHECKS]


@pytest.mark.usefixtures("only_attacks")
@pytest.mark.slow
async def test_attacks_are_contained_with_one_container_per_sandbox(root, monkeypatch):
    """Excludes hostile servers: the driver reads from the same kind of socket as with shared containers (test_attacks)."""
    attacks = [attack for attack in suite.load_attacks() if not attack.trick]
    monkeypatch.setattr(suite, "load_attacks", lambda: attacks)
    async with opened(root) as backend:
        spec = SandboxSpec(image="image", memory_mb=192, processes=48, disk_mb=16, open_files=128, runtime="crun")
        results = await run_attacks(backend, spec)
    assert [(result.name, result.evidence) for result in results if result.verdict not in ("contained", "not promised")] == []


# Version 2 of control groups, whatever this machine has ---------------------------------------------------------------


def test_groups_of_version_2(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    groups = Groups(str(tmp_path))
    folder = tmp_path / "one"
    bounds = {"memory": 1 << 20, "processes": 5, "cpu_us": PERIOD_US // 2, "sockets": 1}
    assert ("memory", "memory.swap.max", 0, False) in groups._settings(bounds)  # if the kernel supports it
    groups.create("one", bounds)
    groups.add("one")
    settings = {path.name: path.read_text() for path in folder.iterdir()}
    assert settings == {"memory.max": "1048576", "pids.max": "5", "cpu.max": "50000 100000", "cgroup.procs": "0"}
    assert groups.memory_events("one") == str(folder / "memory.events")
    assert not groups.remove("one")
    for path in folder.iterdir():
        path.unlink()
    assert groups.remove("one") and not folder.exists() and groups.remove("one")
