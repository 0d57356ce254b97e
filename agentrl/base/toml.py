"""Parses TOML of third parties with one kind of error. `tomllib` has three, and takes quadratic time for long keys."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_LEVELS = 64
"""Largest number of parts of a dotted key: `a.b.c` has three."""

_BITS = 63  # and the sign
_TEXT = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|#[^\n]*", re.DOTALL)
_KEY = re.compile(r"[\w-]+(?:[ \t]*\.[ \t]*[\w-]+)*")


def loads(text: str) -> dict[str, Any]:
    """Parses a TOML text. Raises `ValueError`, also for deep nesting and for very long numbers."""
    longest = max((key.count(".") for key in _KEY.findall(_TEXT.sub("x", text))), default=0) + 1
    if longest > MAX_LEVELS:
        raise ValueError(f"has a key of {longest} parts; it may have {MAX_LEVELS}")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None
    if _too_long(tables):
        raise ValueError("contains a whole number of more than 64 bits, which TOML does not have")
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
