"""The exec server's request handling in a folder, without a sandbox, for targets about names and files."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from agentrl.sandbox import frames
from agentrl.sandbox.frames import Schema
from agentrl.sandbox.inside.users import Users
from agentrl.sandbox.inside.wire import Link, frame
from tests.fuzz.target import Broken, must

_INSIDE = "agentrl.sandbox.inside"


class _HeldLink(Link):
    """A connection whose other end sends nothing more; what is sent to it is kept."""

    def __init__(self, said: bytes) -> None:
        self.said = io.BytesIO(said)
        self.sent = bytearray()

    def read(self, size: int) -> bytes:
        data = self.said.read(size)
        must(len(data) == size, "the server reads more than was sent to it")
        return data

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self.sent += frame(header, body)


def _server_in(home: str) -> Any:
    """The server's module, imported again with another working directory, and unable to send signals.

    A server stops every process that it can signal while it makes a snapshot: outside of a sandbox that is the whole machine.
    """
    package = importlib.import_module(_INSIDE)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(f"{_INSIDE}.")}
    try:
        setattr(importlib.import_module(f"{_INSIDE}.users"), "HOME", home)  # noqa: B010 - a constant wherever it is not set here
        server: Any = importlib.import_module(f"{_INSIDE}.server")
    finally:
        for name, module in kept.items():
            sys.modules[name] = module
            setattr(package, name.rpartition(".")[2], module)
    server.kill_everything = _forbidden
    return server


def _forbidden(number: int) -> NoReturn:
    raise Broken("a request about files that signals every process")


class Desk:
    """Sends requests to a server as the host does, in a working directory below `scratch`, and checks that nothing else changes."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.home = scratch, scratch / "home"
        self.home.mkdir()
        (scratch / "canary").write_bytes(b"outside of the working directory")
        self._module = _server_in(str(self.home))
        self._outside = self._beside()

    def ask(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes = b"",
        *,
        schema: Schema = frames.EMPTY,
        most: int = 0,
        written: Mapping[str, bytes] | None = None,
    ) -> bytes | None:
        """The body of the answer, None for a refusal. Raises `Broken` for anything that the host would take for a broken sandbox."""
        link = _HeldLink(frames.encode({"id": 1, "op": operation, **arguments}, body))
        server = object.__new__(self._module.Server)  # its constructor starts processes
        user = os.geteuid()
        server.link, server.users = link, Users(user, user, 64, grouped=True)
        server.paused_at = 0.0 if operation == "snapshot" else None
        server.answer(link.request())
        must(not link.said.read(1), "the server leaves a part of a request unread")
        answer = self._answer(bytes(link.sent), schema, most)
        if written is not None and answer is not None:
            for path, content in written.items():
                must((self.home / path).read_bytes() == content, "a file is not what was written")
        return answer

    def _answer(self, sent: bytes, schema: Schema, most: int) -> bytes | None:
        stream = io.BytesIO(sent)
        parts: list[bytes] = []
        while True:
            header_size, body_size = frames.parse_prefix(stream.read(frames.PREFIX.size))
            header = frames.parse_header(stream.read(header_size))
            parts.append(stream.read(body_size))
            must(header["id"] == 1 and sum(map(len, parts)) <= most, "an answer larger than was asked for")
            if not header["ok"]:
                kind, _ = frames.parse_failure(header)
                must(kind in ("not_found", "too_large", "refused"), f"the agent's own doing is told as the machine's: {header}")
                return None
            if not frames.check_fields(header, schema).get("more", False):
                must(not stream.read(1), "more than one answer")
                return b"".join(parts)
            must(bool(parts[-1]), "a piece of nothing")

    def listing(self) -> dict[bytes, object]:
        """Path -> a link's target, or a folder's or file's mode and time, and a file's bytes."""
        listed: dict[bytes, object] = {}
        self._look(os.fsencode(self.home), b"", listed)
        return listed

    def _look(self, folder: bytes, within: bytes, listed: dict[bytes, object]) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                info, key = entry.stat(follow_symlinks=False), within + entry.name
                if entry.is_symlink():
                    listed[key] = os.readlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # without root an owner may not read everything it owns
                if entry.is_dir():
                    listed[key] = (stat.S_IMODE(info.st_mode), int(info.st_mtime))
                    self._look(entry.path, key + b"/", listed)
                else:
                    must(stat.S_ISREG(info.st_mode), f"{key!r} is neither a file, a folder nor a link")
                    with open(entry.path, "rb") as file:
                        listed[key] = (stat.S_IMODE(info.st_mode), int(info.st_mtime), info.st_nlink, file.read())
                os.chmod(entry.path, stat.S_IMODE(info.st_mode))

    def tidy(self) -> None:
        """Empties the working directory, and nothing else."""
        must(self._beside() == self._outside, "something beside the working directory has changed")
        with os.scandir(self.home) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if os.geteuid() != 0:
                        _open_up(entry.path)
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def _beside(self) -> tuple[object, ...]:
        canary = os.stat(self.scratch / "canary")
        return sorted(os.listdir(self.scratch)), canary.st_mtime_ns, canary.st_size, canary.st_mode, canary.st_nlink


def _open_up(folder: str) -> None:
    """Lets the owner into a folder and all folders in it."""
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.path)
