"""Runs tests that share a process or a sandbox with the code under test, and reports their results on stdout.

    python3 -I -B -c SOURCE   in the working directory, with tests/ and work/ in it; stdin: {"secret", "mode", "child", "files"}

Standard library only, Python 3.9 or later. This process executes no code under test. The code under test can kill this process, but then no
test passes. It cannot read the memory or the open files of this process, because the process is not dumpable.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import secrets
import select
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HOME = "/home/agent"
LONGEST = 1 << 20


def shell(request: dict[str, Any]) -> dict[str, str]:
    """Runs tests/test.sh, which passes if it exits with 0. The script is passed as a string, so it cannot be changed while it runs."""
    with open(os.path.join(HOME, "tests", "test.sh"), encoding="utf-8") as file:
        script = file.read()
    status = subprocess.call(["bash", "-c", script, "test.sh"], cwd=os.path.join(HOME, "work"), stdin=subprocess.DEVNULL)
    return {"test.sh": "" if status == 0 else f"exit code {status}"}


def pytest(request: dict[str, Any]) -> dict[str, str]:
    """Runs pytest. Reports on individual tests arrive through a pipe, each signed with a key that only the reporting plugin has."""
    key = secrets.token_bytes(32)
    receive, send = os.pipe()
    command = [sys.executable, "-I", "-B", "-c", request["child"], str(send), *request["files"]]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[send], cwd=os.path.join(HOME, "work"), env=environment)
    os.close(send)
    assert child.stdin is not None
    child.stdin.write(key)
    child.stdin.close()
    output = b""
    while True:
        ended = child.poll() is not None
        while len(output) < LONGEST and select.select([receive], [], [], 0 if ended else 0.02)[0]:
            data = os.read(receive, 65536)
            if not data:
                break
            output += data
        if ended:
            return reports(output, key)


def reports(output: bytes, key: bytes) -> dict[str, str]:
    """Returns a mapping from each test to its error, or to "" if it passed. A line with an invalid signature counts as a failed test."""
    results: dict[str, str] = {}
    for line in output.splitlines():
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, hmac.new(key, text, hashlib.sha256).hexdigest().encode()):
            results["forged"] = "a report that the tests did not write"
            continue
        fields = json.loads(text)
        if fields["error"] or fields["test"] not in results:
            results[fields["test"]] = fields["error"]
    return results


def main() -> None:
    """Runs the tests and prints the signed report."""
    request = json.loads(sys.stdin.read())
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE
        raise OSError("prctl")
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.set_inheritable(report.fileno(), False)
    os.dup2(2, 1)
    tests = shell(request) if request["mode"] == "shell" else pytest(request)
    report.write(f"{request['secret']} {json.dumps({'tests': tests})}\n")
    report.close()


main()
