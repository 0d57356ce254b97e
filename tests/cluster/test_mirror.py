"""Folders between a driver and hosts: interruptions at any chunk, damage, several mirrors, and hostile requests."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.base.files import folder_manifest
from agentrl.base.media import PNG
from agentrl.cluster import chunks, file_service, mirror
from agentrl.cluster.chunks import ArrivingFolder, ChunkIndex, FileChunks, FolderListing
from agentrl.cluster.link import Link, LinkLost, NotFound, SessionEnded
from agentrl.cluster.mirror import Mirror, mirrored_media
from agentrl.cluster.mirror_host import relaying
from agentrl.cluster.run_service import HOST, LEARNER, WORKER
from agentrl.errors import DiskFull, InfrastructureError, UserError
from agentrl.records import codec
from tests.cluster.serving import Driver, driving

SMALL = 64


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, file_service, mirror):
        monkeypatch.setattr(module, "CHUNK", SMALL)


@pytest.fixture
def driver(tmp_path: Path, small_chunks: None) -> Iterator[Driver]:
    with driving(tmp_path / "run") as driver_service:
        yield driver_service


def write_folder(folder: Path, rng: random.Random) -> None:
    """Files of odd sizes, in folders, some with equal chunks."""
    for number in range(rng.randint(1, 4)):
        path = folder / rng.choice(["", "state", "state/deep"]) / f"file{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = rng.choice([0, 1, SMALL, SMALL * rng.randint(1, 9) + rng.randint(0, SMALL)])
        path.write_bytes(bytes(size) if rng.random() < 0.2 else rng.randbytes(size))


def damage(part: Path, rng: random.Random) -> None:
    """Damages a partly received folder like a power cut, a bad disk or an earlier program."""
    files = [path for path in part.rglob("*") if path.is_file()]
    for path in files:
        data = bytearray(path.read_bytes())
        kind = rng.choice(["none", "truncate", "flip", "grow", "remove"])
        if kind == "truncate":
            os.truncate(path, rng.randint(0, len(data)))
        elif kind == "flip" and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif kind == "grow":
            path.write_bytes(bytes(data) + b"more")
        elif kind == "remove":
            path.unlink()
    if part.exists() and rng.random() < 0.3:
        (part / "other").mkdir(exist_ok=True)
        (part / "other" / "left.bin").write_bytes(b"left")


class Killed(BaseException):
    """The end of a process."""


def kill_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the process before the chunk after `count` others is written."""
    write, counts = ArrivingFolder.write, itertools.count()

    def write_or_die(self: ArrivingFolder, sha256: str, data: bytes) -> None:
        if next(counts) >= count:
            raise Killed
        write(self, sha256, data)

    patch.setattr(ArrivingFolder, "write", write_or_die)


