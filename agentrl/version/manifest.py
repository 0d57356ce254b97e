"""Content hashes of files and folders: what proves that the weights served are the weights that were published."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read in pieces. Raises `OSError` when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_manifest(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every regular file below `folder`, in sorted order. Links are not followed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
