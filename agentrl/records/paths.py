"""Paths of output files, relative to the working directory, and patterns for such paths."""

from __future__ import annotations

MAX_DEPTH = 32
MAX_PATH = 512


def is_plain_path(path: str) -> bool:
    """Whether `path` is relative and valid in a sandbox: limited in length, and without empty, `.` or `..` parts."""
    parts = path.split("/")
    if len(parts) > MAX_DEPTH or len(path) > MAX_PATH or "\0" in path or any(part in ("", ".", "..") for part in parts):
        return False
    return path.isascii() or path.encode("utf-8", "replace").decode() == path  # a record cannot contain a name that is not valid UTF-8


def pattern_error(pattern: str) -> str:
    """Returns the error in a pattern; empty if the pattern is valid."""
    if not is_plain_path(pattern):
        return "is not a plain path relative to the working directory"
    if any("**" in part and part != "**" for part in pattern.split("/")):
        return "contains ** inside a name, but ** stands for folders, as in src/**"
    return "contains [ or ], which are not supported; use * and ?" if "[" in pattern or "]" in pattern else ""
