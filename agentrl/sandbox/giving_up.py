"""Telling a thread that makes an image that nobody waits for it any more: a thread cannot be cancelled, but it can look.

Without that a run that is interrupted while an image is built would end with the build, many minutes later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from agentrl.errors import SandboxError

_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around a wait for `asyncio.to_thread`, which takes this along: when the block raises, `look` raises in the thread."""
    event = threading.Event()
    token = _given_up.set(event)
    try:
        yield
    except BaseException:
        event.set()
        raise
    finally:
        _given_up.reset(token)


def look() -> None:
    """Raises `SandboxError` when whoever started this thread has given up waiting for it."""
    event = _given_up.get()
    if event is not None and event.is_set():
        raise SandboxError("given up")
