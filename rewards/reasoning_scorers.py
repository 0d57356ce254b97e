"""The process in which reasoning-gym's scorers read what a model wrote: `python -m rewards.reasoning_scorers SECONDS`.

It reads a request a line and answers a line, both JSON. A scorer that takes longer than so many seconds is ended by the kernel, with
its process; one that wants more than `MEMORY` gets a MemoryError. The next request starts another process. It ends with its driver,
which closes its input.
"""

from __future__ import annotations

import decimal
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import InfrastructureError, TaskError
from agentrl.processes import importing_from
from sandboxes.reasoning.problems import entry_of

DEADLINE_S = 5.0
MAKING_S = 20.0  # for making the problem once more
MEMORY = 4 << 30  # bytes of address space
ROOT = Path(__file__).resolve().parents[1]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Raised(Exception):
    """A scorer raised something."""


class Stopped(Exception):
    """A scorer was ended at its deadline."""


class Scorers:
    """The scorers, in one process that is started at the first request. Threads may share it: they wait for one another."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[str] | None = None
        self._one_at_a_time = threading.Lock()

    def mark(self, origin: Mapping[str, Any], truth: str, answer: str) -> float:
        """What the dataset's scorer gives an answer. `origin`: see `sandboxes.reasoning.problems.Problem`.

        Raises `Raised`, `Stopped`, `TaskError` for a problem that is made no more, and `InfrastructureError` when there is no process.
        """
        with self._one_at_a_time:
            reply = self._ask(json.dumps({"origin": dict(origin), "truth": truth, "answer": answer}))
        if "mark" in reply:
            return float(reply["mark"])
        if "gone" in reply:
            raise TaskError(reply["gone"])
        raise Raised(f"raised {reply['raised']}")

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = ""
        if reply:
            answered: dict[str, Any] = json.loads(reply)
            return answered
        code = process.wait()
        self.close()
        if code == -signal.SIGALRM:
            raise Stopped(f"gave no mark within {self._deadline_s:g} s")
        raise InfrastructureError(f"the process of the scorers ended with exit code {code}; what it said is on standard error")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "rewards.reasoning_scorers", str(self._deadline_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="ascii",
                start_new_session=True,  # ctrl-C is for the driver, which goes on judging what it finishes
                env=importing_from(ROOT) | _ONE_THREAD,
            )
        return self._process


def main() -> None:
    """Answers requests until its input ends. Only replies reach standard output; what a scorer prints is thrown away."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    deadline_s = float(sys.argv[1])
    for line in sys.stdin:
        replies.write(json.dumps(_reply(json.loads(line), deadline_s)) + "\n")
        replies.flush()


def _reply(request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    try:
        _at_most(MAKING_S)
        dataset, entry = entry_of(request["origin"], request["truth"])
        _at_most(deadline_s)
        with decimal.localcontext(decimal.Context()):  # one dataset changes the precision for all
            return {"mark": float(dataset.score_answer(request["answer"], entry))}
    except TaskError as error:
        return {"gone": str(error)}
    except Exception as error:  # of a scorer
        return {"raised": f"{type(error).__name__}: {error}"[:500]}
    finally:
        _at_most(0)


def _at_most(seconds: float) -> None:
    """Has the kernel end this process so long from now; 0: no more."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
