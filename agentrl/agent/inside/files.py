"""Looks at files of the working directory, changes them and searches them. What is printed is what the agent is shown.

Every step of a path is opened in the one before, without following links; a file is replaced whole, with its mode, or not at all.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MAX_BYTES = 4 << 20  # of a file that is shown or changed, and of one that is searched
MAX_ENTRIES = 20000  # of folders, in one search or listing
MAX_DEPTH = 32
MAX_READ = 64 << 20  # bytes that one search reads
MAX_MATCHES = 1000
MAX_LINE = 240  # characters of a line that a search shows
AROUND = 3  # lines shown before and after a change
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Wrong(Exception):
    """What was asked cannot be done; the text says why, and what can."""


class Late(BaseException):
    """The time is up; not an `Exception`, so that nothing on the way takes it for its own."""


def named(path: str) -> list[str]:
    """The names on the way from the working directory to `path`; none for the working directory itself."""
    top = os.getcwd()
    if path == top or path.startswith(top + "/"):
        path = path[len(top) + 1 :]
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or ".." in names:
        raise Wrong(f"{shown(path)} is outside the working directory {top}: give a path below it, such as src/main.py")
    if "\0" in path or len(names) > MAX_DEPTH:
        raise Wrong(f"{shown(path)} is no path: it holds NUL, or more than {MAX_DEPTH} names")
    return names


def shown(name: str) -> str:
    """A name or path as one printable line."""
    name = os.fsencode(name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in name[:300]) or "''"


class Place:
    """The folder that holds what a path names, held open, and the name in it."""

    def __init__(self, path: str, create: bool = False) -> None:
        self.path = path
        names = named(path)
        self.name = names[-1] if names else "."
        self.fd = os.open(".", FOLDER)
        for name in names[:-1]:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.fd)
            inner = self.opened(name, FOLDER)
            os.close(self.fd)
            self.fd = inner

    def opened(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError:
            raise Wrong(f"no file or folder {shown(self.path)}{self.near()}") from None
        except OSError as error:
            raise Wrong(f"{shown(name)} in {shown(self.path)} cannot be opened: {self.reason(name, error)}") from None

    def reason(self, name: str, error: OSError) -> str:
        try:
            mode = os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode
        except OSError:
            return str(error.strerror)
        if stat.S_ISLNK(mode):
            return "it is a link, and links are not followed: give the file that it leads to"
        return str(error.strerror)

    def near(self) -> str:
        """What else is there, for whoever has mistaken a name."""
        try:
            there = sorted(os.listdir(self.fd))[:20]
        except OSError:
            return ""
        return "; there: {}".format(", ".join(map(shown, there))) if there else "; its folder is empty"

    def kind(self) -> int:
        """The mode of what is there without following a link; 0 for nothing."""
        try:
            return os.stat(self.name, dir_fd=self.fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    def text(self) -> tuple[str, int]:
        """The content of a regular file, and its mode."""
        fd = self.opened(self.name, FILE)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise Wrong(f"{shown(self.path)} is no regular file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Wrong(f"{shown(self.path)} has more than {MAX_BYTES} bytes: search it, or use a program for it")
        try:
            return data.decode(), stat.S_IMODE(about.st_mode)
        except UnicodeDecodeError:
            raise Wrong(f"{shown(self.path)} is not text in UTF-8: use a program for it") from None

    def put(self, text: str, mode: int) -> None:
        """Writes beside and renames: a reader sees the old file or the new one."""
        data = text.encode("utf-8", "surrogateescape")
        if len(data) > MAX_BYTES:
            raise Wrong(f"it would have more than {MAX_BYTES} bytes")
        beside = f".{os.urandom(8).hex()}.agentrl"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                os.fchmod(fd, mode)
            os.rename(beside, self.name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            os.unlink(beside, dir_fd=self.fd)
            raise


def split(text: str) -> list[str]:
    """Lines with their ends, and nothing but line feeds ending them."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def numbered(lines: list[str], first: int, last: int, room: int) -> tuple[str, int]:
    """Lines `first` to `last` with their numbers, as many as fit into `room` characters, and the number of the last."""
    parts: list[str] = []
    used, at = 0, first - 1
    while at < last:
        part = "{:6d}\t{}\n".format(at + 1, lines[at].rstrip("\r\n"))
        if used + len(part) > room:
            if not parts:
                parts, at = [part[: max(room, 1)] + " ... cut\n"], at + 1
            break
        parts.append(part)
        used, at = used + len(part), at + 1
    return "".join(parts), at


