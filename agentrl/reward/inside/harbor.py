"""Runs the tests of a folder as Harbor knows them, and says on its own stdout what they left as the reward.

    python3 -I -B -c SOURCE     stdin: {"secret", "tests": {path: base64}, "written": [path], "removed": [path]}

The working directory holds what the image put there and, on top, what the agent left. Standard library only, Python 3.9 or later.
This process runs none of the code under test and cannot be read by it, but it can be killed by it: then there is no report. The
reward is a file, though, and whatever runs in this sandbox can write it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import stat
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HOME, TESTS, EMPTY = "/home/agent", "/tmp/tests", "/tmp/home"
VERDICT = ("tmp", "logs", "verifier")
LONGEST = 65536
PROGRAM_STARTS = (b"#!", b"\x7fELF")


def place(tests: dict[str, str]) -> None:
    for path, text in tests.items():
        target = os.path.join(TESTS, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(base64.b64decode(text))
        os.chmod(target, 0o755 if target.endswith(".sh") else 0o644)


def settle(written: Sequence[str], removed: Sequence[str]) -> None:
    """Files came without modes, so programs are made executable again; what the agent removed is removed from what the image put there."""
    for path in written:
        with contextlib.suppress(OSError), open(os.path.join(HOME, path), "rb") as file:
            if file.read(4).startswith(PROGRAM_STARTS):
                os.fchmod(file.fileno(), 0o755)
    for path in removed:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(HOME, path))


def left(name: str) -> str | None:
    """A file in the place of the verdict, reached without following links; None where there is no regular file of modest size."""
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in VERDICT:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = deeper
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(LONGEST + 1)
        return data.decode("utf-8", "replace") if len(data) <= LONGEST else None
    except OSError:
        return None
    finally:
        os.close(fd)


def main() -> None:
    request: dict[str, Any] = json.loads(sys.stdin.read())
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE
        raise OSError("prctl")
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.set_inheritable(report.fileno(), False)
    os.dup2(2, 1)
    place(request["tests"])
    settle(request["written"], request["removed"])
    os.mkdir(EMPTY)  # nothing that the agent left is where programs look for files to start with
    environment = {**os.environ, "HOME": EMPTY, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    status = subprocess.call(["bash", "/tests/test.sh"], cwd=HOME, stdin=subprocess.DEVNULL, env=environment)
    said = {"exit": status, "txt": left("reward.txt"), "json": left("reward.json")}
    report.write(f"{request['secret']} {json.dumps(said)}\n")
    report.close()


main()
