"""Cancellation of work in threads: a thread cannot be cancelled from outside, so it checks whether its caller was.

Without this, a run interrupted while an image is being built would end only with the build, many minutes later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from agentrl.errors import SandboxError

_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


@contextlib.contextmanager
def propagate_cancellation() -> Iterator[None]:
    """Put around an `await asyncio.to_thread(...)`: when the block raises, `raise_if_cancelled` raises in that thread."""
    event = threading.Event()
    token = _cancelled.set(event)
    try:
        yield
    except BaseException:
        event.set()
        raise
    finally:
        _cancelled.reset(token)


def raise_if_cancelled() -> None:
    """Raises `SandboxError` when the caller that waits for this thread was cancelled."""
    event = _cancelled.get()
    if event is not None and event.is_set():
        raise SandboxError("cancelled")
