"""Detects calls that block on the thread of an event loop: databases, file locks, syncs, and records of versions.

A process that is stopped while it holds a lock must not stop the loop that detects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import os
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import agentrl
from agentrl.version import FolderRegistry

PACKAGE = str(Path(agentrl.__file__).parent)
_LOCKS = (f"{PACKAGE}/base/run_lock.py", f"{PACKAGE}/base/scratch.py")  # locks for which nothing waits while a driver runs
_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class BlockingCalls:
    """Counts blocking calls by kind, and records the stack of those that a coroutine or a callback of agentrl makes on its loop's thread.

    Functions that a test itself calls do not count.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        self.on_loop: list[str] = []
        calls = self

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> Any:
                calls.record("database")
                return super().execute(*args)

        connect = sqlite3.connect
        patch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **{"factory": Connection, **options}))
        for module, name, kind in ((os, "fsync", "sync"), (fcntl, "flock", "lock"), (FolderRegistry, "_read", "version")):
            patch.setattr(module, name, self.counted(kind, getattr(module, name)))

    def counted(self, kind: str, function: Any) -> Any:
        """Returns the function with its calls counted."""

        def call(*args: Any, **options: Any) -> Any:
            self.record(kind)
            return function(*args, **options)

        return call

    def record(self, kind: str) -> None:
        """Counts a call."""
        self.calls[kind] += 1
        if asyncio._get_running_loop() is None:
            return
        frames = list(_frames(sys._getframe(1)))
        own = [frame for frame in takewhile(lambda frame: frame.f_code.co_filename.startswith(PACKAGE), frames)]
        caller = frames[len(own)].f_code.co_filename if len(own) < len(frames) else ""
        waits = any(frame.f_code.co_flags & _ASYNCHRONOUS for frame in own) or "/asyncio/" in caller
        if own and waits and own[0].f_code.co_filename not in _LOCKS:
            self.on_loop.append(f"{kind}: " + "".join(traceback.format_stack(own[0], limit=5)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a call, without those of this module and of context managers."""
    while frame is not None:
        if frame.f_code.co_filename not in (__file__, contextlib.__file__):
            yield frame
        frame = frame.f_back
