"""Unused images are removed; images that are in use, being built or from other caches are kept."""

import fcntl
import os
import subprocess
import sys
import time

import docker as library
import pytest

from agentrl.base.processes import boot_id
from agentrl.cli.sandboxes import sandbox_prune
from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import cleanup, docker_client, evict, images, lease, limits, select_backend
from agentrl.sandbox.cleanup import lease_in_name
from tests.commands import agentrl
from tests.descriptors import descriptors_left

OLD, NEW, USED = "0" * 15 + "1", "0" * 15 + "2", "0" * 15 + "3"
SERVER, OLD_SERVER = "exec_server-1111111111111111.pyc", "exec_server-2222222222222222.pyc"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An image unused for 40 days, a new one, and an old one that is in use with a new exec server."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    for key in (OLD, NEW, USED):
        folder = tmp_path / "images" / key
        (folder / "rootfs" / "usr").mkdir(parents=True)
        (folder / "rootfs" / "usr" / "file").write_bytes(b"x" * 100_000)
        for name in ("base.tar", SERVER, "files.lock"):
            (folder / name).write_bytes(b"x" * 10_000)
    (tmp_path / "images" / USED / OLD_SERVER).write_bytes(b"x")
    (tmp_path / "images" / "notes").mkdir()
    for key in (OLD, USED):
        for path in (tmp_path / "images" / key).iterdir():
            age(path, 40)
    images.record_use(tmp_path / "images" / USED / SERVER)
    return tmp_path / "images"


def age(path, days):
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_unused_images_are_removed(cache):
    before = {folder.name: names(folder) for folder in cache.iterdir()}
    listed = evict(days=30, dry=True)
    assert {folder.name: names(folder) for folder in cache.iterdir()} == before
    expected = [f"{OLD}/base.tar", f"{OLD}/{SERVER}", f"{OLD}/rootfs", f"{USED}/{OLD_SERVER}"]
    assert [item.name for item in listed] == expected and all(39.9 < item.days < 40.1 for item in listed)
    assert 100_000 < next(item.size for item in listed if item.name == f"{OLD}/rootfs") < 200_000
    assert [item.name for item in evict(days=30, dry=False)] == expected
    assert names(cache / OLD) == [] and (cache / OLD / "files.lock").exists()  # a process may be waiting for the lock
    assert names(cache / NEW) == before[NEW] and names(cache / USED) == ["base.tar", SERVER, "rootfs"]
    assert evict(days=30, dry=False) == []


