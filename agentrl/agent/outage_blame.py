"""Decides whether the call of one episode provoked a tool's outage, based on how the tool answered other calls.

An outage ends the attempt, which is retried in a fresh sandbox and excluded if the outage persists. An agent that can cause outages with
its arguments could therefore choose which of its episodes count. So evidence of an outage comes from calls of other episodes. "Later calls"
are those that ended after the call had failed (for a late call: after it started; for a retried episode: after its first outage). The
first rule that applies decides:

1. In later calls, the tool has failed at least `FEW` other episodes, and has answered less than the share `UP` of all others: it is down.
2. The tool has never answered an attempt at this task, and has failed another attempt at it: it is down for this task.
3. The tool has answered some later calls, and an attempt at this task, and the outage is confirmed: the same call failed repeatedly or got
   no answer in time (`sure`), or an earlier attempt of the episode had an outage too. The call provoked it.
4. The tool has never answered another episode, or it has answered no later call and failed the last `FEW` episodes: it is down.
5. Only this call shows the outage. Real outages of this kind are rare, so one in `ONE_IN` episodes may have such an outage. Otherwise, the
   call provoked it.

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
"""Share of other episodes that a tool must have answered to count as up. Otherwise it is down, regardless of the cause, and the run
pauses."""
FEW = 2
"""Minimum number of failed episodes that count as evidence. Another agent may have provoked a single failure."""
SEEN_DOWN = 4
"""A tool that has failed this many other episodes and answered none is down, without any more waiting."""
ONE_IN = 32
"""One in this many episodes that a tool answers may have an outage that no other call shows. The first such episode always may."""
_ATTEMPT = re.compile(r"-a\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The attempt that makes a call. The ids of the attempts of one episode differ only in their suffix, `-a0`, `-a1`."""

    attempt: str
    task: str

    @property
    def episode(self) -> str:
        """The episode's id, without the number of the attempt."""
        return _ATTEMPT.sub("", self.attempt)


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    number: int  # in the order in which calls ended
    episode: str
    task: str
    ok: bool
    alone: bool = False  # an outage that no other call showed and that was blamed on the infrastructure


class CallRecord:
    """The newest calls of a run's tools, by the name of the tool. Use a record from one event loop only."""

    def __init__(self) -> None:
        self.ended = 0
        """The number of calls that have ended so far."""
        self._calls: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._first: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()  # tool, episode -> number, attempt of its first outage

    def answered(self, tool: str, caller: Caller) -> None:
        """Records a successful call."""
        self._add(tool, caller, ok=True)

    def failed(self, tool: str, caller: Caller, *, since: int | None = None) -> OutageCase:
        """Records an outage and returns its case. `since`: for a late call, the value of `ended` when the call started."""
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
    """One undecided outage. Call `withdraw` if the call is answered after all."""

    def __init__(self, calls: deque[_Call], call: _Call, *, since: int, again: bool) -> None:
        self._calls, self._call, self._since, self._again = calls, call, since, again
        self.note = ""
        """Text that the outage's message should append; set by `provoked`."""

    @property
    def contested(self) -> bool:
        """Whether other calls can change the decision: the tool has answered a call, or has failed only a few other episodes so far."""
        return any(call.ok for call in self._calls) or len({call.episode for call in self._others()}) < SEEN_DOWN

    def withdraw(self) -> None:
        """Removes the call from the record, because it is not evidence about the tool."""
        if self._call in self._calls:
            self._calls.remove(self._call)

    def provoked(self, *, sure: bool) -> bool:
        """Whether the call provoked the outage. `sure`: whether the same call has failed repeatedly, or got no answer in time."""
        task, others = self._call.task, self._others()
        later = [call for call in self._calls if call.number > self._since and (call.ok or call.episode != self._call.episode)]
        seen = {call.episode: call.ok for call in later}  # the newest call of each episode
        up = sum(seen.values())
        if len(seen) >= FEW and up < UP * len(seen):  # so at least FEW have failed
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
        """Whether the infrastructure may be blamed for an outage that no other call shows. If so, counts the episode."""
        spent = {call.episode for call in self._calls if call.alone}
        answered = {call.episode for call in self._calls if call.ok}
        if self._call.episode not in spent and len(spent) > len(answered) // ONE_IN:
            return False
        self._call.alone = True
        self.note = "; no other call shows an outage of the tool"
        return True

    def _failed_since(self) -> int:
        """Returns the number of other episodes that the tool has failed since it answered one."""
        failed = set[str]()
        for call in reversed(self._others()):
            if call.ok:
                break
            failed.add(call.episode)
        return len(failed)

    def _others(self) -> list[_Call]:
        return [call for call in self._calls if call.episode != self._call.episode]
