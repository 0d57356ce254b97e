"""Folders that appear whole or not at all, also across a power cut: written beside, synced, renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
