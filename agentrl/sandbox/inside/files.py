"""Reads and writes files in the working directory for the host. Each component of a path is opened without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from agentrl.sandbox.inside.users import HOME
from agentrl.sandbox.inside.wire import READ_BYTES, Refused, Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Answer, Body, Link, Readable, Request

MAX_DEPTH = 64
"""Maximum number of names in a path."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags for opening a folder."""
_HOLE = bytes(4096)


def send_file(link: Link, request: Request, body: Body) -> Answer:
    """Sends the content of a regular file. Raises `Refused` if there is no such file or it has more than `max_bytes` bytes."""
    with FolderPath() as folders:
        folder, name = folders.parent(request["path"])
        fd = _open_regular(name, folder)
    sink = Sink(link, request["id"], request["max_bytes"], f"{request['path']} is larger than {request['max_bytes']} bytes")
    with open(fd, "rb", buffering=0) as file:
        sink.room_for(os.fstat(fd).st_size)
        while len(data := file.read(READ_BYTES)) == READ_BYTES:
            sink.write(data)
    sink.room_for(len(data))
    return {"more": False}, data


def write_files(link: Link, request: Request, body: Body) -> Answer:
    """Writes files, and creates their folders. Raises `Refused` if a path is invalid or there is no room; files before it are written."""
    with FolderPath() as folders:
        for path, size in request["files"]:
            write_file(*folders.parent(path, create=True), body, size)
    return {}, b""


class FolderPath:
    """Keeps the most recently used folder and its parents open, because the next path usually starts with the same folders.

    Each folder is opened relative to its parent without following links, so no path leads out of `top`.
    """

    def __init__(self, top: str = HOME) -> None:
        self.fds = [os.open(top, FOLDER)]
        self.names: list[str] = []

    def __enter__(self) -> FolderPath:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(0)
        os.close(self.fds[0])

    def parent(self, path: str, create: bool = False) -> tuple[int, str]:
        """Returns (descriptor of the folder that contains `path`, last name in `path`). The descriptor is valid until the next call.

        Raises `Refused` if `path` is not plain or leads through a link or a file, or if a folder is missing and `create` is False.
        """
        *folders, name = path.split("/")
        if len(folders) >= MAX_DEPTH or any(part in ("", ".", "..") for part in (*folders, name)):
            raise Refused("refused", f"path {path!r} is not a plain relative path")
        if folders != self.names:
            same = 0
            while folders[same : same + 1] == self.names[same : same + 1] != []:
                same += 1
            self._leave(same)
            for part in folders[same:]:
                self._enter(part, path, create)
        return self.fds[-1], name

    def _enter(self, name: str, path: str, create: bool) -> None:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self.fds[-1])
            self.fds.append(os.open(name, FOLDER, dir_fd=self.fds[-1]))
        except FileNotFoundError:
            raise Refused("not_found", path) from None
        except OSError as error:
            raise Refused("refused", f"{name!r} in {path!r}: {error.strerror}") from None
        self.names.append(name)

    def _leave(self, level: int) -> None:
        while len(self.names) > level:
            self.names.pop()
            os.close(self.fds.pop())


def _open_regular(name: str, folder: int) -> int:
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


def write_file(folder: int, name: str, body: Readable, size: int, mode: int = 0o644, mtime: int | None = None) -> None:
    """Replaces `name` with a new file that contains the next `size` bytes of `body`. If `name` is a link, the link is replaced, not
    followed. Raises `Refused` if `name` is a folder, `body` ends early, or there is no room."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Refused("refused", f"{name!r} cannot be replaced: {error.strerror}") from None
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            end = 0
            while end < size:
                data = body.read(min(size - end, READ_BYTES))
                if not data:
                    raise Refused("refused", f"{name!r} ends early")
                _write_sparse(fd, data, end)
                end += len(data)
            os.ftruncate(fd, size)
            os.fchmod(fd, mode)  # `open` applied the umask to the mode
            if mtime is not None:
                os.utime(fd, (mtime, mtime))
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Refused("too_large", f"no room for {name!r}") from None
        raise


def _write_sparse(fd: int, data: bytes, offset: int) -> None:
    """Writes `data` but skips pages of zeros, so that a copy of a sparse file takes no more space than the original."""
    at = 0
    while at < len(data):
        end = at
        while (piece := data[end : end + len(_HOLE)]) and piece != _HOLE[: len(piece)]:
            end += len(piece)
        left = memoryview(data)[at:end]
        while left:
            left = left[os.pwrite(fd, left, offset + end - len(left)) :]
        at = end + len(_HOLE)  # zeros follow, or the end
