"""Archives of working directories: what is packed is unpacked as it was, `tarfile` can read it too, and no bytes lead anywhere else."""

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
from agentrl.sandbox.inside.archive import FIELD, FILE, FOLDER_ENTRY, HARD_LINK, LINK, ArchiveReader, ArchiveWriter, Entry, header_of
from agentrl.sandbox.inside.files import FOLDER, MAX_DEPTH
from agentrl.sandbox.inside.snapshot import Packer, unpack
from agentrl.sandbox.inside.wire import READ_BYTES, Refused

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
FEW = settings(deadline=None, max_examples=30)


class Pieces:
    """A sink that keeps what is sent."""

    def __init__(self, limit=1 << 30):
        self.sent, self.left = [], limit

    def room_for(self, size):
        if size > self.left:
            raise Refused("too_large", "too large")

    def write(self, data):
        self.room_for(len(data))
        self.left -= len(data)
        self.sent.append(bytes(data))


def packed(top, limit=1 << 30):
    sink = Pieces(limit)
    packer = Packer(ArchiveWriter(sink))
    packer.pack(os.open(top, FOLDER))
    return b"".join(sink.sent) + packer.out.last()


def plant(top, tree, made):
    """Makes `tree` below `top`; `same` is one more name of the first file."""
    for name, (kind, *what) in tree.items():
        path = os.path.join(top, name)
        if kind == "folder":
            os.mkdir(path)
            plant(path, what[0], made)
        elif kind == "link":
            os.symlink(what[0], path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "same":
            if made:
                os.link(made[0], path)
        else:
            made.append(path)
            with open(path, "wb") as file:
                file.write(what[0])
        if kind in ("file", "folder"):
            os.chmod(path, what[1])
            os.utime(path, (what[2], what[2]))


def seen(top):
    """Everything below `top` that an archive keeps: {path: what it is}, with the paths that are one file."""
    found, inodes = {}, {}
    for folder, folders, names in os.walk(os.fsencode(top)):
        for name in folders + names:
            path = os.path.join(folder, name)
            info, key = os.lstat(path), os.path.relpath(path, os.fsencode(top))
            if stat.S_ISLNK(info.st_mode):
                found[key] = os.readlink(path)
            elif stat.S_ISDIR(info.st_mode):
                found[key] = ("folder", info.st_mode & 0o777, int(info.st_mtime))
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    found[key] = (file.read(), info.st_mode & 0o777, int(info.st_mtime))
                inodes.setdefault(info.st_ino, set()).add(key)
    return found, sorted(map(sorted, inodes.values()))


@FEW
@given(TREE)
def test_what_is_packed_is_unpacked_as_it_was(tree):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plant(os.fsencode(one), tree, [])
        before = seen(one)
        archive = packed(one)
        assert seen(one) == before  # reading leaves no trace, modes included
        unpack(ArchiveReader(io.BytesIO(archive)), other)
        assert seen(other) == before
        assert packed(other) == archive
        with tarfile.open(fileobj=io.BytesIO(archive)) as reader:
            assert {os.fsencode(member.name) for member in reader} == set(before[0])


@FEW
@given(TREE.filter(bool), st.data())
def test_any_change_to_an_archive_is_refused_or_stays_inside(tree, data):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plant(os.fsencode(one), tree, [])
        archive = bytearray(packed(one)[: 64 << 10])
        for _ in range(data.draw(st.integers(1, 4))):
            archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
        inside(bytes(archive), Path(other))


@FEW
@given(st.binary(max_size=2000))
def test_any_bytes_are_refused_or_stay_inside(data):
    with tempfile.TemporaryDirectory() as other:
        inside(data, Path(other))


def inside(archive, folder):
    """Unpacks into a folder of `folder`, which holds nothing else afterwards."""
    (folder / "top").mkdir()
    with contextlib.suppress(Refused, OSError):  # the server answers both as a refusal
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
def test_what_leads_out_or_is_no_file_is_refused(entries, tmp_path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "top").mkdir()
    with pytest.raises(Refused):
        unpack(ArchiveReader(io.BytesIO(archive_of(*entries))), str(tmp_path / "top"))
    assert sorted(os.listdir(tmp_path)) == ["secret", "top"]
    assert not [path for path in (tmp_path / "top").rglob("*") if path.name.startswith(("evil", "null", "pipe"))]


def test_permission_bits_are_all_that_is_taken_of_a_mode(tmp_path):
    unpack(
        ArchiveReader(io.BytesIO(archive_of(Entry(b"suid", FILE, mode=0o6777, size=4), Entry(b"d", FOLDER_ENTRY, mode=0o7700)))),
        str(tmp_path),
    )
    assert stat.S_IMODE((tmp_path / "suid").stat().st_mode) == 0o777
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_sizes_end_in_one_kind_of_refusal(tmp_path, monkeypatch):
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


def test_files_larger_than_a_piece(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    data = bytes(range(251)) * (3 * READ_BYTES // 251)
    (tmp_path / "one" / "big").write_bytes(data)
    (tmp_path / "one" / "small").write_bytes(b"s")
    unpack(ArchiveReader(io.BytesIO(packed(tmp_path / "one"))), str(tmp_path / "other"))
    assert ((tmp_path / "other" / "big").read_bytes(), (tmp_path / "other" / "small").read_bytes()) == (data, b"s")


def test_many_names_of_one_file_count_its_bytes_once(tmp_path):
    (tmp_path / "0").write_bytes(bytes(100_000))
    for number in range(1, 100):
        os.link(tmp_path / "0", tmp_path / str(number))
    assert len(packed(tmp_path)) < 200_000


def test_what_changes_while_it_is_packed_is_packed_as_something(tmp_path, monkeypatch):
    """Programs come to a stop one by one: an entry may have gone since the folder was read, be something else, or shrink."""
    for name in ("gone", "link", "folder", "shrinks", "stays"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / "was a folder").mkdir()
    found = Packer.listing

    def and_then(packer, folder, level):
        names = found(packer, folder, level)
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

    monkeypatch.setattr(Packer, "listing", and_then)
    monkeypatch.setattr(os, "read", shorter)
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path))) as archive:
        assert [(member.name, member.size) for member in archive] == [("shrinks", 1000), ("stays", 1000)]
        content = archive.extractfile("shrinks").read()
        assert content.rstrip(b"\0") == b"x" * 10


def test_sockets_and_pipes_are_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        assert packed(tmp_path) == bytes(1024)


def test_no_archive_holds_more_entries_than_a_sandbox_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_ENTRIES", 100)
    archive = archive_of(*[Entry(b"d", FOLDER_ENTRY)] * 101)
    with pytest.raises(Refused, match="entries"):
        unpack(ArchiveReader(io.BytesIO(archive)), str(tmp_path))
