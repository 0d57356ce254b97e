"""Files that somebody else may have written: run folders, suites, traces, models. They are regular, bounded, and where they say they are.

A pipe would wait for ever, a device never end, and a link show what its reader alone may read. What is wrong is a `ValueError`, which
quotes nothing of the file; what the system says is its own `OSError`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def opened(path: Path, *, inside: Path | None = None) -> Iterator[BinaryIO]:
    """A file, open for reading.

    Args:
        inside: the folder that it must be in, links followed. None: links may lead anywhere, as for a path that a person has typed.

    Raises `ValueError` for what is no regular file, or in another folder.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # looks, and opens no device or pipe
    try:
        mode = os.fstat(found).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise ValueError("is no regular file")
        real = Path(os.readlink(f"/proc/self/fd/{found}"))
        if inside is not None and not real.is_relative_to(inside.resolve()):
            raise ValueError(f"is a link to a file outside of {inside}")
        try:
            file = open(f"/proc/self/fd/{found}", "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(found)
    with file:
        yield file


def content(path: Path, *, most: int, inside: Path | None = None) -> bytes:
    """The bytes of a file. Raises `ValueError` for more than `most`, and what `opened` raises."""
    with opened(path, inside=inside) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"is larger than {most >> 20} MiB" if most >> 20 else f"is larger than {most >> 10} KiB")
    return data
