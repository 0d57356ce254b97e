"""Repeats the actions of an attempt that ended with a fault, and decides whether these actions provoked the fault.

The policy may have caused a fault that occurs after its first turn. If the next attempt sampled new actions, or if the episode were finally
excluded, a policy that provokes faults when its episode goes badly would choose which of its episodes count. The next attempt therefore
repeats the completions of the earlier attempts as long as its contexts are equal to theirs. A machine fault does not depend on the actions,
so the repetition does not encounter it, and the episode contains the tokens that were sampled first.

The actions count as the cause of a fault if the fault ended three consecutive attempts of an episode, at least `MIN_OTHERS` episodes of
other groups used the same part, and hardly any of them encountered the fault. If the part is an environment, only episodes with the same
environment count. If an environment crashes its process, the repetition runs it in a separate process, so that it does not crash the
environments of other episodes again. If faults did not depend on the actions, two repetitions would encounter the fault with a probability
of at most `MAX_CHANCE` squared. An episode with a provoked fault is scored like every other failure of the policy. This module does not
decide the blame for tool faults, because an agent may be the only agent that calls a tool (`agentrl.agent.outage_blame`).
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from agentrl.records import Blame, Completion, Failure

PROVOKED = "provoked"
"""`Failure.kind` of a fault that the policy's actions provoked."""
ATTEMPTS = 3
"""Number of consecutive attempts that the same fault must have ended."""
MIN_OTHERS = 8
"""Number of episodes of other groups that must have used the part since the first of these faults."""
MAX_CHANCE = 0.1
"""Maximum estimated probability that an episode of another group encounters the fault: (episodes with the fault + 1) / (episodes + 2)."""
PATIENCE_S = 20.0
"""Maximum number of seconds to wait for episodes of other groups before the last attempt. There is no wait if no other group is running."""
GENERATE, SANDBOX = "generate", "sandbox"
"""Names of the parts that an episode may use: the policy's server and a sandbox. `part_in` returns the name of a part in an environment."""
_POLL_S = 0.1
_NEWEST = 1024  # number of events that are kept
_DECIDED_ELSEWHERE = ("score", "tool")  # stages
_IN_SANDBOXES = ("sandbox", "collect")


def part_in(environment: str, part: str = GENERATE) -> str:
    """Returns the name under which uses of a part are counted for an environment."""
    return f"{part} in {environment}"


def may_be_provoked(failure: Failure) -> bool:
    """Whether the policy's actions may have provoked the fault, so that the next attempt should repeat them."""
    return failure.policy_reachable and failure.stage not in _DECIDED_ELSEWHERE


class SampledTurns:
    """The completions of one episode's attempts, indexed by context. An attempt repeats each completion of the earlier attempts once.

    Args:
        used: called with `GENERATE` or `SANDBOX` after each successful use of that part.
    """

    def __init__(self, used: Callable[[str], None] = lambda part: None) -> None:
        self.used = used
        self.alone = False
        """Whether the next attempt's environment runs in a separate process."""
        self._earlier: dict[bytes, list[Completion]] = {}
        self._own: dict[bytes, list[Completion]] = {}

    async def complete(self, context: Sequence[int], sample: Callable[[], Awaitable[Completion]], *, most: int) -> Completion:
        """Returns the completion that an earlier attempt sampled in this context, or a new completion from `sample` if there is none."""
        completion = self.take(context, most=most)
        if completion is None:
            completion = await sample()
            self.used(GENERATE)
        self.add(context, completion)
        return completion

    def take(self, context: Sequence[int], *, most: int) -> Completion | None:
        """Removes and returns the next completion that an earlier attempt sampled in a context; None if there is none or it has more than
        `most` tokens."""
        left = self._earlier.get(_digest(context)) if self._earlier else None
        return left.pop(0) if left and len(left[0].token_ids) <= most else None

    def add(self, context: Sequence[int], completion: Completion) -> None:
        """Records a completion of the running attempt."""
        self._own.setdefault(_digest(context), []).append(completion)

    def end_attempt(self, *, repeat: bool, alone: bool = False) -> None:
        """Ends the running attempt. If `repeat` is true, the next attempt repeats the completions of this attempt, and those of earlier
        attempts that this attempt did not reach.

        Args:
            alone: whether the environments of all later attempts run in separate processes.
        """
        self.alone = self.alone or alone
        for key, left in self._earlier.items():
            self._own.setdefault(key, []).extend(left)
        self._earlier, self._own = self._own if repeat else {}, {}


