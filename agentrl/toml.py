"""TOML that somebody else may have written: data, or one kind of error, in time proportional to its length. `tomllib` promises neither."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_PARTS = 256
"""Most names in a dotted key: `tomllib` takes time proportional to the square of their number."""

_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+(?:{_PART}[ \t]*+\.[ \t]*+){{{MAX_PARTS}}}", re.MULTILINE)


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `ValueError`, also for what is nested too deep and for numbers too long to be read."""
    if _LONG_KEY.search(text):
        raise ValueError(f"is nested too deep to be read: a key of more than {MAX_PARTS} names")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None
