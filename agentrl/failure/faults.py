"""Measures the rate of faults that the policy did not cause, pauses a run if the rate is too high, and quarantines broken tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from pathlib import Path
from typing import NoReturn

from agentrl.base import user_code
from agentrl.base.files import append_lines, json_line, read_json_lines
from agentrl.errors import InfrastructureError, TaskError
from agentrl.records import Blame, Failure, Group
from agentrl.records.failure import NEIGHBOR_CRASH

log = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"
MAX_QUARANTINED = 8
"""Maximum number of tasks quarantined within `QUARANTINE_GROUPS` groups. If more are, the family or its verifier is probably broken."""
QUARANTINE_GROUPS = 1024
MIN_WINDOW = 64
MAX_FAULT_SHARE = 0.5
"""Maximum share of faults among the newest attempts. Above it the run pauses, because a component is broken and most work is lost."""
MAX_SUSPECT_SHARE = 0.1
"""Maximum share of the newest attempts that faults after the policy's first turn may exclude without raising an alert."""
OTHERS = "others"
_KINDS = 32  # kinds of faults that are counted separately; all other kinds are counted together
_SHOWN_KINDS = 8
_MAX_NAMED = 20  # quarantined tasks in an error message


class FaultRate:
    """Measures the share of faults among the newest attempts, including attempts that are retried. Use it from one event loop.

    If a server or daemon dies, all attempts in flight fail and are retried. A single loss of this kind should not pause the run. So the
    share covers the newest `4 * concurrency` attempts (at least 64), and is checked only after half that many have finished. With a limit
    of 0.5, one such loss among otherwise successful attempts never exceeds the limit.

    Args:
        limit: maximum share of faults, from 0 to 1. If it is 1, a run never pauses.
        concurrency: maximum number of attempts in flight.
    """

    def __init__(self, limit: float = MAX_FAULT_SHARE, *, concurrency: int) -> None:
        self.limit = limit
        window = max(MIN_WINDOW, 4 * concurrency)
        self._min_known = window // 2
        self._newest: deque[str | None] = deque(maxlen=window)  # kind of the fault, or None for a successful attempt
        self._failed = 0  # number of faults in `_newest`
        self._messages: dict[str, str] = {}  # kind -> newest message
        self._suspects: deque[str | None] = deque(maxlen=window)  # kind of a fault after the policy's first turn, or None
        self._suspected = False
        self._suspects_since = 0
        self._since = Counter[bool]()  # successful (False) and failed (True) attempts since the last call of `attempt_metrics`
        self._exceeded = asyncio.Event()

    def record_attempt(self, failure: Failure | None) -> None:
        """Counts a finished attempt. `failure` is the fault of the attempt; None means that the attempt was scored.

        An attempt that failed because of a fault in a different attempt counts only in the metrics, because one fault can make many
        attempts fail.
        """
        if failure is not None and failure.kind == NEIGHBOR_CRASH:
            self._since[True] += 1
            return
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
        suspect = failure is not None and failure.policy_reachable
        self._suspects.append(kind if suspect else None)
        self._suspects_since += suspect
        self._since[failure is not None] += 1
        if len(self._newest) >= self._min_known and self.share > self.limit:
            self._exceeded.set()

    @property
    def share(self) -> float:
        """Share of faults among the newest attempts; 0 before the first attempt."""
        return self._failed / len(self._newest) if self._newest else 0.0

    @property
    def kinds(self) -> Counter[str]:
        """Number of faults among the newest attempts, by stage and kind."""
        return Counter(kind for kind in self._newest if kind is not None)

    def attempt_metrics(self) -> dict[str, float]:
        """Returns step metrics for the attempts that finished since the last call, including retried attempts.

        The metrics are the number of attempts, the number that failed, and the share with a fault that the policy may have caused
        (`Failure.policy_reachable`). The share is absent if no attempt finished.
        """
        ended, failed = self._since.total(), self._since[True]
        reachable, self._suspects_since = self._suspects_since, 0
        self._since.clear()
        share = {"excluded_policy_reachable": reachable / ended} if ended else {}
        return {"attempts_ended": ended, "attempts_failed": failed, **share}

    def suspect_alert(self) -> str:
        """Returns an alert if more than `MAX_SUSPECT_SHARE` of the newest attempts failed after the policy's first turn; otherwise "".

        Returns "" before 32 attempts have finished and, after an alert, until the share has fallen to the limit or below and risen above it
        again.
        """
        kinds = Counter(kind for kind in self._suspects if kind is not None)
        known = len(self._suspects)
        before, self._suspected = self._suspected, known >= MIN_WINDOW // 2 and kinds.total() > MAX_SUSPECT_SHARE * known
        if before or not self._suspected:
            return ""
        kind, times = kinds.most_common()[0]
        return (
            f"{kinds.total()} of the newest {known} attempts failed after the policy's first turn and were excluded, most often"
            f" with {kind} ({times}): {self._messages.get(kind, '')[:200]}\n  fix: repair the component that fails. If it works, the policy"
            " may have learned to provoke the fault to avoid a bad score. `agentrl failures` shows the episodes"
        )

    async def watch(self) -> NoReturn:
        """Waits until the share of faults exceeds the limit, then raises an `InfrastructureError` that lists the most frequent faults."""
        await self._exceeded.wait()
        kinds = self.kinds.most_common()
        lines = [f"{count} x {kind}: {self._messages.get(kind, '')}".rstrip(": ") for kind, count in kinds[:_SHOWN_KINDS]]
        if rest := sum(count for _, count in kinds[_SHOWN_KINDS:]):
            others = len(kinds) - _SHOWN_KINDS
            lines.append(f"{rest} {'fault' if rest == 1 else 'faults'} of {others} other {'kind' if others == 1 else 'kinds'}")
        listing = "\n  ".join(lines)
        raise InfrastructureError(
            f"the run pauses: {self._failed} of the newest {len(self._newest)} attempts failed for reasons other than the policy"
            f" (the limit is {self.limit:.0%}). The newest fault of each kind:\n  {listing}\n"
            "  fix: remove the cause, then continue with --resume; finished work is kept"
        )