class FaultHistory:
    """The parts that recent episodes of all groups used, and the faults that ended their first attempts. Use an instance from only one
    event loop.

    Faults in later attempts do not count, because these attempts repeat the first attempt.
    """

    def __init__(self) -> None:
        self.events = 0
        """The number of events so far."""
        self._running = Counter[str]()
        self._newest: OrderedDict[tuple[str, str, str], int] = OrderedDict()  # group, episode, part or fault -> number of the newest event

    @contextmanager
    def running(self, group: str) -> Iterator[None]:
        """Counts an attempt of a group as running."""
        self._running[group] += 1
        try:
            yield
        finally:
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]

    def record_use(self, group: str, episode: str, part: str) -> None:
        """Records that an episode used a part successfully."""
        self._record((group, episode, part))

    def record_fault(self, group: str, episode: str, fault: Failure) -> None:
        """Records the fault that ended an episode's first attempt."""
        self._record((group, episode, _name(fault)))

    def _record(self, event: tuple[str, str, str]) -> None:
        self.events += 1
        self._newest[event] = self.events
        self._newest.move_to_end(event)
        if len(self._newest) > _NEWEST:
            self._newest.popitem(last=False)

    async def wait_for_others(self, fault: Failure, group: str, *, since: int, environment: str = "") -> None:
        """Waits at most `PATIENCE_S` seconds until other groups' events after `since` show that hardly any episode encounters the fault."""
        for _ in range(round(PATIENCE_S / _POLL_S)):
            if self._others_are_well(fault, group, since, environment) or not self._running.keys() - {group}:
                return
            await asyncio.sleep(_POLL_S)

    def provoked(self, faults: Sequence[Failure], group: str, *, since: int, environment: str = "") -> Failure | None:
        """Returns the policy's failure if the actions provoked the faults that ended the attempts of an episode; otherwise None.

        Args:
            since: value of `events` at the first of the faults.
            environment: reference of the episode's environment, if it has one.
        """
        if len(faults) < ATTEMPTS or not all(map(may_be_provoked, faults)):
            return None
        last = faults[-1]
        if len(set(map(_name, faults))) > 1 or not self._others_are_well(last, group, since, environment):
            return None
        met, others = self._met_by_others(last, group, since, environment)
        message = (
            f"{_name(last)} ended {len(faults)} attempts that repeated the same actions, and in the same period {met} of {others}"
            f" episodes of other groups: {last.message}"
        )
        return Failure(stage=last.stage, blame=Blame.POLICY, kind=PROVOKED, message=message[:2000], turn=last.turn)

    def _others_are_well(self, fault: Failure, group: str, since: int, environment: str) -> bool:
        met, others = self._met_by_others(fault, group, since, environment)
        return others >= MIN_OTHERS and (met + 1) / (others + 2) <= MAX_CHANCE

    def _met_by_others(self, fault: Failure, group: str, since: int, environment: str) -> tuple[int, int]:
        """Returns how many episodes of other groups encountered the fault after `since`, and how many encountered it or used the part."""
        part = SANDBOX if fault.stage in _IN_SANDBOXES else GENERATE
        if fault.stage == "environment" and environment:
            part = part_in(environment)
        events = [(episode, what) for (other, episode, what), number in self._newest.items() if number > since and other != group]
        met = {episode for episode, what in events if what == _name(fault)}
        return len(met), len(met | {episode for episode, what in events if what == part})


def _name(fault: Failure) -> str:
    return f"{fault.stage} {fault.kind}"


def _digest(context: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", context).tobytes(), digest_size=16).digest()
