"""The pace of the policy's server, measured against its own history in this run, and whose doing it is when an episode runs out of time.

What a policy chooses to sample is the policy's. A server that takes much longer for it than it usually does is the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import ServingError
from agentrl.records import Blame

SLOW = 2.0
"""A request that takes longer than this multiple of the usual time of such requests is slow: what it takes beyond the usual is lost."""
LOST = 0.1
"""Share of `Limits.wall_s` that slow requests may cost an episode before the machine is blamed for its end."""
OWN = 0.5
"""Share of `Limits.wall_s` that the policy's programs and tokens must have taken before the policy is blamed for the end."""
FLOOR = 1.0
"""Tokens per second. A request that was cut off below this, before there is any history, is not evidence of a usual pace."""
FIRST_S = 10.0
"""Longest first part of a request while there is no history: it is cut off then, and its tokens are the first measure."""
PARTS = 8
"""A request takes at most this part of `Limits.wall_s`, then it is continued: so a stall in the middle of a long one is seen."""
CUT_S = 5.0
"""Time that is kept at the end of an episode for fetching the tokens of a request that is cut off."""
READ = 0.125
"""Work of a token of the prompt that the server has not computed yet, as a part of that of a sampled token."""
_FRESH = 16  # the medians are computed again when a sixteenth of the history is new
_KEPT = 256  # requests of each size, spread over the run


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
        sampled_s: requests; of a slow one (`SLOW`), the usual time of such requests.
        lost_s: slow requests, what they took beyond the usual.
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
        return self.seconds if self.seconds <= SLOW * self.usual_s else self.usual_s

    @property
    def lost_s(self) -> float:
        """Seconds that the server was slow."""
        if self.tokens is not None or self.usual_s is None:
            return self.seconds - self.sampled_s
        return 0.0 if self.seconds <= SLOW * self.usual_s else self.seconds - self.usual_s


class _Kept:
    """Seconds per token, and tokens per second of all requests in flight, of requests that are spread over the whole run."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, float, float]] = []  # and the tokens
        self._stride, self._skipped = 1, 0
        self._usual = (0.0, 0.0)
        self._newer = 0  # requests since it was computed

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, seconds: float, in_flight: float, tokens: float) -> None:
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped, self._newer = 0, self._newer + 1
        self._kept.append((seconds / tokens, tokens * in_flight / seconds, tokens))
        if len(self._kept) > _KEPT:
            del self._kept[::2]
            self._stride *= 2

    def usual(self) -> tuple[float, float]:
        """The medians over tokens, so that a stall, in which there are few, weighs little."""
        if _FRESH * self._newer >= len(self._kept):  # to sort them at each request would take more time than the request's own JSON
            self._newer = 0
            self._usual = _median([(one, tokens) for one, _, tokens in self._kept]), _median([(one, n) for _, one, n in self._kept])
        return self._usual


def _median(weighted: list[tuple[float, float]]) -> float:
    half, so_far = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        so_far += weight
        if so_far >= half:
            return value
    raise ValueError("the median of nothing")


class Request:
    """One request in progress; see `Pace.begin`."""

    def __init__(self, started: float, area: float, reads: int, read: int) -> None:
        self.started, self.area = started, area
        self.reads = reads  # tokens of the prompt that the server has not computed yet
        self.read = read  # those of all requests before it


class Pace:
    """What the requests of this run took, as the client of the policy's server sees them. Use it from one event loop.

    A request that ended by itself is compared with those of about as many tokens (the same power of two), and one that was cut off by its
    tokens per second, since how many tokens it has is the server's doing. The history is of the whole run, so that slowness does not soon
    become usual. A request is as fast as usual if either of two measures is: its own time, or the tokens per second of all requests in
    flight, by which a server that serves more requests at once is not a slower one. Both measures are also taken with the tokens of
    prompts that the server had to compute (`READ`), those of requests that began meanwhile included. So a policy cannot slow the server
    down by sampling more, or by reading more.

    Args:
        slots: requests that the servers decode at once; None: not known.
    """

    def __init__(self, *, slots: int | None = None) -> None:
        self.in_flight = 0
        self.slots = slots
        self._all = _Kept()
        self._work = _Kept()  # with what was read, in sampled tokens
        self._read = 0  # tokens of prompts so far that the servers had to compute
        self._sizes: dict[int, _Kept] = {}  # of requests that ended by themselves, by the power of two of their tokens
        self._area, self._at = 0.0, 0.0  # request-seconds so far, and when they were added up

    @property
    def known(self) -> bool:
        """Whether there is any history."""
        return bool(self._all)

    @property
    def waiting(self) -> int:
        """Requests in flight beyond what the servers decode at once."""
        return 0 if self.slots is None else max(0, self.in_flight - self.slots)

    def begin(self, now: float, *, reads: int = 0) -> Request:
        """`reads`: tokens of the prompt that the server has not computed yet."""
        self._advance(now)
        self.in_flight += 1
        self._read += reads
        return Request(now, self._area, reads, self._read - reads)

    def end(
        self, request: Request, now: float, *, tokens: int | None, at_most: int, cut: bool = False, reads: int | None = None
    ) -> Reading:
        """Takes a request that has ended into the history, after comparing it with the history so far.

        Args:
            tokens: sampled; None: not known.
            at_most: tokens that were asked for.
            cut: whether it was cut off. One that had hardly begun says how long the server was stalled, not how fast it is.
            reads: those that it really had to compute; None: as many as `begin` was given.
        """
        self._advance(now)
        self.in_flight -= 1
        seconds = max(0.0, now - request.started)
        in_flight = (self._area - request.area) / seconds if seconds > 0 else 1.0
        reads = request.reads if reads is None else reads
        self._read += reads - request.reads
        others = self._read - request.read - reads
        count = at_most if tokens is None else max(1, tokens)
        usual = self.usual_s(count, in_flight, cut=cut or tokens is None, reads=reads, others=others)
        if tokens and seconds > 0 and not (cut and tokens < FLOOR * seconds):
            self._all.add(seconds, in_flight, tokens)
            work = tokens + READ * reads
            self._work.add(seconds, (tokens * in_flight + READ * (reads + others)) / work, work)
            if not cut:
                self._sizes.setdefault(tokens.bit_length(), _Kept()).add(seconds, in_flight, tokens)
        return Reading(tokens=tokens, seconds=seconds, in_flight=in_flight, usual_s=usual)

    def usual_s(self, tokens: int, in_flight: float, *, cut: bool = False, reads: int = 0, others: int = 0) -> float | None:
        """Seconds that a request of so many tokens usually takes with so many in flight; None without history. It reads `reads` tokens,
        and those that began meanwhile read `others`.

        If none was of this size, the next smaller size is scaled up; if there is none, the next larger one is taken as it is.
        """
        if not self._all:
            return None
        size = tokens.bit_length()
        smaller = [one for one in self._sizes if one <= size]
        if cut or not self._sizes:
            least, kept = tokens, self._all
        elif smaller:
            least, kept = tokens, self._sizes[max(smaller)]
        else:
            larger = min(self._sizes)
            least, kept = 1 << (larger - 1), self._sizes[larger]
        seconds, throughput = kept.usual()
        usual = max(least * seconds, tokens * in_flight / throughput)
        seconds, throughput = self._work.usual()
        return max(usual, (tokens + READ * reads) * seconds, (tokens * in_flight + READ * (reads + others)) / throughput)

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
