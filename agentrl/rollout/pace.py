"""The pace of the policy's server, measured against its own history in this run, and whose doing it is when an episode runs out of time.

What a policy chooses to sample is the policy's. A server that takes much longer for it than it usually does is the machine's.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from agentrl.errors import ServingError
from agentrl.records import Blame

SLOW = 2.0
"""A request is slow from this multiple of the usual time of such requests on; up to it, its time is the policy's."""
LOST = 0.1
"""Share of `Limits.wall_s` that slow requests may cost an episode before the machine is blamed for its end."""
OWN = 0.5
"""Share of `Limits.wall_s` that the policy's programs and tokens must have taken before the policy is blamed for the end."""
FLOOR = 1.0
"""Tokens per second. A request that was cut off below this, before there is any history, is not evidence of a usual pace."""
FIRST_S = 10.0
"""Longest first part of a request while there is no history: it is cut off then, and its tokens are the first measure."""
CUT_S = 5.0
"""Time that is kept at the end of an episode for fetching the tokens of a request that is cut off."""
_KEPT = 128  # requests of each size, spread over the run


class OutOfTime(ServingError):
    """The episode's time ended before a token of the turn was sampled."""


def cut_s(limit_s: float) -> float:
    """Seconds before the end of an episode's time at which a request in progress is cut off."""
    return min(CUT_S, 0.05 * limit_s)


def out_of_time(limit_s: float, *, program_s: float, sampled_s: float, lost_s: float) -> Blame:
    """Who is to blame for an episode that used up `Limits.wall_s`. The rule, in this order:

    1. Slow requests cost it more than a tenth of the time: the machine. A stalled server never costs a score.
    2. Its programs and its tokens, at the pace that the server usually has, took at least half of the time: the policy. It is scored,
       with every token that it sampled.
    3. Otherwise the machine: sandboxes that open slowly, a driver that is held up.

    Args:
        program_s: what the agent called.
        sampled_s: requests, each up to `SLOW` times the usual time of such requests.
        lost_s: requests, what each took beyond that.
    """
    if lost_s > LOST * limit_s:
        return Blame.INFRASTRUCTURE
    return Blame.POLICY if program_s + sampled_s >= OWN * limit_s else Blame.INFRASTRUCTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One request that has ended: what it took, and what such requests usually take."""

    tokens: int | None  # sampled; None: not known, because its policy cannot be cut off
    seconds: float  # queueing and prefill included
    in_flight: float  # requests at the same time, itself included: the mean while it ran
    usual_s: float | None  # of such requests; with unknown tokens, of one with the most tokens that it might sample; None: no history

    @property
    def sampled_s(self) -> float:
        """Seconds that are the policy's."""
        if self.tokens is None:
            return 0.0
        if self.usual_s is None:
            return self.seconds if self.tokens >= FLOOR * self.seconds else 0.0
        return min(self.seconds, SLOW * self.usual_s)

    @property
    def lost_s(self) -> float:
        """Seconds that the server was slow."""
        if self.tokens is not None or self.usual_s is None:
            return self.seconds - self.sampled_s
        return max(0.0, self.seconds - SLOW * self.usual_s)


@dataclass(slots=True)
class _Size:
    """Requests of about one size."""

    seconds: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)  # tokens per second of all requests in flight
    stride: int = 1
    skipped: int = 0
    medians: tuple[float, float] | None = None

    def add(self, seconds: float, throughput: float) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped, self.medians = 0, None
        self.seconds.append(seconds)
        self.throughput.append(throughput)
        if len(self.seconds) > _KEPT:  # every other one goes, so that what is kept is spread over the whole run
            del self.seconds[::2], self.throughput[::2]
            self.stride *= 2

    def usual(self) -> tuple[float, float]:
        if self.medians is None:
            self.medians = statistics.median(self.seconds), statistics.median(self.throughput)
        return self.medians


class Request:
    """One request in progress; see `Pace.begin`."""

    def __init__(self, started: float, area: float) -> None:
        self.started, self.area = started, area


