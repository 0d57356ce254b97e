"""Compares the pace of the policy's server with its history in this run, and decides the blame if an episode uses up its time.

The policy is responsible for the amount that it samples. The machine is responsible if the server is much slower than usual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ServingError
from agentrl.records import Blame

SLOW_FACTOR = 2.0
"""A request is slow if it takes more than this multiple of the usual time for such requests. The time beyond the usual time is lost."""
LOST_SHARE = 0.1
"""If slow requests or stalls cost an episode more than this share of `Limits.wall_s`, the machine is to blame for the timeout."""
POLICY_SHARE = 0.5
"""If programs and sampling took at least this share of `Limits.wall_s`, the policy is to blame for the timeout."""
MIN_TOKENS_PER_S = 1.0
"""Minimum pace, in tokens per second, at which a request that was cut off is added to the history."""
FIRST_S = 10.0
"""Maximum seconds after which the first request of a turn is cut off if there is no history. Its tokens are the first measurement."""
REQUESTS_PER_EPISODE = 8
"""A request without a constraint is cut off at the latest after `Limits.wall_s` divided by this number, and then continued, so that a stall
within a long request is detected."""
CUT_S = 5.0
"""Maximum seconds reserved at the end of an episode to fetch the tokens of a request that is cut off."""
PROMPT_TOKEN_WORK = 0.125
"""Cost of computing one new prompt token, as a multiple of the cost of sampling one token."""
_FRESH = 16  # the medians are recomputed when a sixteenth of the history is new
_KEPT = 256  # number of requests remembered per size, spread over the run
_MEASURED = 16  # number of tokens that the measurement at the start counts as
_FIRST = 16  # number of requests after which the run's pace is compared with that measurement
_MOST_SIZES = 64


class OutOfTime(ServingError):
    """The episode's time ran out before a token of the turn was sampled."""


def fetch_reserve_s(limit_s: float) -> float:
    """Returns the seconds before the end of an episode's time at which a request in progress is cut off."""
    return min(CUT_S, 0.05 * limit_s)


def blame_for_timeout(limit_s: float, *, program_s: float, sampled_s: float, lost_s: float, stalled_s: float = 0.0) -> Blame:
    """Returns the blame for an episode that used up `Limits.wall_s`. The first rule whose condition is met applies:

    1. If slow requests, or stalls of the driver's event loop, cost more than a tenth of the time, the infrastructure is to blame.
    2. If programs and sampling at the server's usual pace took at least half of the time, the policy is to blame. All sampled tokens are
       scored.
    3. Otherwise, the infrastructure is to blame, for example because sandboxes open slowly.

    Args:
        program_s: seconds in programs that the agent called.
        sampled_s: seconds in requests; a slow request counts with the usual time for such requests.
        lost_s: seconds by which slow requests exceeded the usual time.
        stalled_s: seconds for which the driver's event loop was blocked (`agentrl.base.loop_lag.StallCount`).
    """
    if max(lost_s, stalled_s) > LOST_SHARE * limit_s:
        return Blame.INFRASTRUCTURE
    return Blame.POLICY if program_s + sampled_s >= POLICY_SHARE * limit_s else Blame.INFRASTRUCTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A finished request: its time, and the usual time for such requests."""

    tokens: int | None  # number of sampled tokens; None if unknown, because the policy cannot be cut off
    seconds: float  # including queueing and prefill
    in_flight: float  # mean number of requests in flight while it ran, including itself
    usual_s: float | None  # usual time; if `tokens` is unknown, for a request with the maximum number of tokens. None means no history

    @property
    def sampled_s(self) -> float:
        """Seconds that are attributed to the policy."""
        if self.tokens is None:
            return 0.0
        if self.usual_s is None:
            return self.seconds if self.tokens >= MIN_TOKENS_PER_S * self.seconds else 0.0
        return self.seconds if self.seconds <= SLOW_FACTOR * self.usual_s else self.usual_s

    @property
    def lost_s(self) -> float:
        """Seconds lost to a slow server."""
        if self.tokens is not None or self.usual_s is None:
            return self.seconds - self.sampled_s
        return 0.0 if self.seconds <= SLOW_FACTOR * self.usual_s else self.seconds - self.usual_s


class _History:
    """A sample of the run's requests: seconds per token, and tokens per second over all requests in flight."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, float, float]] = []  # seconds per token, tokens per second, tokens
        self._stride, self._skipped = 1, 0
        self._usual: tuple[float, float]  # set by the first call of `usual`
        self._newer = 0  # requests added since then

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
        """Returns the median seconds per token and the median tokens per second, weighted by tokens, so that a stall with few tokens has
        little weight."""
        if _FRESH * self._newer >= len(self._kept):  # sorting for each request would take longer than parsing its JSON
            self._newer = 0
            self._usual = _median([(one, tokens) for one, _, tokens in self._kept]), _median([(one, n) for _, one, n in self._kept])
        return self._usual

    def to_data(self) -> dict[str, Any]:
        """Returns the history as JSON data.

        Times and rates have three significant digits. Token counts are exact, because they are the weights of the medians.
        """
        return {
            "stride": self._stride,
            "requests": [[float(f"{pace:.3g}"), float(f"{rate:.3g}"), tokens] for pace, rate, tokens in self._kept],
        }

    @classmethod
    def from_data(cls, data: Any) -> _History:
        """Restores a history. Raises `ValueError` if `data` cannot come from `to_data`."""
        history = cls()
        try:
            history._stride = int(data["stride"])
            history._kept = [(float(one), float(all_), float(tokens)) for one, all_, tokens in data["requests"]]
        except (TypeError, LookupError, ValueError, OverflowError) as error:
            raise ValueError(f"not a history of requests: {error}") from None
        numbers = [value for entry in history._kept for value in entry]
        if history._stride < 1 or len(history._kept) > _KEPT or not all(0 < value < math.inf for value in numbers):
            raise ValueError("not a history of requests: a number is out of range")
        history._newer = len(history._kept)
        return history