@pytest.mark.parametrize("seed", range(12))
def test_a_fetch_that_is_interrupted_anywhere_ends_with_the_same_folder(tmp_path: Path, driver: Driver, seed: int) -> None:
    rng, name = random.Random(seed), "versions/000003"
    source, copy = driver.folder / name, tmp_path / "mirror" / name
    link = driver.link()
    complete: list[dict[str, str]] = [{}]
    for attempt in range(6):
        if attempt in (0, 3):  # the version was retracted and published again
            for path in sorted(source.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            write_folder(source, rng)
            (source / "version.json").write_text("{}")
            complete.append({path: sha for path, sha in folder_manifest(source).items() if path != "version.json"})
        with pytest.MonkeyPatch.context() as patch:
            kill_after(rng.randint(0, 8), patch)
            try:
                Mirror(tmp_path / "mirror", link).fetch(name)
            except Killed:
                assert (folder_manifest(copy) if copy.exists() else {}) in complete, "only complete folders have the final name"
        damage(copy.with_name(".000003.part"), rng)
    Mirror(tmp_path / "mirror", link).fetch(name)
    assert folder_manifest(copy) == complete[-1]
    (copy / "extra.bin").write_bytes(b"of an earlier program")
    Mirror(tmp_path / "mirror", link).fetch(name)
    assert folder_manifest(copy) == complete[-1]


@pytest.mark.parametrize("seed", range(12))
def test_a_push_that_is_interrupted_anywhere_ends_with_the_same_folder(tmp_path: Path, driver: Driver, seed: int) -> None:
    rng, name = random.Random(seed), "checkpoints/000007"
    source, copy = tmp_path / "mirror" / name, driver.folder / name
    complete: list[dict[str, str]] = [{}]
    for attempt in range(6):
        if attempt in (0, 3):
            for path in sorted(source.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            write_folder(source, rng)
            complete.append(folder_manifest(source))
        with pytest.MonkeyPatch.context() as patch:
            request, remaining = Link.request, [rng.randint(0, 8)]

            def request_or_die(self: Link, method: str, *rest: object, counts: list[int] = remaining, real=request, **options: object):  # type: ignore[no-untyped-def]
                answer = real(self, method, *rest, **options)
                counts[0] -= method == "PUT"
                if counts[0] < 0:
                    raise Killed
                return answer

            patch.setattr(Link, "request", request_or_die)
            try:
                driver.mirror(tmp_path / "mirror", LEARNER).push(name)
            except Killed:
                assert (folder_manifest(copy) if copy.exists() else {}) in complete
        damage(copy.with_name(".000007.part"), rng)
    driver.mirror(tmp_path / "mirror", LEARNER).push(name)
    assert folder_manifest(copy) == complete[-1]
    assert [path.name for path in copy.parent.iterdir()] == ["000007"], "no part is left"


def test_only_missing_chunks_are_transferred(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, folder = random.Random(1), driver.folder / "versions" / "000001"
    folder.mkdir(parents=True)
    data = bytearray(rng.randbytes(100 * SMALL))
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text("{}")
    host_mirror = driver.mirror(tmp_path / "mirror")
    host_mirror.fetch("versions/000001")
    requested: list[str] = []
    request = Link.request
    monkeypatch.setattr(
        Link, "request", lambda self, method, path, *rest, **kw: (requested.append(path), request(self, method, path, *rest, **kw))[1]
    )
    host_mirror.fetch("versions/000001")
    assert requested == ["/files/versions/000001"]
    requested.clear()
    (folder / "config.json").write_text("{ }")
    model = (tmp_path / "mirror" / "versions" / "000001" / "model.safetensors").stat().st_ino
    host_mirror.fetch("versions/000001")
    assert len(requested) == 2, "an unchanged file is linked"
    assert (tmp_path / "mirror" / "versions" / "000001" / "model.safetensors").stat().st_ino == model
    assert (tmp_path / "mirror" / "versions" / "000001" / "config.json").read_text() == "{ }"


async def test_a_hostile_peer_cannot_stop_a_mirror_or_fill_its_memory(tmp_path: Path, driver: Driver) -> None:
    folder = driver.folder / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(6).randbytes(9 * SMALL))
    host, requests = driver.link(HOST), list[str]()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900000000\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        flooding = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for url in (flooding, "file:///etc/passwd"):
            await asyncio.to_thread(host.json, "POST", "/peers", {"folder": "versions/000001", "url": url, "key": "a\r\nb"})
        mirror = driver.mirror(tmp_path / "host")
        async with relaying(mirror, host="127.0.0.1"):
            await asyncio.to_thread(mirror.fetch, "versions/000001")
        too_much = Link(flooding, "key")
        with pytest.raises(HTTPException, match="the maximum is 64"):
            await asyncio.to_thread(too_much.request, "GET", "/chunks/x", timeout_s=5, most=SMALL)
    assert folder_manifest(tmp_path / "host" / "versions" / "000001") == folder_manifest(folder)
    status, _ = driver.link(WORKER).request("POST", "/peers", b'{"folder":"versions/000001","url":"http://x","key":""}', timeout_s=10)
    assert status == 403, "workers serve no mirrors"


@pytest.mark.slow
async def test_mirrors_forward_what_they_receive_and_distrust_each_other(tmp_path: Path, driver: Driver) -> None:
    """The driver sends most chunks once. A mirror whose chunks are damaged, or that ends, costs the others only a retry."""
    rng, folder = random.Random(2), driver.folder / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(rng.randbytes(400 * SMALL))
    mirrors = [driver.mirror(tmp_path / f"host{number}") for number in range(4)]
    sent: list[str] = []
    read = driver.files.index.read
    driver.files.index.read = lambda sha256: (sent.append(sha256), read(sha256))[1]  # type: ignore[method-assign]
    async with relaying(mirrors[0], host="127.0.0.1"), relaying(mirrors[1], host="127.0.0.1"), relaying(mirrors[2], host="127.0.0.1"):
        await asyncio.gather(*(asyncio.to_thread(host_mirror.fetch, "versions/000001") for host_mirror in mirrors[:3]))
        assert len(sent) < 1.5 * 400, f"{len(sent)} chunks for three mirrors"
        model = mirrors[2].folder / "versions" / "000001" / "model.safetensors"
        damaged = bytearray(model.read_bytes())
        damaged[:] = bytes(len(damaged))
        model.write_bytes(damaged)
        async with relaying(mirrors[3], host="127.0.0.1"):
            await asyncio.to_thread(mirrors[3].fetch, "versions/000001")
    expected = folder_manifest(folder)
    assert [folder_manifest(mirrors[number].folder / "versions" / "000001") == expected for number in (0, 1, 3)] == [True] * 3


def test_old_folders_disappear_with_those_of_the_driver(tmp_path: Path, driver: Driver) -> None:
    host_mirror = driver.mirror(tmp_path / "mirror")
    for number in (0, 1, 2):
        folder = driver.folder / "versions" / f"{number:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(100 + number))
        (folder / "version.json").write_text("{}")
        host_mirror.fetch(f"versions/{number:06d}")
    (driver.folder / "versions" / "000001" / "model.safetensors").unlink()  # its record is kept
    (tmp_path / "mirror" / "versions" / ".000009.part").mkdir()
    host_mirror.drop_extra("versions")
    assert sorted(path.name for path in (tmp_path / "mirror" / "versions").iterdir()) == ["000000", "000002"]
    with pytest.raises(NotFound):
        host_mirror.fetch("versions/000005")


def test_a_chunk_that_occurs_many_times_needs_room_for_each_of_them(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = hashlib.sha256(bytes(SMALL)).hexdigest()
    listing = codec.to_data(FolderListing(files=(FileChunks(name="a.bin", size=9 * SMALL, chunks=(zeros,) * 9),)))
    learner, free = driver.link(LEARNER), file_service._SPARE_BYTES + 8 * SMALL
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(DiskFull, match="no room for"):
        learner.json("POST", "/arriving/checkpoints/000001", listing)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free + SMALL))
    assert learner.json("POST", "/arriving/checkpoints/000001", listing) == [zeros]


def test_a_folder_that_takes_long_to_hash_does_not_block_other_requests(driver: Driver) -> None:
    """A host repeats its request after 30 s without a byte."""
    folder, counted, hashed = driver.folder / "versions" / "000001", list[Path](), threading.Event()
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"abc")
    real = driver.files.index.list_folder

    def slow(path: Path, *, links: bool) -> FolderListing:
        counted.append(path)
        assert hashed.wait(30)
        return real(path, links=links)

    driver.files.index.list_folder = slow  # type: ignore[method-assign]
    try:
        for _ in range(file_service._READS + 1):
            with pytest.raises(TimeoutError):
                driver.link().request("GET", "/files/versions/000001", timeout_s=0.05)
        assert driver.link().json("GET", "/files/checkpoints") == [] and len(counted) == 1
    finally:
        hashed.set()
    assert len(driver.link().json("GET", "/files/versions/000001")["files"]) == 1


