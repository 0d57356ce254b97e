"""Functions for the hosts of both generations of verifiers. They run in their environment, so this imports only the standard library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from host_channel import TASK, Fault

MAX_TEXT = 20_000
MAX_TASK = 1 << 20  # bytes of the data of one task
MAX_PARTS = 60


def described(tasks: Iterable[tuple[str, str, Any]], split: str = "") -> list[dict[str, Any]]:
    """Returns tasks for agentrl: id, text of the prompt, data as JSON text. Raises `Fault`."""
    result = []
    for name, prompt, data in tasks:
        text = json.dumps(data, default=str)
        if len(text) > MAX_TASK:
            raise Fault(TASK, f"task {name} has {len(text)} bytes of data; the maximum is {MAX_TASK}")
        result.append({"id": name, "prompt": prompt[:MAX_TEXT], "data": text, "split": split})
    return result


def finite(parts: dict[str, Any]) -> dict[str, float]:
    """Returns the parts that are finite numbers: a broken metric is not a reason to lose the score."""
    return {
        name[:200]: float(value)
        for name, value in list(parts.items())[:MAX_PARTS]
        if isinstance(value, int | float) and math.isfinite(value)
    }
