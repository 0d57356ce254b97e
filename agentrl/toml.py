"""TOML that somebody else may have written: data, or one kind of error. `tomllib` has three."""

from __future__ import annotations

import tomllib
from typing import Any


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises `ValueError`, also for what is nested too deeply and for numbers too long to be read."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None
