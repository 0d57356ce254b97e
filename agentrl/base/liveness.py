"""Detects parts of a run that make no progress. Each kind of work has a deadline that is derived from its history.

Progress is completed work (a micro-batch, a checkpoint, a token, a response). A process that runs without completing work makes no
progress. Each part reports the work that it is about to start. The deadline is `DEADLINE_FACTOR` times the longest duration of that work so
far, and at least `least_s`. Until a piece of that work of at least half the current size has been measured, the longer deadline `first_s`
applies, because a first step compiles and a first checkpoint creates files.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

DEADLINE_FACTOR = 10.0
MIN_DEADLINE_S = 60.0
"""Minimum deadline in seconds. It is longer than the pauses of a busy machine."""
SOUND_S = 600.0
"""Seconds for which a part must work until its earlier failures no longer count."""
STOPPED_S = 8.0
"""Seconds for which a process must be stopped until its part counts as stuck."""
LOCK_WAIT_S = 120.0
"""Maximum seconds to wait for a lock that another process holds. A part that a signal has stopped is detected and killed sooner, which
releases its locks, so the wait ends and the run continues."""
_STOPPED_LOOK_S = 2.0  # seconds between two checks for stopped processes
_HISTORY = 1024  # newest durations of one kind of work
_KINDS, _OTHER = 64, "other work"  # kinds of work whose time is counted separately
_LOOK_S = 20.0  # maximum seconds of silence that one check counts, because it may wait that long for a response


class Liveness:
    """Detects that one part of a run makes no progress. Call `progress` for each report from the part, and call `overdue` regularly to
    check how long the part has sent no report.

    Each check counts at most `_LOOK_S` seconds of silence. Time in which the checking process is stopped (a debugger, a suspended machine)
    does not count, because no reports are read then.
    """

    silent_s: float  # counted seconds of silence since the last report
    _size: float  # size of the current work
    _since: float  # start of the current work, on the clock

    def __init__(self, what: str, *, first_s: float, least_s: float = MIN_DEADLINE_S, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            what: the part's name in messages, such as "the learner".
            first_s: deadline in seconds for work without a history.
            least_s: minimum deadline in seconds.
            clock: seconds of a monotonic clock.
        """
        self.what = what
        self._first_s, self._least_s, self._clock = first_s, least_s, clock
        self._taken: dict[tuple[str, bool], deque[tuple[float, float]]] = {}  # (work, first after a start?) -> (size, seconds)
        self._met: set[str] = set()  # kinds of work since the last start
        self._current: tuple[str, bool] | None = None
        self.needs_s = 0.0
        """Measured seconds for a piece of the work. No deadline is shorter than `DEADLINE_FACTOR` times this."""
        self._spent: dict[str, float] = {}  # kind of work -> seconds, at most _KINDS
        self.begin()

    def begin(self, work: str = "starting") -> None:
        """Records a start or restart. The history is kept, and the first work of each kind is compared with the first work after earlier
        starts."""
        self._met, self._current = set(), None
        self.progress(work)

    def progress(self, work: str, size: float = 1.0, *, at: float | None = None) -> None:
        """Records that the part has finished its previous work and starts `work`.

        Args:
            size: amount of work, for instance in tokens.
            at: time of the report, as read from the clock passed to the constructor; None means now.
        """
        now = self._clock()
        at = now if at is None else min(at, now)
        if self._current is not None:
            self._taken.setdefault(self._current, deque(maxlen=_HISTORY)).append((self._size, max(at - self._since, 0.0)))
            self._spend(at)
        self._current, self._size, self._since = (work, work not in self._met), size, at
        self._met.add(work)
        self.silent_s, self._looked = 0.0, now

    def pause(self) -> None:
        """Stops counting silence until the next `progress`, because the part has nothing to do or its work has a separate deadline. The
        interrupted work does not enter the history."""
        if self._current is not None:
            self._spend(self._clock())
        self._current, self.silent_s = None, 0.0

    def spent_s(self) -> dict[str, float]:
        """Returns the seconds spent so far on each kind of work, including the work in progress. The time of work that was not reported is
        added to the last reported kind of work."""
        spent = dict(self._spent)
        if self._current is not None:
            spent[self.work] = spent.get(self.work, 0.0) + max(self._clock() - self._since, 0.0)
        return spent

    def _spend(self, until: float) -> None:
        """Adds the time from the start of the current work to `until` to the total of its kind."""
        assert self._current is not None
        work = self._current[0] if len(self._spent) < _KINDS or self._current[0] in self._spent else _OTHER
        self._spent[work] = self._spent.get(work, 0.0) + max(until - self._since, 0.0)

    @property
    def work(self) -> str:
        """The kind of work in progress; empty if the part is idle."""
        return "" if self._current is None else self._current[0]

    @property
    def deadline_s(self) -> float:
        """Seconds of silence that are allowed during the current work; infinite if the part is idle."""
        if self._current is None:
            return float("inf")
        least_s = max(self._least_s, DEADLINE_FACTOR * self.needs_s)
        taken = self._taken.get(self._current, ())
        if not any(2 * size >= self._size for size, _ in taken):
            return max(self._first_s, least_s)
        return max(least_s, DEADLINE_FACTOR * max(seconds for _, seconds in taken))

    def overdue(self) -> str:
        """Returns the reason why the part counts as stuck; empty while its silence is within the deadline."""
        now = self._clock()
        if self._current is None:
            self._looked = now
            return ""
        self.silent_s += min(max(now - self._looked, 0.0), _LOOK_S)
        self._looked = now
        if self.silent_s <= (deadline := self.deadline_s):
            return ""
        taken = self._taken.get(self._current, ())
        before = f"longest so far: {max(seconds for _, seconds in taken):.1f} s" if taken else "for the first time"
        return f"{self.what} has made no progress for {self.silent_s:.0f} s while {self._current[0]} ({before}; deadline: {deadline:.0f} s)"


