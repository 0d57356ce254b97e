"""Runs programs that take all CPU time in many sandboxes at once: each must time out, and no neighbour may fail.

    python benchmarks/sandbox_spin.py [--backend docker] [--count 128] [--seconds 5] [--kind processes] [--markdown FILE]

Opens `--count` sandboxes and a neighbour, runs the same program in all of them with a time-out of `--seconds`, and then requests a
snapshot and an answer from each. The exit status is 1 if a program ends with a sandbox fault (its episode would be excluded from the loss),
if the neighbour computes wrong or late, or if a sandbox does not answer afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import AgentRLError
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import BubblewrapBackend, DockerBackend, select_backend

Backend = DockerBackend | BubblewrapBackend
NEIGHBOUR_S = 30.0
ANSWER_S = 30.0
OPEN_S = 600.0

_FORKED = "import os, signal\nfor _ in range(3):\n    try: os.fork()\n    except OSError: break\n"
KINDS: Mapping[str, str] = {
    "processes": _FORKED + "while True: pass\n",
    "session": _FORKED + "while True: pass\n",
    "snippet": _FORKED + "while True: pass\n",
    "threads": (
        "import hashlib, threading\n"
        "def work():\n    while True: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 100000)\n"
        "for _ in range(8):\n    threading.Thread(target=work).start()\n"
    ),
    "forks": "import os\nwhile True:\n    try:\n        if os.fork() == 0 and os.fork() == 0: pass\n    except OSError: pass\n",
    "deaf": "import os, signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    + _FORKED
    + "while True: pass\n",
    "signals": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n" + _FORKED + "while True:\n"
        "    try: os.kill(-1, signal.SIGUSR1)\n    except OSError: pass\n"
    ),
    "memory": _FORKED + "import mmap\nwhile True:\n    m = mmap.mmap(-1, 4 << 20)\n    m.write(b'x' * (4 << 20))\n    m.close()\n",
    "files": _FORKED + "while True:\n    with open(f'/tmp/{os.getpid()}', 'wb') as f: f.write(b'x' * 65536)\n",
    "left behind": _FORKED + "if os.fork(): os._exit(0)\nos.setsid()\nwhile True: pass\n",
}
SCORED: Mapping[str, frozenset[str]] = {
    kind: frozenset({"memory": {"timeout", "memory"}, "left behind": {"exit", "timeout"}}.get(kind, {"timeout"})) for kind in KINDS
}
"""How a program of each kind may end. Anything else, such as `SandboxTimeout`, is a fault."""


@dataclass(slots=True)
class Outcome:
    """`Outcome(ends={"timeout": 128}, after={"answers": 128}, neighbour="")`; times in seconds."""

    ends: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)  # response of each sandbox to a request for a snapshot and an answer
    neighbour: str = ""  # reason for its failure
    neighbour_s: float = 0.0  # its slowest answer
    open_s: float = 0.0
    latest_s: float = 0.0  # from the call to the last result
    close_s: float = 0.0

    def good(self, kind: str) -> bool:
        return set(self.ends) <= SCORED[kind] and set(self.after) == {"answers"} and not self.neighbour


async def spun(backend: Backend, spec: SandboxSpec, kind: str, *, count: int, seconds: float) -> Outcome:
    """Runs a program of this kind in `count` sandboxes at once."""
    outcome, start = Outcome(), time.monotonic()
    neighbour, *sandboxes = await asyncio.gather(*(backend.open(spec, timeout_s=OPEN_S) for _ in range(count + 1)))
    outcome.open_s = time.monotonic() - start
    watcher = asyncio.create_task(_watch(neighbour, outcome))
    start = time.monotonic()
    outcome.ends.update(await asyncio.gather(*(_ran(sandbox, kind, seconds) for sandbox in sandboxes)))
    outcome.latest_s = time.monotonic() - start
    outcome.after.update(await asyncio.gather(*(_answers(sandbox, number) for number, sandbox in enumerate(sandboxes))))
    watcher.cancel()
    start = time.monotonic()
    await asyncio.gather(watcher, *(sandbox.close() for sandbox in (neighbour, *sandboxes)), return_exceptions=True)
    outcome.close_s = time.monotonic() - start
    return outcome


async def _ran(sandbox: Sandbox, kind: str, seconds: float) -> str:
    try:
        if kind in ("session", "snippet"):
            result = await sandbox.python(KINDS[kind], timeout_s=seconds, session="main" if kind == "session" else "")
        else:
            result = await sandbox.exec(["python3", "-I", "-c", KINDS[kind]], timeout_s=seconds)
    except AgentRLError as error:
        return type(error).__name__
    return result.reason or "exit"


async def _answers(sandbox: Sandbox, number: int) -> str:
    try:
        await sandbox.snapshot()
        result = await sandbox.python(f"print({number} * 7)", timeout_s=ANSWER_S)
    except AgentRLError as error:
        return type(error).__name__
    return "answers" if result.stdout == f"{number * 7}\n" else result.reason or f"answers {result.stdout!r:.40}"


async def _watch(neighbour: Sandbox, outcome: Outcome) -> None:
    while True:
        start = time.monotonic()
        try:
            result = await neighbour.python("print(6 * 7)", timeout_s=NEIGHBOUR_S)
        except AgentRLError as error:
            outcome.neighbour = str(error)
            return
        if result.stdout != "42\n":
            outcome.neighbour = f"computed {result}"
        outcome.neighbour_s = max(outcome.neighbour_s, time.monotonic() - start)
        await asyncio.sleep(0.2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=["docker", "bubblewrap"], action="append", help="may be repeated; default: both")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="may be repeated; default: processes")
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0, help="time-out of each program")
    parser.add_argument("--image", default="sandboxes/tables")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="project root that --image is relative to")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a table")
    options = parser.parse_args()
    spec, good = SandboxSpec(image=options.image), True
    head = "| backend | kind | sandboxes | ends | afterwards | latest result, s | neighbour's slowest, s | opened in, s | closed in, s |"
    rows = [head, "| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |"]
    for name in options.backend or ("docker", "bubblewrap"):
        backend = select_backend(name, run_label="benchmark", root=options.root, progress=print)
        try:
            await backend.prepare(spec)
            for kind in options.kind or ["processes"]:
                outcome = await spun(backend, spec, kind, count=options.count, seconds=options.seconds)
                good = good and outcome.good(kind)
                cells = [name, kind, options.count, _counts(outcome.ends), _counts(outcome.after), f"{outcome.latest_s:.1f}"]
                cells += [outcome.neighbour or f"{outcome.neighbour_s:.1f}", f"{outcome.open_s:.1f}", f"{outcome.close_s:.1f}"]
                rows.append("| " + " | ".join(map(str, cells)) + " |")
                print(rows[-1], flush=True)
        finally:
            await backend.close()
    if options.markdown is not None:
        options.markdown.write_text("\n".join(rows) + "\n", encoding="utf-8")
    raise SystemExit(0 if good else 1)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


if __name__ == "__main__":
    asyncio.run(main())
