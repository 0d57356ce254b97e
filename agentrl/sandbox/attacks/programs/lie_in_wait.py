"""Stays behind and waits for the process that will become the next program, while it is still the server's.

kind: lifetime
seconds: 10
host: others_are_out_of_reach
needs: two users
"""

import os
import time
from collections.abc import Iterator


def user(pid: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[2]) for line in file if line.startswith("Uid:"))


def reached(pid: str) -> Iterator[str]:
    """What this process may do to another."""
    try:
        os.kill(int(pid), 0)
        yield "signal"
    except PermissionError:
        pass
    for name, mode in (("mem", "rb"), ("mem", "wb"), ("environ", "rb"), ("oom_score_adj", "wb"), ("fd/0", "rb"), ("fd/0", "wb")):
        try:
            with open(f"/proc/{pid}/{name}", mode, buffering=0) as file:
                if mode == "wb" or file.read(1):
                    yield f"{name} {mode}"
        except (OSError, ValueError):
            continue


print("held: lying in wait", flush=True)
if os.fork() == 0:
    os.setsid()
    seen: set[str] = set()
    done: set[str] = set()
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        for pid in os.listdir("/proc"):
            try:
                if pid.isdigit() and pid != "1" and user(pid) != os.getuid():
                    seen.add(pid)
                    found = list(reached(pid))
                    if found and user(pid) != os.getuid():  # else it has become one of ours meanwhile
                        done.update(found)
            except OSError:
                continue
        with open("reached.new", "w") as file:
            file.write(f"{len(seen)} {' '.join(sorted(done))}")
        os.replace("reached.new", "reached")
