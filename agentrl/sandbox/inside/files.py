"""Files in the working directory, for the host: every step of a path is opened without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct

from agentrl.sandbox.inside.users import HOME
from agentrl.sandbox.inside.wire import READ_BYTES, Refused, Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from typing import Protocol

    from agentrl.sandbox.inside.wire import Answer, Body, Link, Request

    class Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


MAX_ENTRIES = 20000
MAX_DEPTH = 64
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def send_file(link: Link, request: Request, body: Body) -> Answer:
    folder, name = open_parent(request["path"])
    try:
        fd = open_regular(name, folder)
    finally:
        os.close(folder)
    sink = Sink(link, request["id"], request["max_bytes"], f"{request['path']} is larger than {request['max_bytes']} bytes")
    with open(fd, "rb", buffering=0) as file:
        sink.room_for(os.fstat(fd).st_size)
        while len(data := file.read(READ_BYTES)) == READ_BYTES:
            sink.write(data)
    sink.room_for(len(data))
    return {"more": False}, data


def take_files(link: Link, request: Request, body: Body) -> Answer:
    for path, size in request["files"]:
        folder, name = open_parent(path, create=True)
        try:
            write_file(folder, name, body, size)
        finally:
            os.close(folder)
    return {}, b""


def send_snapshot(link: Link, request: Request, body: Body) -> Answer:
    """The caller has stopped every program."""
    import tarfile

    sink = Sink(link, request["id"], request["max_bytes"], "the working directory is larger than a snapshot may be")
    with tarfile.open(mode="w|", fileobj=sink, format=tarfile.PAX_FORMAT, bufsize=READ_BYTES) as archive:
        pack(archive, sink)
    return {"more": False}, b""


def take_snapshot(link: Link, request: Request, body: Body) -> Answer:
    import tarfile

    try:
        with tarfile.open(mode="r|", fileobj=body, bufsize=READ_BYTES) as archive:
            unpack(archive)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, struct.error) as error:
        raise Refused("refused", f"not an archive: {error}") from None
    return {}, b""


def open_parent(path: str, create: bool = False) -> tuple[int, str]:
    """(descriptor of the folder that holds `path`, last name), walking from the working directory without following links."""
    *folders, name = path.split("/")
    if len(folders) > MAX_DEPTH or any(part in ("", ".", "..") for part in (*folders, name)):
        raise Refused("refused", f"path {path!r} is not a plain relative path")
    fd = os.open(HOME, FOLDER)
    for part in folders:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            deeper = os.open(part, FOLDER, dir_fd=fd)
        except FileNotFoundError:
            raise Refused("not_found", path) from None
        except OSError as error:
            raise Refused("refused", f"{part!r} in {path!r}: {error.strerror}") from None
        finally:
            os.close(fd)
        fd = deeper
    return fd, name


def open_regular(name: str, folder: int) -> int:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise Refused("not_found", name) from None
    except OSError as error:
        raise Refused("refused", f"{name!r} is not a readable regular file: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused("refused", f"{name!r} is not a regular file")
    return fd


def write_file(folder: int, name: str, body: Readable, size: int, mode: int = 0o644) -> None:
    """Replaces whatever is at `name` (a link is removed, not followed) by a new file with the next `size` bytes of `body`."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Refused("refused", f"{name!r} cannot be replaced: {error.strerror}") from None
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        with open(fd, "wb") as file:
            while size:
                data = body.read(min(size, READ_BYTES))
                if not data:
                    raise Refused("refused", f"{name!r} ends early")
                size -= len(data)
                file.write(data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Refused("too_large", f"no room for {name!r}") from None
        raise


def pack(archive: tarfile.TarFile, sink: Sink) -> None:
    """Adds the working directory (regular files, folders, links as links) to `archive`; anything else is left out."""
    import tarfile

    count = 0
    todo = [""]
    while todo:
        folder = todo.pop()
        if folder.count("/") >= MAX_DEPTH:
            raise Refused("too_large", f"the working directory is nested more than {MAX_DEPTH} deep")
        with os.scandir(HOME + "/" + folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                count += 1
                if count > MAX_ENTRIES:
                    raise Refused("too_large", f"the working directory holds more than {MAX_ENTRIES} entries")
                path = folder + entry.name
                member = tarfile.TarInfo(path)
                if entry.is_symlink():
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
                    archive.addfile(member)
                elif entry.is_dir(follow_symlinks=False):
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(member)
                    todo.append(path + "/")
                elif entry.is_file(follow_symlinks=False):
                    pack_file(archive, member, entry.path, sink)


def pack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, sink: Sink) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        sink.room_for(info.st_size)
        member.size, member.mode, member.mtime = info.st_size, info.st_mode & 0o777, int(info.st_mtime)
        archive.addfile(member, file)


def unpack(archive: tarfile.TarFile) -> None:
    for count, member in enumerate(archive):
        if count >= MAX_ENTRIES:
            raise Refused("too_large", f"the archive holds more than {MAX_ENTRIES} entries")
        folder, name = open_parent(member.name.rstrip("/"), create=True)
        try:
            if member.isdir():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=folder)
            elif member.issym():
                os.symlink(member.linkname, name, dir_fd=folder)
            elif member.isreg() and (content := archive.extractfile(member)) is not None:
                write_file(folder, name, content, member.size, member.mode & 0o777)
        finally:
            os.close(folder)
