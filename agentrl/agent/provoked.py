"""Decides whether the calls of one episode provoked a tool's outage, from how the tool answered other calls.

An outage ends the attempt, which is retried in a fresh sandbox and excluded if the outage persists. So an agent that can cause outages
with its arguments could choose which of its episodes count. Two observations show that the tool was up:

- The outage recurs in another attempt of the same episode, and the tool has answered at least half of the other calls since the first one.
- The call got no answer in time, and the tool has answered at least half of the other calls that started after it.

Nothing else is evidence. A server that answers a ping can still have lost its database, so servers are not probed.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque

KEPT_CALLS = 512
"""The newest calls that are kept for each tool."""
KEPT_EPISODES = 4096
"""Episodes whose first outage is kept."""
KEPT_TOOLS = 1024
UP = 0.5
"""Share of other calls that a tool must have answered to count as up. Otherwise it is down, whatever the cause, and the run pauses."""
_ATTEMPT = re.compile(r"-a\d+$")


class CallRecord:
    """The newest calls of the tools of one run, by the tool's name. Use it from one event loop."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, deque[tuple[float, bool, str]]] = OrderedDict()  # tool -> (start, answered, episode)
        self._first: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()  # tool, episode -> start, attempt of its first outage

    def answered(self, tool: str, *, attempt: str, started: float) -> None:
        """Records a successful call. `attempt` is the episode's id, `started` the time on the monotonic clock."""
        self._add(tool, attempt, started, True)

    def provoked(self, tool: str, *, attempt: str, started: float, late: bool) -> bool:
        """Records an outage, and returns whether the episode provoked it."""
        episode = _ATTEMPT.sub("", attempt)
        before = self._first.get((tool, episode))
        since = started if before is None else before[0]
        again = before is not None and before[1] != attempt
        others = [ok for at, ok, who in self._calls.get(tool, ()) if at >= since and (ok or who != episode)]
        self._first.setdefault((tool, episode), (started, attempt))
        while len(self._first) > KEPT_EPISODES:
            self._first.popitem(last=False)
        self._add(tool, attempt, started, False)
        return (again or late) and sum(others) > 0 and sum(others) >= UP * len(others)

    def _add(self, tool: str, attempt: str, started: float, ok: bool) -> None:
        calls = self._calls.setdefault(tool, deque(maxlen=KEPT_CALLS))
        self._calls.move_to_end(tool)
        while len(self._calls) > KEPT_TOOLS:
            self._calls.popitem(last=False)
        calls.append((started, ok, _ATTEMPT.sub("", attempt)))
