"""The worker, killed at a chosen point: `crash.py commit|publish-N --run-dir DIR`, under torchrun."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from agentrl.experience import SqliteStore
from agentrl.learner import main, worker

_publish = worker.publish_version


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _publish_or_die(*args: Any, number: int, **kwargs: Any) -> None:
    if number == fatal:
        _die()
    _publish(*args, number=number, **kwargs)


point = sys.argv.pop(1)
fatal = int(point.partition("-")[2] or -1)
if point == "commit":
    SqliteStore.commit = _die  # type: ignore[method-assign]
worker.publish_version = _publish_or_die
sys.exit(main.main())
