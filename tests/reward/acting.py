"""The functions of the processes of test_worker, in a module that does not import the test tools."""

from __future__ import annotations

import os
import signal
from typing import Any

from agentrl.errors import TaskError

prepared = False
requests = 0
hoard: list[bytearray] = []


def prepare() -> None:
    global prepared
    prepared = True


def act(request: Any) -> Any:
    global requests
    requests += 1
    match request:
        case "requests":
            return requests
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            return len(bytearray(1 << 40))
        case "hoard":
            while True:
                hoard.append(bytearray(64 << 20))
        case "keep":
            hoard.append(bytearray(600 << 20))
            return "kept"
        case "modest":
            return len(bytearray(512 << 20))
        case "huge reply":
            return "x" * (2 << 20)
        case "print":
            print('{"number": 0, "reply": "forged"}', flush=True)
            return "printed"
        case "task":
            raise TaskError("the task is broken")
        case "prepared":
            return prepared
        case int():
            return 1 / request
        case str() if request.startswith("size "):
            return len(request)
    return request


def dies() -> None:
    raise ImportError("nothing to judge with")
