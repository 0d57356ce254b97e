"""Versions through an object store: hosts get exactly the files of the driver, even if the store loses or damages files or does not answer.

With `AGENTRL_S3_PYTHON`, the Python of an environment with moto and s3fs, the same checks run with a server of the S3 protocol.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.files import folder_manifest
from agentrl.cluster import object_store
from agentrl.cluster.chunks import ChunkIndex, drop_folders
from agentrl.cluster.mirror_host import relaying
from agentrl.cluster.object_store import ObjectStore
from agentrl.cluster.ray_host import ID_FILE, run_id
from agentrl.config.cluster import store_problem
from agentrl.errors import InfrastructureError, UserError
from tests.cluster.serving import Driver, driving

NAME, SIZE = "versions/000001", 2_500_000


def write_version(run: Path, number: int) -> Path:
    folder = run / "versions" / f"{number:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(number).randbytes(SIZE))
    (folder / "config.json").write_text("{}")
    return folder


@contextmanager
def stored(tmp_path: Path, store: ObjectStore) -> Iterator[tuple[Driver, list[str], list[str]]]:
    """A driver with a store, the chunks that it sends itself, and its alerts."""
    alerts: list[str] = []
    with driving(tmp_path / "run", store=store, alert=alerts.append) as driver:
        sent: list[str] = []
        read = driver.files.index.read
        driver.files.index.read = lambda sha256: (sent.append(sha256), read(sha256))[1]  # type: ignore[method-assign]
        yield driver, sent, alerts


async def fetch(driver: Driver, folder: Path, name: str = NAME) -> None:
    mirror = driver.mirror(folder)
    async with relaying(mirror, host="127.0.0.1"):
        await asyncio.to_thread(mirror.fetch, name)
    assert folder_manifest(folder / name) == folder_manifest(driver.folder / name)


def objects(store: ObjectStore) -> dict[str, bytes]:
    """The store's content by path below the run."""
    files = store._files
    return {path.partition(store._root)[2]: files.cat_file(path) for path in files.find(store._root)}


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_hosts_read_versions_from_the_store_and_old_ones_disappear(tmp_path: Path, kind: str) -> None:
    store = ObjectStore(f"file://{tmp_path}/store/run" if kind == "file" else f"memory://bucket{tmp_path}/run")
    store.check()
    assert objects(store) == {}
    with stored(tmp_path, store) as (driver, sent, alerts):
        write_version(driver.folder, 1)
        await asyncio.gather(*(fetch(driver, tmp_path / f"host{number}") for number in range(3)))
        assert not sent and set(objects(store)) == {f"/{NAME}/{file}" for file in ("model.safetensors", "config.json", ".complete")}
        write_version(driver.folder, 2)
        drop_folders(driver.folder, "versions", ["000001"])
        await fetch(driver, tmp_path / "host0", "versions/000002")
        assert not sent and {path.split("/")[2] for path in objects(store)} == {"000002"} and not alerts
        drop_folders(driver.folder, "versions", ["000002"])
        write_version(driver.folder, 3).rename(driver.folder / "versions" / "000002")  # a resumed learner repeats the number
        await fetch(driver, tmp_path / "host0", "versions/000002")
        assert not sent
    store.remove()
    store.remove()
    assert objects(store) == {}


def damage(store: ObjectStore, path: str, change: Callable[[bytes], bytes | None]) -> None:
    full = f"{store._root}/{NAME}/{path}"
    content = change(store._files.cat_file(full))
    store._files.rm_file(full)
    if content is not None:
        store._files.pipe_file(full, content)


@pytest.mark.parametrize(
    "change", [lambda data: None, lambda data: data[: SIZE // 2], lambda data: bytes(len(data)), lambda data: data + b"more"]
)
async def test_objects_that_the_store_lost_or_damaged_come_from_the_driver(tmp_path: Path, change: Callable[[bytes], bytes | None]) -> None:
    store = ObjectStore(f"memory://bucket{tmp_path}/run")
    with stored(tmp_path, store) as (driver, sent, _):
        write_version(driver.folder, 1)
        await fetch(driver, tmp_path / "host0")
        damage(store, "model.safetensors", change)
        await fetch(driver, tmp_path / "host1")
        assert bool(sent) == (b"more" not in (change(b"x" * SIZE) or b""))


async def test_an_interrupted_upload_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = ObjectStore(f"memory://bucket{tmp_path}/run"), write_version(tmp_path, 1)
    listing, put = ChunkIndex().list_folder(folder), store._files.put_file

    def broken(source: str, target: str) -> None:
        put(source, target)
        raise OSError(errno.EIO, "the connection was lost")

    monkeypatch.setattr(store._files, "put_file", broken)
    with pytest.raises(InfrastructureError, match=r"object store memory://bucket.*: .*the connection was lost"):
        store.upload(NAME, folder, listing)
    monkeypatch.setattr(store._files, "put_file", put)
    damage(store, "config.json", lambda _: b"half")
    store.upload(NAME, folder, listing)
    complete = objects(store)
    assert complete[f"/{NAME}/config.json"] == b"{}" and len(complete) == 3
    monkeypatch.setattr(store._files, "put_file", broken)
    store.upload(NAME, folder, listing)  # nothing is missing


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError("forbidden"), KeyError("bucket")])
async def test_a_full_or_broken_store_is_an_alert_and_hosts_fetch_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = ObjectStore(f"memory://bucket{tmp_path}/run")

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(store._files, "put_file", broken)
    with stored(tmp_path, store) as (driver, sent, alerts):
        write_version(driver.folder, 1)
        await asyncio.gather(fetch(driver, tmp_path / "host0"), fetch(driver, tmp_path / "host1"))
        [alert] = alerts
        assert sent and alert.startswith(f"{NAME} is not in the object store: object store memory://") and "from the driver" in alert


