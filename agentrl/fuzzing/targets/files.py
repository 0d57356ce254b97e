"""The exec server's own request handling over a folder, without a sandbox around it: for targets about names and files."""

from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from agentrl.fuzzing.target import Broken, must
from agentrl.sandbox import frames
from agentrl.sandbox.frames import Schema
from agentrl.sandbox.inside import files as inside_files
from agentrl.sandbox.inside import server as inside_server
from agentrl.sandbox.inside.server import Server
from agentrl.sandbox.inside.users import Users
from agentrl.sandbox.inside.wire import Link, frame


class _HeldLink(Link):
    """A connection whose other end has said all it will; what is sent is kept."""

    def __init__(self, said: bytes) -> None:
        self.said = io.BytesIO(said)
        self.sent = bytearray()

    def read(self, size: int) -> bytes:
        data = self.said.read(size)
        must(len(data) == size, "the server reads more than was sent to it")
        return data

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self.sent += frame(header, body)


class _Calm(Server):
    """A server that answers about files: it is paused, so that it stops no process of the machine it is on."""

    def __init__(self, link: Link) -> None:
        user = os.geteuid()
        self.link, self.users, self.paused_at = link, Users(user, user, 64), None


def _forbidden(number: int) -> NoReturn:
    raise Broken("a request about files that signals every process")


class Desk:
    """Asks a server as the host does, in a working directory below `scratch`, and looks whether anything beside it changes."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.home = scratch, scratch / "home"
        self.home.mkdir()
        (scratch / "canary").write_bytes(b"outside of the working directory")
        setattr(inside_files, "HOME", str(self.home))  # noqa: B010 - of a module that is handed to sandboxes, where it is fixed
        # `inside_server` would stop every process of a sandbox while it makes a snapshot; here that is the whole machine
        setattr(inside_server, "kill_everything", _forbidden)  # noqa: B010
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
        """The body of the answer, None for a refusal. Whatever else the host would take for a broken sandbox is `Broken`."""
        link = _HeldLink(frames.encode({"id": 1, "op": operation, **arguments}, body))
        server = _Calm(link)
        server.paused_at = 0.0 if operation == "snapshot" else None
        server.answer(link.request())
        must(not link.said.read(1), "the server leaves a part of a request unread")
        found = self._answer(bytes(link.sent), schema, most)
        if written is not None and found is not None:
            for path, content in written.items():
                must((self.home / path).read_bytes() == content, "a file is not what was written")
        return found

    def _answer(self, sent: bytes, schema: Schema, most: int) -> bytes | None:
        found = io.BytesIO(sent)
        parts: list[bytes] = []
        while True:
            header_size, body_size = frames.prefix(found.read(frames.PREFIX.size))
            header = frames.header(found.read(header_size))
            parts.append(found.read(body_size))
            must(header["id"] == 1 and sum(map(len, parts)) <= most, "an answer larger than was asked for")
            if not header["ok"]:
                kind, _ = frames.failure(header)
                must(kind in ("not_found", "too_large", "refused"), f"the agent's own doing is told as the machine's: {header}")
                return None
            if not frames.fields(header, schema).get("more", False):
                must(not found.read(1), "more than one answer")
                return b"".join(parts)
            must(bool(parts[-1]), "a piece of nothing")

    def listing(self) -> dict[str, object]:
        """Path -> what is there: a link's aim, a file's mode and bytes, a folder's nothing."""
        found: dict[str, object] = {}
        for place, folders, names in os.walk(os.fsencode(self.home)):
            for name in (*folders, *names):
                path = os.path.join(place, name)
                key = os.fsdecode(os.path.relpath(path, os.fsencode(self.home)))
                mode = os.lstat(path).st_mode
                if stat.S_ISLNK(mode):
                    found[key] = os.readlink(path)
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        found[key] = (stat.S_IMODE(mode), file.read())
                else:
                    must(stat.S_ISDIR(mode), f"{key!r} is neither a file, a folder nor a link")
                    found[key] = None
        return found

    def tidy(self) -> None:
        """Empties the working directory; what lies beside it is as it was."""
        must(self._beside() == self._outside, "something beside the working directory has changed")
        with os.scandir(self.home) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def _beside(self) -> tuple[object, ...]:
        canary = os.stat(self.scratch / "canary")
        return sorted(os.listdir(self.scratch)), canary.st_mtime_ns, canary.st_size, canary.st_mode, canary.st_nlink