def view(path: str, start: int, end: int | None, room: int) -> str:
    place = Place(path)
    if stat.S_ISDIR(place.kind()):
        return listing(place, room)
    lines = split(place.text()[0])
    if not lines:
        return f"{shown(path)} is empty"
    last = len(lines) if end is None else min(end, len(lines))
    if start > len(lines) or start > last:
        asked = f"from {start} to {'the end' if end is None else end}"
        raise Wrong(f"{shown(path)} has lines 1 to {len(lines)}: there is none {asked}")
    text, at = numbered(lines, start, last, room - 120)
    if at < len(lines):
        text += f"lines {start} to {at} of {len(lines)}" + (f"; go on with start={at + 1}" if at < last else "")
    return text


def listing(place: Place, room: int) -> str:
    found = []
    with os.scandir(place.opened(place.name, FOLDER)) as entries:
        for entry in entries:
            found.append(shown(entry.name) + ("/" if entry.is_dir(follow_symlinks=False) else " -> link" if entry.is_symlink() else ""))
            if len(found) >= MAX_ENTRIES:
                break
    text = ""
    for number, name in enumerate(sorted(found)):
        if len(text) + len(name) > room - 120:
            return text + f"... and {len(found) - number} more"
        text += name + "\n"
    return text or f"{shown(place.path)} is an empty folder"


def create(path: str, text: str, overwrite: bool, room: int) -> str:
    place = Place(path, create=True)
    mode = place.kind()
    if mode and not stat.S_ISREG(mode):
        raise Wrong(f"{shown(path)} is there, and is no regular file")
    if mode and not overwrite:
        raise Wrong(f"{shown(path)} exists: change it with replace or insert, or give overwrite=true to put this in its place")
    place.put(text, stat.S_IMODE(mode) if mode else 0o644)
    return f"{shown(path)} has {len(split(text))} lines now"


def replace(path: str, old: str, new: str, room: int) -> str:
    place = Place(path)
    text, mode = place.text()
    if not old:
        raise Wrong("old is empty: give the text to be replaced, or use insert")
    if old == new:
        raise Wrong("old and new are the same: nothing would change")
    if old not in text and "\r\n" in text:
        old, new = (re.sub("\r?\n", "\r\n", one) for one in (old, new))
    count = text.count(old)
    if not count:
        raise Wrong(misses(path, text, old))
    if count > 1:
        lines = ", ".join(map(str, places(text, old)))
        raise Wrong(f"old occurs {count} times in {shown(path)}, at lines {lines}: give more of the lines around it")
    at = text.index(old)
    changed = text[:at] + new + text[at + len(old) :]
    place.put(changed, mode)
    first = text.count("\n", 0, at) + 1
    return around(path, changed, first, first + new.count("\n"), room)


def misses(path: str, text: str, old: str) -> str:
    """Where the text is that was probably meant: it differs in white space alone."""
    wanted = "".join(split(old)[0].split())
    near = [number for number, line in enumerate(split(text), 1) if wanted and "".join(line.split()) == wanted]
    hint = f"; line {near[0]} differs from its first line in white space alone" if near else ": view the file, and give its text exactly"
    return f"old does not occur in {shown(path)}{hint}"


def places(text: str, old: str) -> list[int]:
    at = -1
    found: list[int] = []
    while len(found) < 20:
        at = text.find(old, at + 1)
        if at < 0:
            break
        found.append(text.count("\n", 0, at) + 1)
    return found


def insert(path: str, line: int, text: str, room: int) -> str:
    place = Place(path)
    before, mode = place.text()
    lines = split(before)
    if line > len(lines):
        raise Wrong(f"{shown(path)} has {len(lines)} lines: line is from 0 (its beginning) to {len(lines)}")
    if "\r\n" in before:
        text = re.sub("\r?\n", "\r\n", text)
    end = "\r\n" if "\r\n" in before else "\n"
    if text and not text.endswith("\n"):
        text += end
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += end
    changed = "".join(lines[:line]) + text + "".join(lines[line:])
    place.put(changed, mode)
    return around(path, changed, line + 1, line + max(1, text.count("\n")), room)