async def test_a_store_that_does_not_answer_costs_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    with stored(tmp_path, ObjectStore(f"memory://bucket{tmp_path}/run")) as (driver, sent, _):
        write_version(driver.folder, 1)
        await fetch(driver, tmp_path / "host0")
        monkeypatch.setattr(object_store, "READ_S", 0.2)
        monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", lambda *_, **__: released.wait(60))
        async with asyncio.timeout(10):
            await fetch(driver, tmp_path / "host1")
        assert sent
    released.set()


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_library_that_cannot_log_in_on_a_host_does_not_fail_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Some libraries log in when a store is opened, and raise their own errors."""
    store, released = ObjectStore(f"memory://bucket{tmp_path}/run"), threading.Event()

    def log_in(*_: Any, **__: Any) -> None:
        if hangs:
            released.wait(60)
        raise RuntimeError("no credentials")

    with stored(tmp_path, store) as (driver, sent, _):
        write_version(driver.folder, 1)
        monkeypatch.setattr("fsspec.core.url_to_fs", log_in)
        monkeypatch.setattr(object_store, "CHECK_S", 0.2)
        async with asyncio.timeout(10):
            await fetch(driver, tmp_path / "host0")
        assert sent
        with pytest.raises(UserError, match=r"cannot be used: .*(no credentials|no answer within)"):
            ObjectStore("memory://bucket/other")
    released.set()


def test_only_versions_are_deleted(tmp_path: Path) -> None:
    """Others may write to the folder of a store, and link it elsewhere."""
    store, home = ObjectStore(f"file://{tmp_path}/store/run"), tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    (home / "000001").mkdir()
    (home / "notes").write_text("text")
    (tmp_path / "store" / "run").mkdir(parents=True)
    (tmp_path / "store" / "run" / "versions").symlink_to(home)
    store.drop_others(["000002"])
    assert sorted(path.name for path in home.iterdir()) == ["documents", "notes"]


@pytest.mark.parametrize("text", ["", ".", "..", "../../home", "a/b", "f" * 33, "\xe9" * 32])
def test_an_invalid_id_of_a_run_is_an_error(tmp_path: Path, text: str) -> None:
    """`remove` deletes the folder of this name in the store: with an empty id, those of all runs."""
    (tmp_path / ID_FILE).write_text(text)
    with pytest.raises(UserError, match="does not contain a valid run id"):
        run_id(tmp_path)
    (tmp_path / ID_FILE).unlink()
    assert run_id(tmp_path) == run_id(tmp_path)


def test_a_store_that_cannot_be_used_is_an_error_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"serving.weight_transfer.options.store: nosuch://x/y cannot be used: .*\n  fix: install"):
        ObjectStore("nosuch://x/y")
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"object store file:.*\n  fix: set the store's credentials in the environment"):
        ObjectStore(f"file://{tmp_path}/taken/run").check()
    store = ObjectStore(f"memory://bucket{tmp_path}/run")
    monkeypatch.setattr(store._files, "cat_file", lambda path: b"something else")
    with pytest.raises(UserError, match="does not return what was written"):
        store.check()
    monkeypatch.setattr(object_store, "CHECK_S", 0.1)
    monkeypatch.setattr(store._files, "cat_file", lambda path: threading.Event().wait(5))
    with pytest.raises(UserError, match=r"no answer within 0\.1 s"):
        store.check()


@pytest.mark.parametrize(
    "url", [3, "", "bucket/folder", "s3://", "s3:///", "s3://key:secret@bucket/folder", "s3://bucket/folder?key=secret"]
)
def test_a_url_without_a_folder_or_with_credentials_is_a_problem(url: object) -> None:
    assert store_problem(url)
    assert not store_problem("s3://bucket/folder") and not store_problem("file:///mnt/weights")


if "AGENTRL_S3_PYTHON" in os.environ:

    @pytest.mark.slow
    def test_a_server_of_the_s3_protocol_passes_the_checks(tmp_path: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        command = [os.environ["AGENTRL_S3_PYTHON"], "-m", "tests.cluster.s3_store", str(tmp_path)]
        completed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
        assert completed.returncode == 0, completed.stderr
