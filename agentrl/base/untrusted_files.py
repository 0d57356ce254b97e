"""Opens files that a third party may have written: run folders, suites, traces, models. Only regular, bounded files are read.

A pipe could block forever, a device could return data without end, and a link could expose a file that only the user may read. A rejected
file raises `ValueError`, whose message does not quote the file. System errors are raised as `OSError`.

This module also parses third-party TOML. Its parser raises only `ValueError`, whereas `tomllib` raises three kinds of errors and takes
quadratic time for long keys.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_NAME_BYTES, _PATH_BYTES = 255, 4095  # limits of Linux file systems


@contextmanager
def open_file(path: Path, *, inside: Path | None = None) -> Iterator[BinaryIO]:
    """Opens a file for reading.

    Args:
        inside: the folder that must contain the file after links are followed. None allows any target; use it for a path that a user typed.

    Raises `ValueError` if the path is a device, a pipe or a socket, or is outside `inside`, and `OSError` if it is a folder or missing.
    """
    with _checked(path, inside) as handle:
        try:
            file = open(f"/proc/self/fd/{handle}", "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    with file:
        yield file


def check_file(path: Path, *, inside: Path) -> None:
    """Raises the errors that `open_file` would raise, but does not open the file.

    Use this function for files that SQLite may use in this process, because closing a descriptor of a file releases all locks that the
    process holds on the file.
    """
    with _checked(path, inside):
        pass


def check_output(path: Path, *, inside: Path) -> None:
    """Raises `ValueError`, or `IsADirectoryError` for a folder, unless `path` is a regular file below `inside`, or can become one, after
    links are followed.

    Use this function for files that are written in a third-party folder, where a link could redirect a write to another of the user's
    files, and a pipe could block it forever.
    """
    if not path.parent.resolve().is_relative_to(inside.resolve()):
        raise ValueError(f"is in a folder that is a link to a folder outside {inside}")
    try:
        check_file(path, inside=inside)
    except FileNotFoundError:
        if path.is_symlink():
            raise ValueError("is a link to a file that does not exist") from None


@contextmanager
def _checked(path: Path, inside: Path | None) -> Iterator[int]:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)  # does not open a device or pipe, and closing it keeps all locks
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise ValueError("is not a regular file")
        real = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if inside is not None and not real.is_relative_to(inside.resolve()):
            raise ValueError(f"is a link to a file outside {inside}")
        yield handle
    finally:
        os.close(handle)


def read_bytes(path: Path, *, most: int, inside: Path | None = None) -> bytes:
    """Returns the bytes of a file. Raises `ValueError` if there are more than `most` bytes, and the errors that `open_file` raises."""
    with open_file(path, inside=inside) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"is larger than {most >> 20} MiB" if most >> 20 else f"is larger than {most >> 10} KiB")
    return data


def resolve_inside(text: str, under: Path) -> Path | None:
    """Resolves a path that a third party wrote, relative to the folder `under`. The result may be outside `under`.

    Returns None if the path contains control characters or surrogates, if a name or the path is too long, or if its links form a loop.
    """
    try:
        raw = text.encode()
        if any(byte < 0x20 or byte == 0x7F for byte in raw) or len(raw) > _PATH_BYTES:
            return None
        if any(len(name) > _NAME_BYTES for name in raw.split(b"/")):
            return None
        return (under / text).resolve()
    except (OSError, RuntimeError, ValueError):  # raised also for a loop of links, or bytes that are not text
        return None


MAX_LEVELS = 64
"""Maximum number of parts in a dotted key. For example, `a.b.c` has three."""

_BITS = 63  # in addition to the sign
_TEXT = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|#[^\n]*", re.DOTALL)
_KEY = re.compile(r"[\w-]+(?:[ \t]*\.[ \t]*[\w-]+)*")


def loads(text: str) -> dict[str, Any]:
    """Parses a TOML document. Raises `ValueError` if the text is not TOML, is nested too deeply or contains an integer of more than 64
    bits."""
    longest = max((key.count(".") for key in _KEY.findall(_TEXT.sub("x", text))), default=0) + 1
    if longest > MAX_LEVELS:
        raise ValueError(f"has a key with {longest} parts; the maximum is {MAX_LEVELS}")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None
    if _too_long(tables):
        raise ValueError("contains an integer of more than 64 bits, which TOML does not allow")
    return tables


def _too_long(tables: dict[str, Any]) -> bool:
    """Whether an integer exceeds 64 bits (https://toml.io/en/v1.0.0#integer), which `tomllib` accepts."""
    left: list[Any] = [tables]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and value.bit_length() > _BITS and value != -1 << _BITS:
            return True
    return False