def test_a_full_disk_is_reported_on_either_side(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = driver.folder / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(3).randbytes(50 * SMALL))
    own = tmp_path / "mirror" / "versions" / "000002"
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(bytes(50 * SMALL))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunks, "_write_at", no_space)
    with pytest.raises(DiskFull, match=r"no room to write versions/000001 in .*mirror"):
        driver.mirror(tmp_path / "mirror").fetch("versions/000001")
    with pytest.raises(DiskFull, match="the driver: "):
        driver.mirror(tmp_path / "mirror", LEARNER).push("versions/000002")
    assert not (tmp_path / "mirror" / "versions" / "000001").exists() and not (driver.folder / "versions" / "000002").exists()


def test_a_driver_that_does_not_answer_is_an_error_in_time(tmp_path: Path, driver: Driver) -> None:
    dead = Link("http://127.0.0.1:9", "key")
    with pytest.raises(LinkLost, match=r"the driver at http://127.0.0.1:9 did not answer /files/versions/000001 within 0.3 s"):
        Mirror(tmp_path / "mirror", dead).fetch("versions/000001", timeout_s=0.3)
    with pytest.raises(UserError, match="rejected the key"):
        Mirror(tmp_path / "mirror", Link(driver.url, "wrong")).fetch("versions/000001")
    for url in ("ftp://x", "http://[::1", "http://x:port"):
        with pytest.raises(UserError, match=r"http://HOST:PORT"):
            Link(url, "key")


