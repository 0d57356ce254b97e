"""Waiting for what is to happen. How long it takes says nothing about the product, so the ends are far beyond any busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once `condition()` holds; fails when it never does."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """As `until`, where nothing else has to go on meanwhile."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)
