"""Folders that appear whole or not at all, also across a power cut: written beside, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.causes import disk_full
from agentrl.errors import DiskFull, LearnerError


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Around what writes to the run folder: raises `DiskFull` when there is no room, `LearnerError` when the disk refuses otherwise.

    Only some of the libraries that write here say it with an `OSError`.
    """
    try:
        yield
    except Exception as error:
        if disk_full(error) is not None:
            raise DiskFull(f"no room to write {what}") from error
        if isinstance(error, OSError):
            raise LearnerError(f"cannot write {what}: {error.strerror or error}") from error
        raise


def part_folder(final: Path) -> Path:
    """An empty folder beside `final` to fill; what an interrupted attempt left there is removed."""
    part = final.with_name(f".{final.name}.part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def commit_folder(part: Path, final: Path) -> None:
    """Gives a filled `part_folder` its final name. A folder of that name is replaced."""
    for path in sorted(part.rglob("*")):
        _sync(path)
    _sync(part)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