def test_a_replaced_learner_can_no_longer_change_anything(tmp_path: Path, driver: Driver) -> None:
    own = tmp_path / "mirror" / "checkpoints" / "000001"
    own.mkdir(parents=True)
    (own / "meta.json").write_text("{}")
    first = driver.mirror(tmp_path / "mirror", LEARNER)
    driver.start_learner()
    with pytest.raises(SessionEnded, match="has replaced this process"):
        first.push("checkpoints/000001")
    assert not (driver.folder / "checkpoints" / "000001").exists()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/arriving/checkpoints/000001", b'{"files":[]}'),
        ("POST", "/learner/record_setbacks", b'{"id":"1","setbacks":[]}'),
        ("POST", "/learner/prune_checkpoints", b'{"id":"2","keep":1,"spare":[]}'),
        ("PUT", "/base_probe", b"{}"),
        ("PUT", "/updates/1/0", b"tokens"),
    ],
)
def test_a_request_that_was_still_arriving_when_its_learner_was_replaced_is_rejected(
    driver: Driver, method: str, path: str, body: bytes
) -> None:
    (driver.folder / "versions" / "000000").mkdir(parents=True)
    for name in ("000001", "000002"):
        (driver.folder / "checkpoints" / name).mkdir(parents=True)
        (driver.folder / "checkpoints" / name / "meta.json").write_text(name)
    before = folder_manifest(driver.folder / "checkpoints")
    address = driver.url.removeprefix("http://").split(":")
    head = f"{method} {path} HTTP/1.1\r\nhost: {address[0]}\r\nauthorization: Bearer {driver.start_learner()}\r\n"
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:1])
        time.sleep(0.2)  # the driver has read the head
        driver.start_learner()
        connection.sendall(body[1:])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 409")
    assert folder_manifest(driver.folder / "checkpoints") == before
    assert not (driver.folder / "updates").exists() and not list((driver.folder / "versions" / "000000").iterdir())


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    ".hidden",
    "a/../b",
    "version.json",
    "a\0b",
    "a//b",
    "",
    "x" * 300,
    "\u8bf4" * 86,
    "a/b/c/d/e",
    "a\nb",
    " a",
    "-rf",
    "a\\b",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_invalid_version_file_name_raises(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid file name"):
        FileChunks(name=name, size=0, chunks=())


@pytest.mark.parametrize("name", ["my notes (1).md", "1_Pooling/config.json", "\u8bf4\u660e.md", "_extra", "[a]@b,c~.txt"], ids=ascii)
def test_files_that_occur_in_model_folders_have_valid_names(name: str) -> None:
    FileChunks(name=name, size=0, chunks=())


def test_hostile_requests_read_and_write_nothing(tmp_path: Path, driver: Driver) -> None:
    (driver.folder / "versions" / "000001").mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("of another user")
    (driver.folder / "versions" / "000001" / "link.bin").symlink_to(secret)
    (driver.folder / "versions" / "000002").symlink_to(tmp_path)
    host, worker, learner = driver.link(HOST), driver.link(WORKER), driver.link(LEARNER)
    assert host.json("GET", "/files/versions/000001") == {"files": []}, "links are not listed"
    assert host.json("GET", "/files/versions") == []
    rejected = [
        (host, "GET", "/files/versions/000002", b""),
        (host, "GET", "/files/versions/..", b""),
        (host, "GET", "/files/logs", b""),
        (host, "GET", "/files/versions/%2e%2e", b""),
        (host, "GET", "/single/workers.json", b""),
        (host, "GET", "/single/..%2fsecret", b""),
        (host, "POST", "/arriving/versions/000004", b'{"files":[]}'),
        (worker, "GET", "/files/versions/000001", b""),
        (worker, "GET", "/files/checkpoints", b""),
        (worker, "PUT", "/base_probe", b"{}"),
        (worker, "POST", "/learner/entries", b'{"id":"1","first":null,"step":null}'),
        (learner, "POST", "/arriving/versions/000004", b'{"files":[{"name":"../x","size":0,"chunks":[]}]}'),
        (learner, "POST", "/arriving/versions/000004", b'{"files":[{"name":"x","size":1000000000000000,"chunks":[]}]}'),
        (learner, "POST", "/arriving/versions/000004", b'{"files":[{"name":"x","size":0,"chunks":[]},{"name":"x","size":0,"chunks":[]}]}'),
        (
            learner,
            "POST",
            "/arriving/versions/000004",
            b'{"files":[{"name":"x","size":0,"chunks":[]},{"name":"x/y","size":0,"chunks":[]}]}',
        ),
        (learner, "POST", "/arriving/logs/000004", b'{"files":[]}'),
        (learner, "POST", "/arriving/versions/000004", b"[" * 100_000),
        (learner, "PUT", "/arriving/versions/000004/" + "0" * 64, b"data"),
        (learner, "POST", "/arriving/versions/000004/commit", b""),
        (learner, "POST", "/learner/put", b'{"id":"1"}'),
        (learner, "POST", "/learner/commit", b'{"id":"2","step":"x"}'),
        (
            learner,
            "POST",
            "/learner/add",
            json.dumps({"id": "3", "version": {"number": 1, "parent": 0, "folder": "../..", "sha256": "0"}}).encode(),
        ),
        (Link(driver.url, ""), "GET", "/files/versions", b""),
    ]
    for link, method, path, body in rejected:
        status, _ = link.request(method, path, body, timeout_s=10)
        assert 400 <= status < 500, (path, status)
    assert sorted(path.name for path in (driver.folder / "versions").iterdir() if path.name != ".lock") == ["000001", "000002"]

    ok = FolderListing(files=(FileChunks(name="a.bin", size=3, chunks=("0" * 64,)),))
    learner.json("POST", "/arriving/versions/000004", {"files": [{"name": "a.bin", "size": 3, "chunks": ["0" * 64]}]})
    assert learner.request("PUT", "/arriving/versions/000004/" + "0" * 64, b"abc", timeout_s=10)[0] == 400, "not its checksum"
    assert learner.request("PUT", "/arriving/versions/000004/" + "0" * 64, bytes(SMALL + 1), timeout_s=10)[0] == 413
    assert learner.request("POST", "/arriving/versions/000004/commit", b"", timeout_s=10)[0] == 400, ok
    assert not (driver.folder / "versions" / "000004").exists()


def test_two_parts_of_a_host_share_one_mirror(tmp_path: Path, driver: Driver) -> None:
    folder = driver.folder / "versions" / "000001"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(4).randbytes(60 * SMALL))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(driver.mirror(tmp_path / "mirror").fetch, "versions/000001") for _ in range(4)]:
            future.result()
    assert folder_manifest(tmp_path / "mirror" / "versions" / "000001") == folder_manifest(folder)


