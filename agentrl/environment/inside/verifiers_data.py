"""Functions for the hosts of both verifiers generations, 0.3 and 0.4. The hosts run in the environment of verifiers, so this module imports
only the standard library and `host_channel`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from host_channel import TASK, Fault

MAX_TEXT = 20_000
MAX_TASK = 1 << 20  # maximum size of the data of one task, in bytes
MAX_PARTS = 60
LARGEST = 1e300  # a number above it may not fit into a float


def described(tasks: Iterable[tuple[str, str, Any]], split: str = "") -> list[dict[str, Any]]:
    """Converts tasks (id, prompt text, data) to dictionaries for agentrl, with the prompt cut to `MAX_TEXT` characters and the data as JSON
    text. Raises `Fault` if the data of a task are too large."""
    result = []
    for name, prompt, data in tasks:
        text = json.dumps(data, default=str)
        if len(text) > MAX_TASK:
            raise Fault(TASK, f"task {name} has {len(text)} bytes of data; the maximum is {MAX_TASK}")
        result.append({"id": name, "prompt": prompt[:MAX_TEXT], "data": text, "split": split})
    return result


def finite(parts: dict[str, Any]) -> dict[str, float]:
    """Returns those of the first `MAX_PARTS` parts that are finite numbers up to `LARGEST`. Other parts are dropped, so that a broken
    metric does not invalidate the score."""
    return {
        name[:200]: float(value)
        for name, value in list(parts.items())[:MAX_PARTS]
        if isinstance(value, int | float) and abs(value) <= LARGEST
    }