class Quarantine:
    """The broken tasks of one run, which are not attempted again.

    Each task is recorded as one line of `quarantine.jsonl` with the task's id and key, the group's index, and the fault's message.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / QUARANTINE_FILE
        self._faults = {line["task_key"]: line["message"] for line in read_json_lines(self._path, "task_key", "message")}
        self._added = list[tuple[int, str]]()  # (number of the group since the start, message)
        self._groups = 0  # number of groups since the start
        self._lock = threading.Lock()  # held by `add`

    def __len__(self) -> int:
        return len(self._faults)

    def known_fault(self, task_key: str) -> Failure | None:
        """Returns the fault of a quarantined task, or None for any other task.

        A task key is a content hash, so a repaired task has a new key and is not quarantined.
        """
        message = self._faults.get(task_key)
        return None if message is None else Failure(stage="task", blame=Blame.TASK, kind="quarantined", message=message)

    def add(self, group: Group) -> None:
        """Counts a finished group and, if the group has a fault, quarantines its task.

        Writes to the disk, so call it in a thread.

        Raises:
            TaskError: more than `MAX_QUARANTINED` tasks were added within `QUARANTINE_GROUPS` groups. The message lists the tasks.
        """
        with self._lock:
            self._groups += 1
            self._add(group)

    def _add(self, group: Group) -> None:
        fault = group.fault
        if fault is None or group.task_key in self._faults:
            return
        self._faults[group.task_key] = fault.message
        line = {"task_id": group.task_id, "task_key": group.task_key, "group": group.index, "message": fault.message}
        append_lines(self._path, [json_line(line)])
        log.warning("task %s is quarantined, and its group %d is excluded: %s", group.task_id, group.index, fault.message)
        self._added = [added for added in self._added if added[0] > self._groups - QUARANTINE_GROUPS]
        self._added.append((self._groups, f"{group.task_id}: {fault.message.partition(chr(10))[0]}"))
        if len(self._added) > MAX_QUARANTINED:
            more = f"\n  and {len(self._added) - _MAX_NAMED} more" if len(self._added) > _MAX_NAMED else ""
            raise TaskError(
                f"{len(self._added)} tasks are broken, but only {MAX_QUARANTINED} are allowed within {QUARANTINE_GROUPS} groups."
                f" All are in {self._path}:\n  " + "\n  ".join(text for _, text in self._added[:_MAX_NAMED]) + more,
                fix="repair the tasks (`agentrl check` finds more), then continue with --resume, which resets the count",
            )


def count_quarantined(run_dir: Path) -> int:
    """Returns the number of tasks that a run has quarantined."""
    return len({line["task_key"] for line in read_json_lines(run_dir / QUARANTINE_FILE, "task_key")})
