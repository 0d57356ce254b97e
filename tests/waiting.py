"""Waiting for a condition. The deadlines are long, because a busy machine must not fail a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns when `condition()` is true. Fails after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """As `until`, but blocks the thread."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)
