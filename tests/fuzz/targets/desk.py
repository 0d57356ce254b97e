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


class _RecordedLink(Link):
    """A connection with fixed received bytes, which records the bytes that are sent."""

    def __init__(self, received: bytes) -> None:
        self.received = io.BytesIO(received)
        self.sent = bytearray()

    def read(self, size: int) -> bytes:
        data = self.received.read(size)
        must(len(data) == size, "the server reads more than was sent to it")
        return data

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self.sent += frame(header, body)


def _server_in(home: str) -> Any:
    """The server's module, imported again with another working directory and without the ability to send signals.

    A server stops every process that it can signal while it creates a snapshot. Outside a sandbox, those are all processes of the machine.
    """
    package = importlib.import_module(_INSIDE)
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(f"{_INSIDE}.")}
    try:
        setattr(importlib.import_module(f"{_INSIDE}.users"), "HOME", home)  # noqa: B010 - a constant wherever it is not set here
        server: Any = importlib.import_module(f"{_INSIDE}.server")
    finally:
        for name, module in modules.items():
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
        self._outside = self._state_outside()

    def ask(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes = b"",
        *,
        schema: Schema = frames.EMPTY,
        max_bytes: int = 0,
        written: Mapping[str, bytes] | None = None,
    ) -> bytes | None:
        """Returns the body of the answer, or None for a refusal. Raises `Broken` if the host would regard the sandbox as broken."""
        link = _RecordedLink(frames.encode({"id": 1, "op": operation, **arguments}, body))
        server = object.__new__(self._module.Server)  # its constructor starts processes
        user = os.geteuid()
        server.link, server.users = link, Users(user, user, 64, grouped=True)
        server.paused_at = 0.0 if operation == "snapshot" else None
        server.answer(link.request())
        must(not link.received.read(1), "the server leaves part of a request unread")
        answer = self._answer(bytes(link.sent), schema, max_bytes)
        if written is not None and answer is not None:
            for path, content in written.items():
                must((self.home / path).read_bytes() == content, "a file differs from what was written")
        return answer

    def _answer(self, sent: bytes, schema: Schema, max_bytes: int) -> bytes | None:
        stream = io.BytesIO(sent)
        parts: list[bytes] = []
        while True:
            header_size, body_size = frames.parse_prefix(stream.read(frames.PREFIX.size))
            header = frames.parse_header(stream.read(header_size))
            parts.append(stream.read(body_size))
            must(header["id"] == 1 and sum(map(len, parts)) <= max_bytes, "an answer larger than requested")
            if not header["ok"]:
                kind, _ = frames.parse_failure(header)
                must(kind in ("not_found", "too_large", "refused"), f"a fault of the agent is reported as one of the machine: {header}")
                return None
            if not frames.check_fields(header, schema).get("more", False):
                must(not stream.read(1), "more than one answer")
                return b"".join(parts)
            must(bool(parts[-1]), "an empty chunk")

    def listing(self) -> dict[bytes, object]:
        """Path -> the target of a link, the mode and time of a folder, or the mode, time, link count and content of a file."""
        entries_by_path: dict[bytes, object] = {}
        self._look(os.fsencode(self.home), b"", entries_by_path)
        return entries_by_path

    def _look(self, folder: bytes, within: bytes, entries_by_path: dict[bytes, object]) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                info, key = entry.stat(follow_symlinks=False), within + entry.name
                if entry.is_symlink():
                    entries_by_path[key] = os.readlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # without root an owner may not read everything it owns
                if entry.is_dir():
                    entries_by_path[key] = (stat.S_IMODE(info.st_mode), int(info.st_mtime))
                    self._look(entry.path, key + b"/", entries_by_path)
                else:
                    must(stat.S_ISREG(info.st_mode), f"{key!r} is neither a file, a folder nor a link")
                    with open(entry.path, "rb") as file:
                        entries_by_path[key] = (stat.S_IMODE(info.st_mode), int(info.st_mtime), info.st_nlink, file.read())
                os.chmod(entry.path, stat.S_IMODE(info.st_mode))

    def tidy(self) -> None:
        """Empties the working directory."""
        must(self._state_outside() == self._outside, "something outside the working directory has changed")
        with os.scandir(self.home) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if os.geteuid() != 0:
                        _open_up(entry.path)
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def _state_outside(self) -> tuple[object, ...]:
        canary = os.stat(self.scratch / "canary")
        return sorted(os.listdir(self.scratch)), canary.st_mtime_ns, canary.st_size, canary.st_mode, canary.st_nlink


def _open_up(folder: str) -> None:
    """Lets the owner into a folder and all folders in it."""
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.path)
