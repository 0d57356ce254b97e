"""Decides whether a call in one episode provoked a tool's outage, based on how the tool answered other calls.

An outage ends the attempt, which is retried in a fresh sandbox and excluded if the outage persists. An agent that can cause outages with
its arguments could therefore choose which of its episodes count. So evidence of a real outage comes from calls in other episodes. "Later
calls" are those that finished after the call failed (for a call that timed out: after it started; for a retried episode: after the
episode's first outage). The first rule that applies decides:

1. In later calls, the tool has failed in at least `FEW` other episodes, and has answered in less than the share `UP` of the episodes with
   such calls: the tool is down.
2. The tool has never answered a call in an episode of this task, and has failed in another episode of this task: the tool is down for this
   task.
3. The tool has answered some later calls and a call in an episode of this task, and the outage is confirmed: the same call failed
   repeatedly or timed out (`sure`), or an earlier attempt of the episode had an outage too. The call provoked the outage.
4. The tool has never answered a call in another episode, or it has answered no later call and has failed in the last `FEW` other episodes:
   the tool is down.
5. Otherwise, only this call shows the outage. Real outages of this kind are rare, so the infrastructure is blamed in about one episode per
   `ONE_IN` episodes in which the tool has answered. In all other episodes, the call provoked the outage.

Servers are not pinged: a server that answers a ping can still have lost its database.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass

MAX_CALLS_PER_TOOL = 512
"""Maximum number of recent calls that are recorded for each tool."""
MAX_EPISODES = 4096
"""Maximum number of recent episodes whose first outage is recorded."""
MAX_TOOLS = 1024
UP = 0.25
"""Minimum share of episodes in which a tool must have answered to count as up. Below this share, the tool is down, regardless of the
cause, and the run pauses."""
FEW = 2
"""Minimum number of episodes with a failure that count as evidence. A single failure may have been provoked by another agent."""
SEEN_DOWN = 4
"""A tool that has failed in at least this many other episodes and has answered no call is down, without further waiting."""
ONE_IN = 32
"""For every group of this many episodes that a tool has answered, one more episode may have an outage that no other call shows. The first
such episode is always allowed."""
_ATTEMPT = re.compile(r"-a\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The attempt that makes a call. The ids of an episode's attempts differ only in their suffix, such as `-a0` or `-a1`."""

    attempt: str
    task: str

    @property
    def episode(self) -> str:
        """The episode's id, without the attempt's suffix."""
        return _ATTEMPT.sub("", self.attempt)


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    number: int  # in the order in which calls finished
    episode: str
    task: str
    ok: bool
    alone: bool = False  # an outage that no other call showed and that was blamed on the infrastructure


class CallRecord:
    """The most recent calls of a run's tools, by tool name. Use a record from one event loop only."""

    def __init__(self) -> None:
        self.ended = 0
        """The number of calls that have finished so far."""
        self._calls: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._first: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()  # (tool, episode) -> (number, attempt) of first outage

    def answered(self, tool: str, caller: Caller) -> None:
        """Records a successful call."""
        self._add(tool, caller, ok=True)

    def failed(self, tool: str, caller: Caller, *, since: int | None = None) -> OutageCase:
        """Records an outage and returns its case. `since`: for a call that timed out, the value of `ended` when the call started."""
        call, key = self._add(tool, caller, ok=False), (tool, caller.episode)
        first, attempt = self._first.setdefault(key, (call.number, caller.attempt))
        while len(self._first) > MAX_EPISODES:
            self._first.popitem(last=False)
        again = attempt != caller.attempt
        return OutageCase(self._calls[tool], call, since=first if again else call.number if since is None else since, again=again)

    def _add(self, tool: str, caller: Caller, *, ok: bool) -> _Call:
        self.ended += 1
        calls = self._calls.setdefault(tool, deque(maxlen=MAX_CALLS_PER_TOOL))
        self._calls.move_to_end(tool)
        while len(self._calls) > MAX_TOOLS:
            self._calls.popitem(last=False)
        calls.append(_Call(number=self.ended, episode=caller.episode, task=caller.task, ok=ok))
        return calls[-1]


class OutageCase:
    """One undecided outage. Call `withdraw` if the tool answers the call when it is repeated."""

    def __init__(self, calls: deque[_Call], call: _Call, *, since: int, again: bool) -> None:
        self._calls, self._call, self._since, self._again = calls, call, since, again
        self.note = ""
        """Text to append to the outage's message; set by `provoked`."""

    @property
    def contested(self) -> bool:
        """Whether other calls can change the decision: the tool has answered a call, or failed in fewer than `SEEN_DOWN` other episodes."""
        return any(call.ok for call in self._calls) or len({call.episode for call in self._others()}) < SEEN_DOWN

    def withdraw(self) -> None:
        """Removes the call from the record, because it is not evidence about the tool."""
        if self._call in self._calls:
            self._calls.remove(self._call)

    def provoked(self, *, sure: bool) -> bool:
        """Whether the call provoked the outage. `sure`: whether the same call has failed repeatedly or timed out. Sets `note`."""
        task, others = self._call.task, self._others()
        later = [call for call in self._calls if call.number > self._since and (call.ok or call.episode != self._call.episode)]
        seen = {call.episode: call.ok for call in later}  # the newest call of each episode
        up = sum(seen.values())
        if len(seen) >= FEW and up < UP * len(seen):  # so at least FEW of them have failed
            return False
        answers_here = any(call.ok and call.task == task for call in self._calls)
        answers_others = any(call.ok for call in others)
        if not answers_here and any(call.task == task for call in others):
            self.note = "; the tool answers calls from other tasks, but none from this task" if answers_others else ""
            return False
        if up and answers_here and (sure or self._again):
            return True
        if not answers_others or (not up and self._failed_since() >= FEW):
            return False
        return not self._allowed()

    def _allowed(self) -> bool:
        """Returns whether the infrastructure may be blamed for an outage that no other call shows, and if so, marks the call. `ONE_IN`
        limits the number of episodes with marked calls."""
        spent = {call.episode for call in self._calls if call.alone}
        answered = {call.episode for call in self._calls if call.ok}
        if self._call.episode not in spent and len(spent) > len(answered) // ONE_IN:
            return False
        self._call.alone = True
        self.note = "; no other call shows an outage of the tool"
        return True

    def _failed_since(self) -> int:
        """Returns the number of other episodes in which the tool has failed since it last answered a call in one of them."""
        failed = set[str]()
        for call in reversed(self._others()):
            if call.ok:
                break
            failed.add(call.episode)
        return len(failed)

    def _others(self) -> list[_Call]:
        return [call for call in self._calls if call.episode != self._call.episode]