def test_leftovers_of_a_killed_build_are_removed_unless_a_build_runs(cache):
    (cache / NEW / "rootfs.123" / "usr").mkdir(parents=True)
    (cache / NEW / "base.123.tar").write_bytes(b"half")
    with open(cache / NEW / "files.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [item for item in evict(days=30, dry=False) if item.name.startswith(NEW)] == []
    assert [item.name for item in evict(days=30, dry=False)] == [f"{NEW}/base.123.tar", f"{NEW}/rootfs.123"]
    assert names(cache / NEW) == ["base.tar", SERVER, "rootfs"]


@pytest.mark.docker
async def test_images_of_the_daemon_are_removed_with_their_folder(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST")
    api = library.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION)
    (tmp_path / "empty.tar").write_bytes(b"\0" * 10240)
    tags = {key: f"agentrl/eviction-test:{key}" for key in (OLD, NEW, "f" * 16)}
    try:
        for tag in tags.values():
            api.import_image_from_file(str(tmp_path / "empty.tar"), repository=tag.partition(":")[0], tag=tag.partition(":")[2])
        api.tag(tags[OLD], "agentrl/eviction-test", f"{OLD}-built")
        removed = [item.name for item in evict(days=30, dry=False) if "eviction-test" in item.name]
        assert removed == [tags[OLD], f"{tags[OLD]}-built"]
        assert sorted(tag for image in api.images("agentrl/eviction-test") for tag in image["RepoTags"]) == sorted(
            [tags[NEW], tags["f" * 16]]
        )
    finally:
        for image in api.images("agentrl/eviction-test"):
            for tag in image["RepoTags"]:
                api.remove_image(tag)
        api.close()


@pytest.mark.docker
def test_dry_run_lists_what_a_real_run_removes(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST")
    repository = "agentrl/eviction-test-in-use"
    (tmp_path / "empty.tar").write_bytes(b"\0" * 10240)
    with docker_client.connection() as api:
        api.import_image_from_file(str(tmp_path / "empty.tar"), repository=repository, tag=OLD)
        api.tag(f"{repository}:{OLD}", repository, f"{OLD}-built")
        container = api.create_container(f"{repository}:{OLD}", ["none"])["Id"]
        try:
            listed, removed = ({item.name for item in evict(days=30, dry=dry) if repository in item.name} for dry in (True, False))
            (kept,) = (tag for image in api.images(repository) for tag in image["RepoTags"])
            assert listed == removed == {f"{repository}:{OLD}", f"{repository}:{OLD}-built"} - {kept}
        finally:
            api.remove_container(container)
            for image in api.images(repository):
                api.remove_image(image["Id"], force=True)


@pytest.mark.bubblewrap
async def test_opening_a_sandbox_updates_the_last_use_of_its_image(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    await backend.prepare(SandboxSpec(image="image"))
    server = backend._images["image"].server
    age(server, 2)
    await (await backend.open(SandboxSpec(image="image"))).close()
    await backend.close()
    assert server.stat().st_mtime > time.time() - 3600


def test_the_command(cache):
    def command(*options):
        return agentrl("sandbox", "prune", *options)

    listing = command("--images", "--dry-run")
    assert f"would remove {OLD}/rootfs" in listing.stdout and listing.returncode == 0 and (cache / OLD / "rootfs").exists()
    assert "0 images" in command("--images", "--unused-days", "50", "--dry-run").stdout
    refused = command("--unused-days", "50")
    assert refused.returncode == 2 and "--unused-days needs --images" in refused.stderr


@pytest.mark.slow
# Leases distinguish living drivers from dead ones.
def test_lease_of_a_dead_process_is_not_alive():
    assert lease.alive(lease.lease())
    code = "from agentrl.sandbox.lease import lease; print(lease())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other != lease.lease() and not lease.alive(other)


def test_exhausted_descriptors_are_a_sandbox_error():
    boot_id.cache_clear()
    with descriptors_left(0), pytest.raises(SandboxError, match="cannot read /proc/sys/kernel/random/boot_id: Too many open files"):
        lease.alive("000000000-1-1")


def test_file_in_place_of_the_runtime_folder_is_a_sandbox_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "agentrl").write_text("a file")
    with pytest.raises(SandboxError, match="agentrl must be a folder with mode 0700"):
        lease.runtime_folder()


def test_reused_pid_has_another_lease():
    boot, pid, start = lease.lease().split("-")
    assert int(pid) == os.getpid()
    assert not lease.alive(f"{boot}-{pid}-{int(start) - 1}")
    assert not lease.alive(f"000000000-{pid}-{start}")


def test_other_text_counts_as_alive():
    assert lease.alive("") and lease.alive("somebody-else")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a pid namespace")
def test_driver_in_another_pid_namespace_is_neither_alive_nor_dead(cache, tmp_path, monkeypatch, capsys):
    """Two containers that share a Docker daemon have the same boot id, so the boot id and pid cannot identify a driver."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    code = "from agentrl.sandbox.lease import alive, lease; print(lease(), alive({!r}))"
    output = subprocess.run([*command, code.format(lease.lease())], capture_output=True, text=True, check=True).stdout
    other, judged = output.split()
    monkeypatch.setattr(lease, "_may_have_processes", lambda namespace: True)
    assert judged == "None" and lease.alive(other) is None and lease.alive(lease.lease()) is True
    monkeypatch.setattr(cleanup, "runtime_folder", lambda: tmp_path / "runtime")
    monkeypatch.setattr(limits, "find_control_groups", lambda: None)
    folder = tmp_path / "runtime" / other / f"agentrl-{other}-0"
    folder.mkdir(parents=True)
    lease.write_run_label(folder, "bubblewrap", "theirs")
    assert [sandbox.driver_alive for sandbox in cleanup.list_open()] == [None]
    assert cleanup.prune() == 0 and folder.exists()
    for dry_run in (True, False):
        sandbox_prune(images=False, unused_days=None, dry_run=dry_run)
        shown = capsys.readouterr().out
        assert f"sandboxes kept, because their drivers may still be running in other containers or on the host: {folder.name}" in shown
        assert "would remove" not in shown and folder.exists()


def patch_namespaces(monkeypatch, unreadable=()):
    """Makes the namespace of process 1 readable, which some virtual machines prevent, and those of `unreadable` processes unreadable."""
    real = lease._namespace_of

    def namespace_of(pid):
        if pid in unreadable:
            raise PermissionError(pid)
        return "ffffc" if pid == "1" else real(pid)

    monkeypatch.setattr(lease, "_namespace_of", namespace_of)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a pid namespace and sees all processes")
def test_driver_in_a_pid_namespace_is_dead_when_the_namespace_has_no_processes(monkeypatch):
    monkeypatch.setattr(lease, "_INITIAL_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)  # the test may run in a container
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c"]
    code = "from agentrl.sandbox.lease import lease; print(lease(), flush=True); input()"
    with subprocess.Popen([*command, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        other = driver.stdout.readline().strip()
        patch_namespaces(monkeypatch)
        assert lease.alive(other) is None, "a process of its namespace is running"
        driver.communicate("\n")
    assert lease.alive(other) is False
    patch_namespaces(monkeypatch, unreadable={str(os.getpid())})
    assert lease.alive(other) is None, "a process cannot be checked"
    monkeypatch.setattr(lease, "_INITIAL_NAMESPACE", 1)
    assert lease.alive(other) is None, "this process does not see all others"


@pytest.mark.parametrize("listed", [[], ["2"]])
def test_hidden_processes_may_be_drivers(listed, monkeypatch):
    """With `hidepid=invisible`, processes of other users are not listed in /proc."""
    monkeypatch.setattr(lease, "_INITIAL_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    monkeypatch.setattr(lease, "_namespace_of", lambda pid: "ffffc")
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    assert lease._may_have_processes("00000")
    monkeypatch.setattr(os, "listdir", lambda path: ["1", *listed])
    assert not lease._may_have_processes("00000")


def test_name_contains_its_lease():
    first, second = lease.sandbox_name(), lease.sandbox_name()
    assert first != second and lease_in_name(first) == lease_in_name(second) == lease.lease()
