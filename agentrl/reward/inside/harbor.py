"""Runs the tests of a Harbor task folder. Reports on stdout the reward that the tests wrote to a file.

    python3 -I -B -c SOURCE     stdin: {"secret", "tests": {path: base64}, "written": [path], "removed": [path]}

The working directory contains the image's files and the agent's changes. Standard library only, Python 3.9 or later. This process executes
no code under test. The code under test can kill this process, which prevents a report, but it cannot read the memory of this process. The
reward is a file that any program in this sandbox can write.
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


def write_tests(tests: dict[str, str]) -> None:
    """Writes the tests (path -> base64) to /tmp/tests."""
    for path, text in tests.items():
        target = os.path.join(TESTS, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(base64.b64decode(text))
        os.chmod(target, 0o755 if target.endswith(".sh") else 0o644)


def restore(written: Sequence[str], removed: Sequence[str]) -> None:
    """Makes programs executable, because files arrive without modes, and removes the image's files that the agent removed."""
    for path in written:
        with contextlib.suppress(OSError), open(os.path.join(HOME, path), "rb") as file:
            if file.read(4).startswith(PROGRAM_STARTS):
                os.fchmod(file.fileno(), 0o755)
    for path in removed:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(HOME, path))


def read_reward_file(name: str) -> str | None:
    """Returns the content of a regular file of at most `LONGEST` bytes in the reward folder, or None if there is no such file.

    Does not follow links.
    """
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
    """Runs tests/test.sh and prints its exit code and the reward files."""
    request: dict[str, Any] = json.loads(sys.stdin.read())
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE
        raise OSError("prctl")
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.set_inheritable(report.fileno(), False)
    os.dup2(2, 1)
    write_tests(request["tests"])
    restore(request["written"], request["removed"])
    os.mkdir(EMPTY)  # so that programs find no start-up files of the agent
    environment = {**os.environ, "HOME": EMPTY, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    status = subprocess.call(["bash", "/tests/test.sh"], cwd=HOME, stdin=subprocess.DEVNULL, env=environment)
    reply = {"exit": status, "txt": read_reward_file("reward.txt"), "json": read_reward_file("reward.json")}
    report.write(f"{request['secret']} {json.dumps(reply)}\n")
    report.close()


main()
