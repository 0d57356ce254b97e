"""The files of the pages, which the wheel carries: plain JavaScript modules and CSS. They load nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from agentrl.observe.markup import COMPONENTS

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FOLDERS = (files("agentrl.view") / "static", COMPONENTS)
_FILES = {entry.name: entry for folder in _FOLDERS for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES}
NAMES = tuple(sorted(_FILES))
"""Names of all files."""


@cache
def read(name: str) -> bytes:
    """Returns the content of a file. Raises `KeyError` for an unknown name."""
    return _FILES[name].read_bytes()


def media_type(name: str) -> str:
    """Returns the media type of a file."""
    return _TYPES[name.rpartition(".")[2]]
