"""The subprocess that runs reasoning-gym's scorers on a model's text (`agentrl.reward.worker`)."""

from __future__ import annotations

import decimal
from collections.abc import Mapping
from typing import Any

from agentrl.base.numbers import is_at_least
from agentrl.reward.worker import CallFailed, CallTimeout, SubprocessWorker, set_deadline
from sandboxes.reasoning.catalogue import exact
from sandboxes.reasoning.problems import entry_of

__all__ = ["CallFailed", "CallTimeout", "Scorers"]

DEADLINE_S = 5.0
MAKING_S = 20.0  # seconds for generating the problem
MEMORY = 4 << 30  # bytes of address space


class Scorers:
    """Runs reasoning-gym's scorers in one subprocess, which starts at the first request. Thread-safe: requests are queued."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._worker = SubprocessWorker(reply, deadline_s=MAKING_S, memory=MEMORY)

    def mark(self, origin: Mapping[str, Any], truth: str, answer: str) -> float:
        """Returns the mark that the dataset's scorer gives to an answer. `origin`: see `sandboxes.reasoning.problems.Problem`.

        Raises `CallFailed`, `CallTimeout`, `TaskError` if the package no longer generates the problem, and `InfrastructureError` if the
        subprocess cannot be started."""
        request = {"origin": dict(origin), "truth": truth, "answer": answer, "deadline_s": self._deadline_s}
        try:
            return float(self._worker.call_blocking(request))
        except CallTimeout:
            raise CallTimeout(f"returned no mark within {self._deadline_s:g} s") from None

    def close(self) -> None:
        """Stops the process. A later request starts a new process."""
        self._worker.close()


def reply(request: Mapping[str, Any]) -> float:
    """Returns the mark for an answer, or 0 if an answer with full marks contains more than the truth. Runs in the subprocess."""
    dataset, entry = entry_of(request["origin"], request["truth"])
    set_deadline(request["deadline_s"])
    with decimal.localcontext(decimal.Context()):  # one dataset changes the global precision
        mark = float(dataset.score_answer(request["answer"], entry))
    return mark if not is_at_least(mark, 1.0) or exact(request["origin"]["dataset"], request["answer"], request["truth"]) else 0.0
