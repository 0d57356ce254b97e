"""The files of the pages, which the wheel carries: plain JavaScript modules and CSS. They load nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
NAMES = tuple(sorted(entry.name for entry in (files("agentrl.view") / "static").iterdir() if entry.name.rpartition(".")[2] in _TYPES))
"""Names of all files."""


@cache
def read(name: str) -> bytes:
    """Returns the content of a file. Raises `KeyError` for an unknown name."""
    if name not in NAMES:
        raise KeyError(name)
    return (files("agentrl.view") / "static" / name).read_bytes()


def media_type(name: str) -> str:
    """Returns the media type of a file."""
    return _TYPES[name.rpartition(".")[2]]
