"""Views, changes and searches files in the working directory. Prints the text that the agent sees.

Each part of a path is opened relative to its parent folder, without following links. Files are replaced atomically and keep their mode.
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
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

MAX_BYTES = 4 << 20  # maximum size of a file
MAX_ENTRIES = 20000  # of folders, in one search or listing
MAX_DEPTH = 32
MAX_READ = 64 << 20  # bytes that one search reads
MAX_MATCHES = 1000
MAX_LINE = 240  # characters of a line in a search result
CONTEXT = 3  # lines shown before and after a change
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OperationError(Exception):
    """An operation cannot be performed. The message states the reason and the fix."""


class TimeUp(BaseException):
    """The time limit of an operation has passed. Derives from `BaseException`, so that no handler in between catches it."""


def parts_of(path: str) -> list[str]:
    """Returns the parts of `path` relative to the working directory; empty for the working directory itself. Raises `OperationError` if the
    path is invalid or outside the working directory."""
    top = os.getcwd()
    if path == top or path.startswith(top + "/"):
        path = path[len(top) + 1 :]
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or ".." in names:
        raise OperationError(f"{printable(path)} is outside the working directory {top}: give a path below it, such as src/main.py")
    if "\0" in path or len(names) > MAX_DEPTH:
        raise OperationError(f"{printable(path)} is not a valid path: it contains NUL, or more than {MAX_DEPTH} names")
    return names


def printable(name: str) -> str:
    """Returns the first 300 characters of a name or path as one printable line."""
    name = os.fsencode(name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in name[:300]) or "''"


class OpenPath:
    """A path with its parent folder open: `name` is the last part of the path, relative to the folder's descriptor `fd`. `create` creates
    missing parent folders. The constructor raises `OperationError` if a parent folder cannot be opened."""

    def __init__(self, path: str, create: bool = False) -> None:
        self.path = path
        names = parts_of(path)
        self.name = names[-1] if names else "."
        self.fd = os.open(".", FOLDER)
        for name in names[:-1]:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.fd)
            inner = self.open(name, FOLDER)
            os.close(self.fd)
            self.fd = inner

    def open(self, name: str, flags: int) -> int:
        """Opens the file or folder `name` in the folder `self.fd`, and returns its descriptor, which the caller must close. Raises
        `OperationError` if there is no such file or folder, or if it is a link or cannot be opened."""
        try:
            return os.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError:
            raise OperationError(f"no file or folder {printable(self.path)}{self._contents()}") from None
        except OSError as error:
            reason = str(error.strerror)
            with contextlib.suppress(OSError):
                if stat.S_ISLNK(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                    reason = "it is a link, and links are not followed: give the file that it points to"
            raise OperationError(f"{printable(name)} in {printable(self.path)} cannot be opened: {reason}") from None

    def _contents(self) -> str:
        """Returns a description of the folder's contents to append to a message; empty if the folder cannot be read."""
        try:
            names = sorted(os.listdir(self.fd))[:20]
        except OSError:
            return ""
        return "; the folder contains: {}".format(", ".join(map(printable, names))) if names else "; its folder is empty"

    def mode(self) -> int:
        """Returns the mode of the path, without following links; 0 if the path does not exist."""
        try:
            return os.stat(self.name, dir_fd=self.fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    def read(self) -> tuple[str, int]:
        """Returns the text of the file, and its mode. Raises `OperationError` unless it is a regular UTF-8 file of at most `MAX_BYTES`."""
        fd = self.open(self.name, FILE)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise OperationError(f"{printable(self.path)} is not a regular file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise OperationError(f"{printable(self.path)} has more than {MAX_BYTES} bytes: search it, or read it with a program")
        try:
            return data.decode(), stat.S_IMODE(mode)
        except UnicodeDecodeError:
            raise OperationError(f"{printable(self.path)} is not UTF-8 text: read it with a program") from None

    def write(self, text: str, mode: int) -> None:
        """Writes a temporary file and renames it, so that a reader sees either the old file or the new one. Raises `OperationError` if the
        text has more than `MAX_BYTES` bytes."""
        data = text.encode("utf-8", "surrogateescape")
        if len(data) > MAX_BYTES:
            raise OperationError(f"the file would have more than {MAX_BYTES} bytes")
        temporary = f".{os.urandom(8).hex()}.agentrl"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                os.fchmod(fd, mode)
            os.rename(temporary, self.name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            os.unlink(temporary, dir_fd=self.fd)
            raise


def split_lines(text: str) -> list[str]:
    """Returns the lines with their line endings. Only a line feed ends a line."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def numbered(lines: list[str], first: int, last: int, limit: int) -> tuple[str, int]:
    """Returns as many of the lines `first` to `last` as fit into `limit` characters, with line numbers, and the number of the last line
    shown. Cuts line `first` if it does not fit."""
    parts: list[str] = []
    used, at = 0, first - 1
    while at < last:
        part = "{:6d}\t{}\n".format(at + 1, lines[at].rstrip("\r\n"))
        if used + len(part) > limit:
            if not parts:
                parts, at = [part[: max(limit, 1)] + " ... cut\n"], at + 1
            break
        parts.append(part)
        used, at = used + len(part), at + 1
    return "".join(parts), at


def view(path: str, start: int, end: int | None, limit: int) -> str:
    """Shows a text file with line numbers, or lists a folder."""
    target = OpenPath(path)
    if stat.S_ISDIR(target.mode()):
        return listing(target, limit)
    lines = split_lines(target.read()[0])
    if not lines:
        return f"{printable(path)} is empty"
    last = len(lines) if end is None else min(end, len(lines))
    if start > last:
        requested = f"from {start} to {'the end' if end is None else end}"
        raise OperationError(f"{printable(path)} has lines 1 to {len(lines)}: there are none {requested}")
    text, at = numbered(lines, start, last, limit - 120)
    if at < len(lines):
        text += f"lines {start} to {at} of {len(lines)}" + (f"; continue with start={at + 1}" if at < last else "")
    return text


def listing(target: OpenPath, limit: int) -> str:
    """Lists a folder: `/` marks folders, and `-> link` marks links."""
    names = []
    with os.scandir(target.open(target.name, FOLDER)) as entries:
        for entry in entries:
            names.append(printable(entry.name) + ("/" if entry.is_dir(follow_symlinks=False) else " -> link" if entry.is_symlink() else ""))
            if len(names) >= MAX_ENTRIES:
                break
    text = ""
    for number, name in enumerate(sorted(names)):
        if len(text) + len(name) > limit - 120:
            return text + f"... and {len(names) - number} more"
        text += name + "\n"
    return text or f"{printable(target.path)} is an empty folder"


def create(path: str, text: str, overwrite: bool, limit: int) -> str:
    """Writes a new file, or replaces an existing file if `overwrite` is set."""
    target = OpenPath(path, create=True)
    mode = target.mode()
    if mode and not stat.S_ISREG(mode):
        raise OperationError(f"{printable(path)} exists and is not a regular file")
    if mode and not overwrite:
        raise OperationError(f"{printable(path)} exists: change it with replace or insert, or give overwrite=true to replace it")
    target.write(text, stat.S_IMODE(mode) if mode else 0o644)
    return f"{printable(path)} has {len(split_lines(text))} lines now"


def replace(path: str, old: str, new: str, limit: int) -> str:
    """Replaces a string that occurs exactly once."""
    target = OpenPath(path)
    text, mode = target.read()
    if not old:
        raise OperationError("old is empty: give the text to be replaced, or use insert")
    if old == new:
        raise OperationError("old and new are the same: nothing would change")
    if "\r\n" in text and (old not in text or "\n" not in old):
        old, new = with_ends(old, "\r\n"), with_ends(new, "\r\n")
    count = text.count(old)
    if not count:
        wanted = "".join(split_lines(old)[0].split())
        near = [number for number, line in enumerate(split_lines(text), 1) if wanted and "".join(line.split()) == wanted]
        hint = f"; line {near[0]} differs from its first line in white space only" if near else ": view the file, and give its exact text"
        raise OperationError(f"old does not occur in {printable(path)}{hint}")
    if count > 1:
        at = -1
        numbers: list[str] = []
        while len(numbers) < 20 and (at := text.find(old, at + 1)) >= 0:
            numbers.append(str(text.count("\n", 0, at) + 1))
        lines = ", ".join(numbers)
        raise OperationError(f"old occurs {count} times in {printable(path)}, at lines {lines}: include more of the lines around it")
    at = text.index(old)
    changed = text[:at] + new + text[at + len(old) :]
    target.write(changed, mode)
    first = text.count("\n", 0, at) + 1
    return excerpt(path, changed, first, first + new.count("\n"), limit)


def with_ends(text: str, end: str) -> str:
    """Returns the text with all line endings replaced by `end`."""
    return re.sub("\r?\n", end, text)


def insert(path: str, line: int, text: str, limit: int) -> str:
    """Inserts lines after a line."""
    target = OpenPath(path)
    before, mode = target.read()
    lines = split_lines(before)
    if line > len(lines):
        raise OperationError(f"{printable(path)} has {len(lines)} lines: line must be from 0 (the beginning) to {len(lines)}")
    end = "\r\n" if "\r\n" in before else "\n"
    text = with_ends(text, end) if end == "\r\n" else text
    if text and not text.endswith("\n"):
        text += end
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += end
    changed = "".join(lines[:line]) + text + "".join(lines[line:])
    target.write(changed, mode)
    return excerpt(path, changed, line + 1, line + max(1, text.count("\n")), limit)


def excerpt(path: str, text: str, first: int, last: int, limit: int) -> str:
    """Shows the changed lines of a file, with context."""
    lines = split_lines(text)
    if not lines:
        return f"{printable(path)} is empty now"
    first, last = max(1, min(first, len(lines)) - CONTEXT), min(len(lines), last + CONTEXT)
    return f"{printable(path)} is changed:\n{numbered(lines, first, last, limit - 400)[0]}"


class Search:
    """Collects the matches of a search up to its limits, and records what the limits excluded. The constructor raises `OperationError` if
    the regular expression is invalid."""

    def __init__(self, pattern: str, regex: bool, files: str) -> None:
        try:
            self.find = re.compile(pattern if regex else re.escape(pattern)).search
        except (re.error, OverflowError, RecursionError) as error:
            message = f"pattern is not a valid regular expression: {str(error)[:200]}"
            raise OperationError(f"{message}; use regex=false to search for the text as it is") from None
        self.files = files
        self.lines: list[str] = []
        self.excluded: set[str] = set()
        self.matched_files = self.searched_files = self.entries = self.read = 0

    def folder(self, fd: int, path: str, depth: int) -> None:
        """Searches a folder and the folders below it. Skips links and `.git`."""
        if depth > MAX_DEPTH:
            self.excluded.add(f"folders deeper than {MAX_DEPTH}")
            return
        for name, is_folder, is_file in self.listed(fd):
            inner = path + "/" + name if path else name
            try:
                if is_folder and name != ".git":
                    below = os.open(name, FOLDER, dir_fd=fd)
                    try:
                        self.folder(below, inner, depth + 1)
                    finally:
                        os.close(below)
                elif is_file and fnmatch.fnmatch(name, self.files or "*"):
                    if len(self.lines) >= MAX_MATCHES:
                        self.excluded.add(f"files after the first {MAX_MATCHES} matches")
                        return
                    self.file(os.open(name, FILE, dir_fd=fd), inner)
            except OSError:
                self.excluded.add("what cannot be opened")

    def listed(self, fd: int) -> Iterable[tuple[str, bool, bool]]:
        """Returns the sorted entries of a folder: name, whether the entry is a folder, and whether it is a regular file."""
        entries = []
        with os.scandir(fd) as scanned:
            for entry in scanned:
                self.entries += 1
                if self.entries > MAX_ENTRIES:
                    self.excluded.add(f"all but the first {MAX_ENTRIES} entries")
                    break
                entries.append((entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)))
        return sorted(entries)

    def file(self, fd: int, path: str) -> None:
        """Searches a file. Skips binary files, and records large files as excluded."""
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            if status.st_size > MAX_BYTES or self.read + status.st_size > MAX_READ:
                self.excluded.add("large files")
                return
            data = file.read(MAX_BYTES)
        self.read += len(data)
        if b"\0" in data[:4096]:
            return
        self.searched_files += 1
        matched = False
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if self.find(line):
                self.matched_files += not matched
                matched = True
                if len(self.lines) >= MAX_MATCHES:
                    self.excluded.add(f"matches after the first {MAX_MATCHES}")
                    break
                line = line.strip("\r")
                line = line if len(line) <= MAX_LINE else line[:MAX_LINE] + " ..."
                self.lines.append(f"{printable(path)}:{number}: {line}")

    def report(self, limit: int) -> str:
        """Returns the matches that fit into `limit` characters, the match and file counts, and what was excluded, as text."""
        parts: list[str] = []
        used = 0
        for line in self.lines:
            used += len(line) + 1
            if used > limit - 200:
                break
            parts.append(line)
        count = f"{len(self.lines)} matches in {self.matched_files} of {self.searched_files} files"
        more = "" if len(parts) == len(self.lines) else f"; {len(parts)} shown: narrow it with path, files or a longer pattern"
        excluded = "; not searched: {}".format(", ".join(sorted(self.excluded))) if self.excluded else ""
        return "\n".join([*parts, count + more + excluded])


def search(pattern: str, path: str, files: str, regex: bool, limit: int) -> str:
    """Searches a file or folder. If the time is up, returns the matches so far."""
    if not pattern:
        raise OperationError("pattern is empty")
    target, results = OpenPath(path), Search(pattern, regex, files)
    try:
        if stat.S_ISDIR(target.mode()):
            results.folder(target.open(target.name, FOLDER), "/".join(parts_of(path)), 0)
        else:
            results.file(target.open(target.name, FILE), "/".join(parts_of(path)))
    except TimeUp:
        results.excluded.add("what remained when the time was up")
    return results.report(limit)


OPERATIONS: dict[str, Callable[..., str]] = {"view": view, "create": create, "replace": replace, "insert": insert, "search": search}


def raise_time_up(*_: object) -> NoReturn:
    """Raises `TimeUp` when the timer sends its signal."""
    raise TimeUp


def main(operation: str, seconds: float, arguments: dict[str, Any]) -> NoReturn:
    """Prints the result of an operation and exits with 0, or prints the error and exits with 1."""
    signal.signal(signal.SIGALRM, raise_time_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        text, status = OPERATIONS[operation](**arguments), 0
    except OperationError as error:
        text, status = f"error: {operation}: {error}", 1
    except (OSError, ValueError) as error:  # invalid names, a full disk
        text, status = "error: {}: {}".format(operation, getattr(error, "strerror", None) or "invalid name or text"), 1
    except TimeUp:
        text, status = f"error: {operation}: not done within {seconds:g} s", 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.flush()
    sys.exit(status)