def around(path: str, text: str, first: int, last: int, room: int) -> str:
    """What a file looks like where it was changed."""
    lines = split(text)
    if not lines:
        return f"{shown(path)} is empty now"
    first, last = max(1, min(first, len(lines)) - AROUND), min(len(lines), last + AROUND)
    return f"{shown(path)} is changed:\n{numbered(lines, first, last, room - 400)[0]}"


class Search:
    """Matches so far, within bounds; what a bound has left out is said."""

    def __init__(self, pattern: str, regex: bool, files: str) -> None:
        try:
            self.find = re.compile(pattern if regex else re.escape(pattern)).search
        except (re.error, OverflowError, RecursionError) as error:
            raise Wrong(f"pattern is no regular expression: {str(error)[:200]}; leave regex out to search for the text as it is") from None
        self.files = files
        self.lines: list[str] = []
        self.left_out: set[str] = set()
        self.matched = self.looked_at = self.entries = self.read = 0

    def folder(self, fd: int, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.left_out.add(f"folders deeper than {MAX_DEPTH}")
            return
        with os.scandir(fd) as entries:
            found = []
            for entry in entries:
                self.entries += 1
                if self.entries > MAX_ENTRIES:
                    self.left_out.add(f"all but the first {MAX_ENTRIES} entries")
                    break
                found.append((entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)))
        for name, is_folder, is_file in sorted(found):
            inner = path + "/" + name if path else name
            try:
                if is_folder and name != ".git":
                    below = os.open(name, FOLDER, dir_fd=fd)
                    try:
                        self.folder(below, inner, depth + 1)
                    finally:
                        os.close(below)
                elif is_file and fnmatch.fnmatch(name, self.files or "*"):
                    self.file(os.open(name, FILE, dir_fd=fd), inner)
            except OSError:
                self.left_out.add("what cannot be opened")
            if len(self.lines) >= MAX_MATCHES:
                return

    def file(self, fd: int, path: str) -> None:
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                return
            if about.st_size > MAX_BYTES or self.read + about.st_size > MAX_READ:
                self.left_out.add("large files")
                return
            data = file.read(MAX_BYTES)
        self.read += len(data)
        if b"\0" in data[:4096]:
            return
        self.looked_at += 1
        hit = False
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if self.find(line):
                hit = True
                if len(self.lines) >= MAX_MATCHES:
                    self.left_out.add(f"matches after the first {MAX_MATCHES}")
                    break
                line = line.strip("\r")
                line = line if len(line) <= MAX_LINE else line[:MAX_LINE] + " ..."
                self.lines.append(f"{shown(path)}:{number}: {line}")
        self.matched += hit

    def said(self, room: int) -> str:
        parts: list[str] = []
        used = 0
        for line in self.lines:
            used += len(line) + 1
            if used > room - 200:
                break
            parts.append(line)
        count = f"{len(self.lines)} matches in {self.matched} of {self.looked_at} files"
        more = "" if len(parts) == len(self.lines) else f"; {len(parts)} shown: narrow it with path, files or a longer pattern"
        left_out = "; not searched: {}".format(", ".join(sorted(self.left_out))) if self.left_out else ""
        return "\n".join([*parts, count + more + left_out])


def search(pattern: str, path: str, files: str, regex: bool, room: int) -> str:
    if not pattern:
        raise Wrong("pattern is empty")
    place = Place(path)
    looked = Search(pattern, regex, files)
    try:
        if stat.S_ISDIR(place.kind()):
            looked.folder(place.opened(place.name, FOLDER), "/".join(named(path)), 0)
        else:
            looked.file(place.opened(place.name, FILE), "/".join(named(path)))
    except Late:
        looked.left_out.add("what was left when the time was up")
    return looked.said(room)


OPERATIONS: dict[str, Callable[..., str]] = {"view": view, "create": create, "replace": replace, "insert": insert, "search": search}


def late(*_: object) -> NoReturn:
    raise Late


def main(operation: str, seconds: float, arguments: dict[str, Any]) -> NoReturn:
    """Prints what the operation gives, and ends with 0; or why it cannot be done, and ends with 1."""
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        text, status = OPERATIONS[operation](**arguments), 0
    except Wrong as error:
        text, status = f"error: {operation}: {error}", 1
    except (OSError, ValueError) as error:  # names that are none, a full disk
        text, status = "error: {}: {}".format(operation, getattr(error, "strerror", None) or "a name or text that cannot be written"), 1
    except Late:
        text, status = f"error: {operation}: not done within {seconds:g} s", 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.flush()
    sys.exit(status)