def _median(weighted: list[tuple[float, float]]) -> float:
    half, so_far = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        so_far += weight
        if so_far >= half:
            return value
    raise ValueError("there are no values, so there is no median")


class RequestInProgress:
    """A request in progress; see `Pace.begin`."""

    def __init__(self, started: float, area: float, reads: int, read: int) -> None:
        self.started, self.area = started, area
        self.reads = reads  # new prompt tokens
        self.read = read  # number of new prompt tokens in all earlier requests


class Pace:
    """The request times in this run, measured by the client of the policy's server. Use an instance from only one event loop.

    A request that finished normally is compared with requests of a similar number of tokens (the same power of two). A request that was cut
    off is compared by its tokens per second, because the server decided how many tokens were sampled. The history covers the entire run, so
    that a slow server does not soon count as usual. A request is as fast as usual if either its time or the tokens per second of all
    requests in flight are as usual. Both are measured a second time with the prompt tokens that the server had to compute
    (`PROMPT_TOKEN_WORK`) for this request and for the requests that started in the meantime. A server therefore does not count as slower
    because it has more concurrent requests, and a policy cannot make it count as slow by sampling or reading more.

    Args:
        slots: number of requests that the servers decode concurrently; None means unknown.
    """

    def __init__(self, *, slots: int | None = None) -> None:
        self.in_flight = 0
        self.slots = slots
        self._all = _History()
        self._work = _History()  # including prompt tokens, in sampled tokens
        self._read = 0  # new prompt tokens so far
        self._sizes: dict[int, _History] = {}  # power of two of the number of tokens -> requests that finished normally
        self._measured_s: float | None = None  # seconds per token of the idle server, until `slow_start_alert` has used it
        self._area, self._at = 0.0, 0.0  # request-seconds so far, and the time of the last update

    @property
    def known(self) -> bool:
        """Whether there is any history."""
        return bool(self._all)

    @property
    def waiting(self) -> int:
        """The number of requests in flight beyond those that the servers decode concurrently."""
        return 0 if self.slots is None else max(0, self.in_flight - self.slots)

    def begin(self, now: float, *, reads: int = 0) -> RequestInProgress:
        """Registers a request. `reads`: prompt tokens that the server has not computed yet."""
        self._advance(now)
        self.in_flight += 1
        self._read += reads
        return RequestInProgress(now, self._area, reads, self._read - reads)

    def end(
        self, request: RequestInProgress, now: float, *, tokens: int | None, at_most: int, cut: bool = False, reads: int | None = None
    ) -> Reading:
        """Compares a finished request with the history and adds it.

        Args:
            tokens: number of sampled tokens; None means unknown.
            at_most: maximum number of tokens that was requested.
            cut: whether the request was cut off. If a request that was cut off has hardly any tokens, its time shows how long the server
                stalled, not how fast the server is, and is not added to the history.
            reads: prompt tokens that the server had to compute; None means the number passed to `begin`.
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
        if tokens and seconds > 0 and not (cut and tokens < MIN_TOKENS_PER_S * seconds):
            self._all.add(seconds, in_flight, tokens)
            work = tokens + PROMPT_TOKEN_WORK * reads
            self._work.add(seconds, (tokens * in_flight + PROMPT_TOKEN_WORK * (reads + others)) / work, work)
            if not cut:
                self._sizes.setdefault(tokens.bit_length(), _History()).add(seconds, in_flight, tokens)
        return Reading(tokens=tokens, seconds=seconds, in_flight=in_flight, usual_s=usual)

    def usual_s(self, tokens: int, in_flight: float, *, cut: bool = False, reads: int = 0, others: int = 0) -> float | None:
        """Returns the usual seconds for a request of `tokens` tokens with `in_flight` requests in flight; None if there is no history.

        The server computes `reads` prompt tokens for this request, and `others` for requests that started in the meantime. With `cut`,
        requests of all sizes are compared. Otherwise, if the history contains no request of this size, the next smaller size is scaled up.
        If there is no smaller size, the next larger size is used unchanged.
        """
        if not self._all:
            return None
        size = tokens.bit_length()
        smaller = [known_size for known_size in self._sizes if known_size <= size]
        if cut or not self._sizes:
            least, history = tokens, self._all
        elif smaller:
            least, history = tokens, self._sizes[max(smaller)]
        else:
            larger = min(self._sizes)
            least, history = 1 << (larger - 1), self._sizes[larger]
        seconds, throughput = history.usual()
        usual = max(least * seconds, tokens * in_flight / throughput)
        seconds, throughput = self._work.usual()
        return max(
            usual, (tokens + PROMPT_TOKEN_WORK * reads) * seconds, (tokens * in_flight + PROMPT_TOKEN_WORK * (reads + others)) / throughput
        )

    def set_idle_token_s(self, token_s: float) -> None:
        """Adds the time per token of an idle server to the history if the history is empty and the time is known (above 0).

        Until there are other measurements, all requests in flight are assumed to share this throughput, a lower bound for any server.
        """
        if self._all or not 0 < token_s < math.inf:
            return
        seconds = _MEASURED * token_s
        for history in (self._all, self._work, self._sizes.setdefault(_MEASURED.bit_length(), _History())):
            history.add(seconds, 1.0, _MEASURED)
        self._measured_s = token_s

    def slow_start_alert(self) -> str:
        """Returns an alert, only once, if the first requests were much slower than the measurement at the server's start; otherwise ""."""
        if self._measured_s is None or len(self._all) < _FIRST:
            return ""
        usual_s, throughput = self._all.usual()
        slower, self._measured_s = min(usual_s, 1 / throughput) / self._measured_s, None
        if slower <= SLOW_FACTOR:
            return ""
        return (
            f"the inference server was {slower:.1f} times slower for its first requests than in the measurement at its start\n  fix: find"
            " out which other programs use this machine; from now on, this pace is treated as the usual pace"
        )

    def to_data(self) -> dict[str, Any]:
        """Returns the history as JSON data."""
        sizes = {str(size): one.to_data() for size, one in self._sizes.items()}
        return {"all": self._all.to_data(), "work": self._work.to_data(), "sizes": sizes}

    def restore(self, data: Any) -> None:
        """Restores the history of an earlier process.

        Raises `ValueError`, and changes nothing, if `data` cannot come from `to_data`.
        """
        if not isinstance(data, dict) or not isinstance(sizes := data.get("sizes"), dict) or len(sizes) > _MOST_SIZES:
            raise ValueError("not a history of requests")
        histories = {int(size): _History.from_data(one) for size, one in sizes.items()}
        whole, work = _History.from_data(data.get("all")), _History.from_data(data.get("work"))
        if len(whole) != len(work):
            raise ValueError("not a history of requests: its lists differ in length")
        self._all, self._work = whole, work
        self._sizes = {size: one for size, one in histories.items() if len(one)}

    def _advance(self, now: float) -> None:
        self._area += self.in_flight * (now - self._at)
        self._at = now


@dataclass(slots=True)
class SamplingTime:
    """The time that one episode's requests took. Time during which several requests run concurrently counts once, divided among them."""

    before: tuple[float, float] = (0.0, 0.0)  # `sampled_s` and `lost_s` from an earlier process
    _running: int = 0
    _since: float = 0.0
    _wall_s: float = 0.0  # seconds with at least one request in flight
    _seconds: float = 0.0
    _sampled_s: float = 0.0
    _lost_s: float = 0.0
    newest: Reading | None = None

    def begin(self, now: float) -> None:
        """Registers a request."""
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float, reading: Reading) -> None:
        """Adds a finished request."""
        self._running -= 1
        if not self._running:
            self._wall_s += now - self._since
        self._seconds += reading.seconds
        self._sampled_s += reading.sampled_s
        self._lost_s += reading.lost_s
        self.newest = reading

    @property
    def sampled_s(self) -> float:
        """Seconds of sampling that are attributed to the policy."""
        return self.before[0] + self._sampled_s * self._share

    @property
    def lost_s(self) -> float:
        """Seconds lost to a slow server."""
        return self.before[1] + self._lost_s * self._share

    @property
    def _share(self) -> float:
        return self._wall_s / self._seconds if self._seconds > 0 else 0.0
