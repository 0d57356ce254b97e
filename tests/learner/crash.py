"""The worker, killed at a chosen point: `crash.py POINT --run-dir DIR`, under torchrun.

Points: `commit`; `publish-N`; for a learner with a mirror `before-CALL`, `after-CALL` (its calls are in `CALLS`) and `chunk-N`, before the
Nth chunk is sent.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from agentrl.cluster.link import Link
from agentrl.experience import SqliteStore
from agentrl.learner import main, worker
from agentrl.learner.remote_access import RemoteAccess, RemoteRegistry, RemoteStore

CALLS: dict[str, type] = {
    "record_uses": RemoteAccess,
    "checkpoint_written": RemoteAccess,
    "commit": RemoteStore,
    "version_written": RemoteAccess,
    "add": RemoteRegistry,
    "prune": RemoteRegistry,
}
_publish, _request = worker.publish_version, Link.request


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _publish_or_die(*args: Any, number: int, **kwargs: Any) -> None:
    if number == fatal:
        _die()
    _publish(*args, number=number, **kwargs)


def _die_around(when: str, name: str) -> None:
    real = getattr(CALLS[name], name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            _die()
        result = real(*args, **kwargs)
        _die()
        return result

    setattr(CALLS[name], name, call)


def _request_or_die(self: Link, method: str, *args: Any, **kwargs: Any) -> Any:
    global fatal
    if method == "PUT":
        fatal -= 1
        if fatal < 0:
            _die()
    return _request(self, method, *args, **kwargs)


point = sys.argv.pop(1)
when, _, name = point.partition("-")
fatal = int(name) if name.isdecimal() else -1
if point == "commit":
    SqliteStore.commit = _die  # type: ignore[method-assign]
if when in ("before", "after"):
    _die_around(when, name)
if when == "chunk":
    Link.request = _request_or_die  # type: ignore[method-assign]
worker.publish_version = _publish_or_die if when == "publish" else _publish
sys.exit(main.main())