class Pace:
    """What the requests of this run took, as the client of the policy's server sees them. Use it from one event loop.

    Requests are compared with those of about as many tokens (the same power of two), over the whole run, so that an hour of slowness does
    not become the usual pace in an instant. A request is as fast as usual if either of two measures is: its own seconds, or the tokens
    per second of all requests in flight, by which a server that serves more requests at once is not a slower one. So a policy cannot slow
    the server down by sampling more.

    Args:
        slots: requests that the servers decode at once; None: not known.
    """

    def __init__(self, *, slots: int | None = None) -> None:
        self.in_flight = 0
        self.slots = slots
        self._sizes: dict[int, _Size] = {}
        self._area, self._at = 0.0, 0.0  # request-seconds so far, and when they were added up

    @property
    def known(self) -> bool:
        """Whether there is any history."""
        return bool(self._sizes)

    @property
    def waiting(self) -> int:
        """Requests in flight beyond what the servers decode at once."""
        return 0 if self.slots is None else max(0, self.in_flight - self.slots)

    def begin(self, now: float) -> Request:
        self._advance(now)
        self.in_flight += 1
        return Request(now, self._area)

    def end(self, request: Request, now: float, *, tokens: int | None, at_most: int, cut: bool = False) -> Reading:
        """Takes a request that has ended into the history, after comparing it with the history so far.

        Args:
            tokens: sampled; None: not known.
            at_most: tokens that were asked for.
            cut: whether it was cut off. One that had hardly begun says how long the server was stalled, not how fast it is.
        """
        self._advance(now)
        self.in_flight -= 1
        seconds = max(0.0, now - request.started)
        in_flight = (self._area - request.area) / seconds if seconds > 0 else 1.0
        usual = self.usual_s(at_most if tokens is None else max(1, tokens), in_flight)
        if tokens and seconds > 0 and not (cut and tokens < FLOOR * seconds):
            self._sizes.setdefault(tokens.bit_length(), _Size()).add(seconds, tokens * in_flight / seconds)
        return Reading(tokens=tokens, seconds=seconds, in_flight=in_flight, usual_s=usual)

    def usual_s(self, tokens: int, in_flight: float) -> float | None:
        """Seconds that a request of so many tokens usually takes with so many in flight; None without history.

        Where none was of this size, the next smaller size is scaled up; where there is none, the next larger one is taken as it is.
        """
        if not self._sizes:
            return None
        size = tokens.bit_length()
        smaller = [one for one in self._sizes if one <= size]
        nearest = max(smaller) if smaller else min(self._sizes)
        seconds, throughput = self._sizes[nearest].usual()
        return float(max(seconds * 2 ** max(0, size - nearest), tokens * in_flight / throughput))

    def _advance(self, now: float) -> None:
        self._area += self.in_flight * (now - self._at)
        self._at = now


@dataclass(slots=True)
class SamplingTime:
    """What the requests of one episode took. Time in which several ran counts once, in the proportions of all of them."""

    before: tuple[float, float] = (0.0, 0.0)  # `sampled_s` and `lost_s` of an earlier part of the episode
    _running: int = 0
    _since: float = 0.0
    _wall_s: float = 0.0  # in which any ran
    _seconds: float = 0.0
    _sampled_s: float = 0.0
    _lost_s: float = 0.0
    newest: Reading | None = None

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float, reading: Reading) -> None:
        self._running -= 1
        if not self._running:
            self._wall_s += now - self._since
        self._seconds += reading.seconds
        self._sampled_s += reading.sampled_s
        self._lost_s += reading.lost_s
        self.newest = reading

    @property
    def sampled_s(self) -> float:
        return self.before[0] + self._sampled_s * self._share

    @property
    def lost_s(self) -> float:
        return self.before[1] + self._lost_s * self._share

    @property
    def _share(self) -> float:
        return self._wall_s / self._seconds if self._seconds > 0 else 0.0
