"""Archives of working directories: a round trip changes nothing, `tarfile` can read them, and no archive leads out of the directory."""

import contextlib
import io
import os
import socket
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.sandbox.inside import snapshot
from agentrl.sandbox.inside.files import FOLDER, MAX_DEPTH
from agentrl.sandbox.inside.snapshot import (
    FIELD,
    FILE,
    FOLDER_ENTRY,
    HARD_LINK,
    LINK,
    ArchiveReader,
    ArchiveWriter,
    Entry,
    Packer,
    header_of,
    unpack,
)
from agentrl.sandbox.inside.wire import READ_BYTES, Refused
from tests.strategies import examples

MODES = st.integers(0, 0o777)
TIMES = st.integers(0, 2**33 - 1)
NAMES = (
    st.binary(min_size=1, max_size=6).map(lambda name: name.replace(b"/", b"").replace(b"\0", b""))
    | st.sampled_from([b"\xff", b"a\nb", b"x" * 255, b"path=", b"5 path=x\n", "é".encode() * 100, b"-", b"..."])
).filter(lambda name: name not in (b"", b".", b".."))
FILES = st.tuples(st.just("file"), st.binary(max_size=600), MODES, TIMES)
LINKS = st.tuples(st.just("link"), st.binary(min_size=1, max_size=300).map(lambda target: target.replace(b"\0", b"x")))
TREES = st.recursive(
    FILES | LINKS | st.just(("pipe",)) | st.just(("same",)),
    lambda inner: st.tuples(st.just("folder"), st.dictionaries(NAMES, inner, max_size=3), MODES, TIMES),
    max_leaves=8,
)
TREE = st.dictionaries(NAMES, TREES, max_size=4)
FEW = settings(max_examples=examples(30))


class RecordingSink:
    """A sink that records what is sent."""

    def __init__(self, limit=1 << 30):
        self.sent, self.remaining = [], limit

    def room_for(self, size):
        if size > self.remaining:
            raise Refused("too_large", "too large")

    def write(self, data):
        self.room_for(len(data))
        self.remaining -= len(data)
        self.sent.append(bytes(data))


def packed(top, limit=1 << 30):
    sink = RecordingSink(limit)
    packer = Packer(ArchiveWriter(sink))
    packer.pack(os.open(top, FOLDER))
    return b"".join(sink.sent) + packer.out.last()


