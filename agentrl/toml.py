"""TOML that somebody else may have written: data, or one kind of error. `tomllib` has three, and takes quadratic time for long keys."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_LEVELS = 64
"""Most parts of a dotted key: `a.b.c` has three."""

_TEXT = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|#[^\n]*", re.DOTALL)
_KEY = re.compile(r"[\w-]+(?:[ \t]*\.[ \t]*[\w-]+)*")


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `ValueError`, also for what is nested too deeply and for numbers too long to be read."""
    longest = max((key.count(".") for key in _KEY.findall(_TEXT.sub("x", text))), default=0) + 1
    if longest > MAX_LEVELS:
        raise ValueError(f"has a key of {longest} parts; it may have {MAX_LEVELS}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None