class StoppedProcesses:
    """Detects that a signal such as SIGSTOP has stopped a process of a part. The kernel reports that a process is stopped, so no history is
    needed."""

    def __init__(self, what: str, *, states: Callable[[int], Mapping[int, str]], clock: Callable[[], float] = time.monotonic) -> None:
        """`what`: the part's name in messages. `states`: returns the states of a process and of those below it, like
        `base.processes.process_tree`. `clock`: seconds of a monotonic clock."""
        self.what = what
        self.least_s = STOPPED_S
        self._states, self._clock = states, clock
        self._since: dict[int, float] = {}  # stopped process -> first check that saw it
        self._looked = float("-inf")

    def overdue(self, root: int) -> str:
        """Returns why the part with the root process `root` counts as stuck; empty if none of its processes has been stopped for `least_s`
        seconds, and for every call less than two seconds after the last check."""
        now = self._clock()
        if now - self._looked < _STOPPED_LOOK_S:
            return ""
        if now - self._looked > _LOOK_S:  # the checking process was stopped too
            self._since.clear()
        self._looked = now
        self._since = {pid: self._since.get(pid, now) for pid, state in self._states(root).items() if state == "T"}
        pid = min(self._since, key=self._since.__getitem__, default=0)
        silent_s = now - self._since.get(pid, now)
        if not pid or silent_s < self.least_s:
            return ""
        return f"{self.what} has made no progress for {silent_s:.0f} s: a signal has stopped process {pid}"


class RestartAlert(str):
    """An alert about the restart of a part of the run. Trackers can distinguish a restart alert from other alerts.

    Args:
        part: "server", "learner", "rollout worker", "judge" or "redis".
        text: the text of the alert.
    """

    part: str

    def __new__(cls, part: str, text: str) -> RestartAlert:
        """Returns the alert text with the attribute `part`."""
        alert = super().__new__(cls, text)
        alert.part = part
        return alert


class Restarts:
    """Counts the consecutive restarts of one part. The count returns to 0 when `progress` is called at least `sound_s` seconds after the
    last start, or when `completed` is called.

    The run therefore fails soon if a part cannot work, and rare failures do not add up over a long run.
    """

    def __init__(self, *, sound_s: float = SOUND_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._row, self._sound_s, self._clock, self._since = 0, sound_s, clock, clock()

    def progress(self) -> None:
        """Records that the part has made progress."""
        if self._clock() - self._since >= self._sound_s:
            self._row = 0

    def completed(self) -> None:
        """Records that the part completed work that only a healthy part can complete."""
        self._row = 0

    def failed(self) -> int:
        """Records a failure. Returns the number of consecutive failures, including this one."""
        self.total += 1
        self._row += 1
        return self._row

    def started(self) -> None:
        """Records that the part works again."""
        self._since = self._clock()


class AnswerLiveness:
    """The liveness of an external part that answers questions from many episodes: an MCP server or a judge's endpoint.

    Time counts while any question is waiting for an answer. After `deadline_s` seconds of such time without an answer, the part counts as
    stuck until it answers.
    """

    def __init__(
        self, what: str, *, fix: str, first_s: float, least_s: float = MIN_DEADLINE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            what: the part's name in messages.
            fix: what the user can do if the part does not answer.
            first_s: deadline in seconds before the first answer.
        """
        self.what, self.fix = what, fix
        self._first_s, self._least_s, self._clock = first_s, least_s, clock
        self._longest_s: float | None = None  # longest time to an answer
        self._waiting, self._looked, self._silent_s = 0, clock(), 0.0

    @contextmanager
    def question(self) -> Iterator[None]:
        """Counts the `with` block as one question that waits for an answer, including retries."""
        _asked.add(self)
        self._count()
        self._waiting += 1
        try:
            yield
        finally:
            self._count()
            self._waiting -= 1

    def answered(self, seconds: float) -> None:
        """Records an answer that took `seconds`."""
        self._looked, self._silent_s = self._clock(), 0.0
        self._longest_s = max(self._longest_s or 0.0, seconds)

    @property
    def deadline_s(self) -> float:
        """`DEADLINE_FACTOR` times the longest response time so far, but at least `least_s`; `first_s` before the first answer."""
        return self._first_s if self._longest_s is None else max(self._least_s, DEADLINE_FACTOR * self._longest_s)

    def overdue(self) -> str:
        """Returns the reason why the part counts as stuck; empty if the time without an answer is within `deadline_s`.

        Call it regularly.
        """
        self._count()
        if self._silent_s <= (deadline := self.deadline_s):
            return ""
        before = "no answer so far" if self._longest_s is None else f"longest so far: {self._longest_s:.1f} s"
        return f"{self.what} has not answered for {self._silent_s:.0f} s ({before}; deadline: {deadline:.0f} s)"

    def _count(self) -> None:
        now = self._clock()
        if self._waiting:
            self._silent_s += min(max(now - self._looked, 0.0), _LOOK_S)
        self._looked = now


_asked: WeakSet[AnswerLiveness] = WeakSet()


def external_parts() -> list[AnswerLiveness]:
    """Returns the external parts, such as MCP servers, to which this process has sent a question."""
    return list(_asked)