def plant(top, tree, files):
    """Creates `tree` below `top`; `same` is another name of the first file."""
    for name, (kind, *details) in tree.items():
        path = os.path.join(top, name)
        if kind == "folder":
            os.mkdir(path)
            plant(path, details[0], files)
        elif kind == "link":
            os.symlink(details[0], path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "same":
            if files:
                os.link(files[0], path)
        else:
            files.append(path)
            with open(path, "wb") as file:
                file.write(details[0])
        if kind in ("file", "folder"):
            os.chmod(path, details[1])
            os.utime(path, (details[2], details[2]))


def contents_of(top):
    """Everything below `top` that an archive contains: path -> content or target, and the groups of paths that are one file."""
    entries, inodes = {}, {}
    for folder, folders, names in os.walk(os.fsencode(top)):
        for name in folders + names:
            path = os.path.join(folder, name)
            info, key = os.lstat(path), os.path.relpath(path, os.fsencode(top))
            if stat.S_ISLNK(info.st_mode):
                entries[key] = os.readlink(path)
            elif stat.S_ISDIR(info.st_mode):
                entries[key] = ("folder", info.st_mode & 0o777, int(info.st_mtime))
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    entries[key] = (file.read(), info.st_mode & 0o777, int(info.st_mtime))
                inodes.setdefault(info.st_ino, set()).add(key)
    return entries, sorted(map(sorted, inodes.values()))


@FEW
@given(TREE)
def test_round_trip_changes_nothing(tree):
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        plant(os.fsencode(source), tree, [])
        before = contents_of(source)
        archive = packed(source)
        assert contents_of(source) == before  # packing restores all modes
        unpack(ArchiveReader(io.BytesIO(archive)), target)
        assert contents_of(target) == before
        assert packed(target) == archive
        with tarfile.open(fileobj=io.BytesIO(archive)) as reader:
            assert {os.fsencode(member.name) for member in reader} == set(before[0])


@FEW
@given(TREE.filter(bool), st.data())
def test_modified_archive_is_refused_or_stays_inside(tree, data):
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        plant(os.fsencode(source), tree, [])
        archive = bytearray(packed(source)[: 64 << 10])
        for _ in range(data.draw(st.integers(1, 4))):
            archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
        check_unpacks_inside(bytes(archive), Path(target))


@FEW
@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_refused_or_stay_inside(data):
    with tempfile.TemporaryDirectory() as target:
        check_unpacks_inside(data, Path(target))


def check_unpacks_inside(archive, folder):
    """Unpacks into a subfolder of `folder`, which must contain nothing else afterwards."""
    (folder / "top").mkdir()
    with contextlib.suppress(Refused, OSError):  # the server reports both as a refusal
        unpack(ArchiveReader(io.BytesIO(archive)), str(folder / "top"))
    assert os.listdir(folder) == ["top"]


def archive_of(*entries):
    return b"".join(header_of(entry) + (b"evil" * 128 if entry.size else b"") for entry in entries) + bytes(1024)


@pytest.mark.parametrize(
    "entries",
    [
        [Entry(b"../evil", FILE, size=4)],
        [Entry(b"/tmp/evil", FILE, size=4)],
        [Entry(b"out", LINK, target=b".."), Entry(b"out/evil", FILE, size=4)],
        [Entry(b"out", LINK, target=b".."), Entry(b"evil", HARD_LINK, target=b"out/secret")],
        [Entry(b"evil", HARD_LINK, target=b"../secret")],
        [Entry(b"null", b"3")],
        [Entry(b"pipe", b"6")],
        [Entry(b"folder", FOLDER_ENTRY, size=4)],
        [Entry(b"/".join([b"d"] * (MAX_DEPTH + 1)), FOLDER_ENTRY)],
        [Entry(b"x" * (FIELD + 1) + b"/" + b"y" * (1 << 16), FILE)],
        [Entry(b"a\xff/../evil", FILE, size=4)],
        [Entry(b"big", FILE, size=1 << 30)],
    ],
)
def test_entries_that_lead_out_or_are_not_files_are_refused(entries, tmp_path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "top").mkdir()
    with pytest.raises(Refused):
        unpack(ArchiveReader(io.BytesIO(archive_of(*entries))), str(tmp_path / "top"))
    assert sorted(os.listdir(tmp_path)) == ["secret", "top"]
    assert not [path for path in (tmp_path / "top").rglob("*") if path.name.startswith(("evil", "null", "pipe"))]


@pytest.mark.parametrize("target", [b"missing", b"missing/b"])
def test_hard_link_to_a_missing_file_makes_an_archive_invalid(target, tmp_path):
    with pytest.raises(Refused, match="not an archive of a working directory: a hard link to 'missing") as caught:
        unpack(ArchiveReader(io.BytesIO(archive_of(Entry(b"a", HARD_LINK, target=target)))), str(tmp_path))
    assert caught.value.kind == "refused"


def test_only_permission_bits_of_a_mode_are_applied(tmp_path):
    unpack(
        ArchiveReader(io.BytesIO(archive_of(Entry(b"suid", FILE, mode=0o6777, size=4), Entry(b"d", FOLDER_ENTRY, mode=0o7700)))),
        str(tmp_path),
    )
    assert stat.S_IMODE((tmp_path / "suid").stat().st_mode) == 0o777
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_all_limits_raise_too_large(tmp_path, monkeypatch):
    with pytest.raises(Refused, match="too large") as error:
        (tmp_path / "sparse").touch()
        os.truncate(tmp_path / "sparse", 1 << 40)
        packed(tmp_path, limit=1 << 20)
    assert error.value.kind == "too_large"
    os.unlink(tmp_path / "sparse")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").touch()
    for name, number in (("MAX_ENTRIES", 2), ("MAX_DEPTH", 1), ("SNAPSHOT_S", -1.0)):
        with monkeypatch.context() as small:
            small.setattr(snapshot, name, number)
            with pytest.raises(Refused, match="working directory") as error:
                packed(tmp_path)
        assert error.value.kind == "too_large"
    packed(tmp_path)


def test_files_larger_than_one_frame(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    data = bytes(range(251)) * (3 * READ_BYTES // 251)
    (tmp_path / "one" / "big").write_bytes(data)
    (tmp_path / "one" / "small").write_bytes(b"s")
    unpack(ArchiveReader(io.BytesIO(packed(tmp_path / "one"))), str(tmp_path / "other"))
    assert ((tmp_path / "other" / "big").read_bytes(), (tmp_path / "other" / "small").read_bytes()) == (data, b"s")


def test_hard_links_are_stored_once(tmp_path):
    (tmp_path / "0").write_bytes(bytes(100_000))
    for number in range(1, 100):
        os.link(tmp_path / "0", tmp_path / str(number))
    assert len(packed(tmp_path)) < 200_000


def test_entries_may_change_while_they_are_packed(tmp_path, monkeypatch):
    """Programs stop one after the other, so an entry may disappear, change its kind, or shrink after its folder was read."""
    for name in ("gone", "link", "folder", "shrinks", "stays"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / "was a folder").mkdir()
    listing = Packer.listing

    def list_then_change(packer, folder, level):
        names = listing(packer, folder, level)
        for name in ("gone", "link", "folder"):
            (tmp_path / name).unlink()
        (tmp_path / "link").symlink_to("/etc/passwd")
        (tmp_path / "folder").mkdir()
        (tmp_path / "was a folder").rmdir()
        (tmp_path / "was a folder").symlink_to("/etc")
        return names

    read = os.read

    def shorter(fd, size):
        os.truncate(tmp_path / "shrinks", 10)
        return read(fd, size)

    monkeypatch.setattr(Packer, "listing", list_then_change)
    monkeypatch.setattr(os, "read", shorter)
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path))) as archive:
        assert [(member.name, member.size) for member in archive] == [("shrinks", 1000), ("stays", 1000)]
        content = archive.extractfile("shrinks").read()
        assert content.rstrip(b"\0") == b"x" * 10


def test_sockets_and_pipes_are_omitted(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        assert packed(tmp_path) == bytes(1024)


def test_archive_with_too_many_entries_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_ENTRIES", 100)
    archive = archive_of(*[Entry(b"d", FOLDER_ENTRY)] * 101)
    with pytest.raises(Refused, match="entries"):
        unpack(ArchiveReader(io.BytesIO(archive)), str(tmp_path))