def test_an_arriving_folder_does_not_follow_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"safe")
    part = tmp_path / "versions" / ".000001.part"
    part.mkdir(parents=True)
    (part / "a.bin").symlink_to(victim)
    listing = FolderListing(
        files=(FileChunks(name="a.bin", size=1, chunks=("ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",)),)
    )
    arriving = ArrivingFolder(tmp_path / "versions" / "000001", listing, ChunkIndex())
    arriving.write(listing.files[0].chunks[0], b"a")
    arriving.commit()
    assert victim.read_bytes() == b"safe" and (tmp_path / "versions" / "000001" / "a.bin").read_bytes() == b"a"


def test_images_come_from_workers_and_go_to_other_hosts(driver: Driver, tmp_path: Path) -> None:
    """Only workers store images, and only bytes that are an image with that name; nothing outside the folder is read."""
    worker, learner = driver.link(WORKER), driver.link(LEARNER)
    png = PNG + b"pixels"
    sha256 = mirrored_media(tmp_path / "worker", worker).put(png)
    assert (driver.folder / "media" / f"{sha256[:10]}.png").read_bytes() == png
    assert mirrored_media(tmp_path / "learner", learner).read(sha256[:10]) == png
    with pytest.raises(InfrastructureError, match="missing"):
        mirrored_media(tmp_path / "learner", learner).read("0123456789")
    (driver.folder / "media" / "secret.png").write_bytes(png)
    for name in ("secret", "..%2frecipe", f"{sha256[:9]}", f"{sha256[:10]}.png"):
        with pytest.raises(NotFound):
            worker.call("GET", f"/media/{name}")
    for name, content in ((sha256[:10], png + b"x"), (hashlib.sha256(b"text").hexdigest()[:10], b"text"), ("", png), (sha256[:9], png)):
        with pytest.raises((UserError, NotFound)):
            worker.call("PUT", f"/media/{name}", content)
    with pytest.raises((UserError, NotFound)):
        learner.call("PUT", f"/media/{sha256[:10]}", png)


def test_an_image_that_the_driver_has_dropped_is_sent_again(driver: Driver, tmp_path: Path) -> None:
    """A copy from an earlier session does not prove that the driver still has the image. A session sends it once."""
    png, worker = PNG + b"pixels", driver.link(WORKER)
    sha256 = mirrored_media(tmp_path / "worker", worker).put(png)
    stored = driver.folder / "media" / f"{sha256[:10]}.png"
    stored.unlink()
    media = mirrored_media(tmp_path / "worker", worker)
    assert media.put(png) == sha256 and stored.read_bytes() == png
    stored.unlink()
    media.put(png)
    assert not stored.exists()
