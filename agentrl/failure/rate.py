"""The rate of attempts that end in a fault not caused by the policy: above a limit the run pauses instead of learning nothing."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NoReturn

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, ServerDied
from agentrl.records import Failure

MIN_WINDOW = 64
MAX_SUSPECT_SHARE = 0.1
"""Largest share of the newest attempts that may be excluded after the policy's first turn without an alert."""
_KINDS = 32  # counted separately; the rest are counted together
_SHOWN = 8
OTHERS = "others"
_SERVERS = (ServerDied.__name__, "SlowServer", "slow_server")
"""Kinds of failures that an inference server caused, independent of the request."""


class FaultRate:
    """Counts the newest attempts and their faults, retried or not. Use it from one event loop.

    When a server or a daemon dies, all attempts in flight fail at once and are retried, which is no reason to pause. So the rate
    is taken over the newest `4 * concurrency` attempts (at least 64), once half of them are known: with a limit of 0.5, one such
    death among sound attempts never exceeds it.

    Args:
        limit: largest accepted share of faults, from 0 to 1; with 1 a run never pauses.
        concurrency: largest number of attempts in flight.
    """

    def __init__(self, limit: float, *, concurrency: int) -> None:
        self.limit = limit
        window = max(MIN_WINDOW, 4 * concurrency)
        self._judged_from = window // 2
        self._newest: deque[str | None] = deque(maxlen=window)  # kind of fault, None for a sound attempt
        self._failed = 0  # of the newest
        self._messages: dict[str, str] = {}  # newest of each kind
        self._spoken: deque[str | None] = deque(maxlen=window)  # of the newest: kind of fault after the policy's first turn
        self._suspected = False
        self._since_spoken = 0
        self._since = Counter[bool]()  # sound (False) and faulty (True) attempts since `figures` was last asked
        self._exceeded = asyncio.Event()

    def record_attempt(self, failure: Failure | None) -> None:
        """Counts an attempt that has ended; `failure` is its fault, None when it was scored."""
        kind = None
        if failure is not None:
            kind = user_code.printable(f"{failure.stage} {failure.kind}", 100)
            if kind not in self._messages and len(self._messages) >= _KINDS:
                kind = OTHERS
            self._messages[kind] = " ".join(user_code.printable(failure.message, 600).split())
        if len(self._newest) == self._newest.maxlen and self._newest[0] is not None:
            self._failed -= 1
        self._newest.append(kind)
        self._failed += failure is not None
        spoken = failure is not None and _spoken(failure)
        self._spoken.append(kind if spoken else None)
        self._since_spoken += spoken
        self._since[failure is not None] += 1
        if len(self._newest) >= self._judged_from and self.share > self.limit:
            self._exceeded.set()

    @property
    def share(self) -> float:
        """Share of faults among the newest attempts; 0 before the first."""
        return self._failed / len(self._newest) if self._newest else 0.0

    @property
    def kinds(self) -> Counter[str]:
        """Faults among the newest attempts, by stage and kind."""
        return Counter(kind for kind in self._newest if kind is not None)

    def attempt_metrics(self) -> dict[str, float]:
        """Attempts that have ended since the last call, and how many of them failed; for the metrics of a step."""
        ended, failed = self._since.total(), self._since[True]
        self._since.clear()
        return {"attempts_ended": ended, "attempts_failed": failed}

    def suspect_metrics(self) -> dict[str, float]:
        """The number of attempts since the last call that failed after the policy's first turn, for the metrics of a step.

        Attempts that a dead or slow inference server ended do not count.
        """
        spoken, self._since_spoken = self._since_spoken, 0
        return {"attempts_failed_spoken": spoken}

    def suspect_alert(self) -> str:
        """An alert if the share of such attempts rises above `MAX_SUSPECT_SHARE`; else ""."""
        kinds = Counter(kind for kind in self._spoken if kind is not None)
        before, self._suspected = (
            self._suspected,
            len(self._spoken) >= MIN_WINDOW // 2 and kinds.total() > MAX_SUSPECT_SHARE * len(self._spoken),
        )
        if before or not self._suspected:
            return ""
        kind, times = kinds.most_common()[0]
        return (
            f"{kinds.total()} of the newest {len(self._spoken)} attempts failed after the policy's first turn and were excluded, most often"
            f" with {kind} ({times}): {self._messages.get(kind, '')[:200]}\n  fix: repair the part that fails. If it works, the policy may"
            " have learned to provoke the fault to avoid a bad score: `agentrl failures` shows the episodes"
        )

    async def watch(self) -> NoReturn:
        """Waits until the limit is exceeded, then raises `InfrastructureError` that says what failed how often."""
        await self._exceeded.wait()
        raise InfrastructureError(self._message())

    def _message(self) -> str:
        kinds = self.kinds.most_common()
        lines = [f"{count} x {kind}: {self._messages.get(kind, '')}".rstrip(": ") for kind, count in kinds[:_SHOWN]]
        if rest := sum(count for _, count in kinds[_SHOWN:]):
            lines.append(f"{rest} x of {len(kinds) - _SHOWN} other kinds")
        listing = "\n  ".join(lines)
        return (
            f"the run pauses: {self._failed} of the newest {len(self._newest)} attempts failed, and not because of the policy"
            f" (rollout.max_fault_rate={self.limit:g}). The newest of each kind:\n  {listing}\n"
            "  fix: repair the cause, then continue with --resume; finished work is kept. With rollout.max_fault_rate=1 a run never pauses"
        )


def _spoken(failure: Failure) -> bool:
    """Whether the policy can have provoked the fault: it came after its first turn, and no inference server died or was slow."""
    return failure.kind not in _SERVERS and (failure.stage == "score" or (failure.turn or 0) > 0)
