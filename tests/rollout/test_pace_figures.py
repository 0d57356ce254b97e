"""The figures of the pace: exact values of each formula, and all requests of a run compared with a slow computation of the definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.records import Blame
from agentrl.rollout.pace import Pace, Reading, SamplingTime, _median, blame_for_timeout, fetch_reserve_s
from tests.strategies import examples

READ = 0.125  # work of computing one prompt token, in sampled tokens


@pytest.mark.parametrize(
    ("program_s", "sampled_s", "lost_s", "blame"),
    [
        (50.0, 0.0, 10.0, Blame.POLICY),  # both bounds are reached exactly
        (30.0, 20.0, 0.0, Blame.POLICY),
        (20.0, 30.0, 5.0, Blame.POLICY),
        (20.0, 29.9, 0.0, Blame.INFRASTRUCTURE),
        (0.0, 90.0, 10.1, Blame.INFRASTRUCTURE),
    ],
)
def test_the_bounds_of_the_rule(program_s: float, sampled_s: float, lost_s: float, blame: Blame) -> None:
    assert blame_for_timeout(100.0, program_s=program_s, sampled_s=sampled_s, lost_s=lost_s) is blame


def test_the_time_reserved_for_a_cut_is_a_twentieth_and_at_most_5_seconds() -> None:
    assert [fetch_reserve_s(limit_s) for limit_s in (10.0, 60.0, 100.0, 1000.0)] == [0.5, 3.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("tokens", "seconds", "usual_s", "sampled_s", "lost_s"),
    [
        (10, 10.0, None, 10.0, 0.0),  # one token per second is just enough without a history
        (9, 10.0, None, 0.0, 10.0),
        (10, 10.0, 5.0, 10.0, 0.0),  # twice the usual time is not slow yet
        (10, 11.0, 5.0, 5.0, 6.0),
        (None, 10.0, None, 0.0, 10.0),
        (None, 10.0, 5.0, 0.0, 0.0),
        (None, 11.0, 5.0, 0.0, 6.0),
    ],
)
def test_sampled_and_lost_time_of_a_request(
    tokens: int | None, seconds: float, usual_s: float | None, sampled_s: float, lost_s: float
) -> None:
    reading = Reading(tokens=tokens, seconds=seconds, in_flight=1.0, usual_s=usual_s)
    assert (reading.sampled_s, reading.lost_s) == (sampled_s, lost_s)


def test_the_median_over_weights() -> None:
    assert _median([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]) == 2.0, "half of the weight is enough"
    assert _median([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]) == 2.0
    assert _median([(3.0, 0.5), (1.0, 0.4)]) == 3.0
    with pytest.raises(ValueError, match="there are no values, so there is no median"):
        _median([])


@dataclass(frozen=True, slots=True)
class Played:
    """One request: its start and end, its sampled tokens, and the prompt tokens that the server computes for it."""

    begins: float
    seconds: float
    tokens: int | None
    at_most: int
    cut: bool
    reads: int

    @property
    def ends(self) -> float:
        return self.begins + self.seconds


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    total = math.fsum(weight for _, weight in values)
    return min(value for value, _ in values if 2 * math.fsum(weight for other, weight in values if other <= value) >= total * (1 - 1e-12))


def load(subject: Played, requests: Sequence[Played]) -> float:
    """Returns the mean number of requests in flight during a request."""
    shared = (max(0.0, min(subject.ends, other.ends) - max(subject.begins, other.begins)) for other in requests)
    return math.fsum(shared) / subject.seconds


def others_read(subject: Played, requests: Sequence[Played]) -> int:
    return sum(other.reads for other in requests if subject.begins < other.begins < subject.ends)


def usual(subject: Played, ended: Sequence[Played], requests: Sequence[Played]) -> float | None:
    """Computes `Pace.usual_s` by its definition, from all requests."""
    counted = [other for other in ended if other.tokens and not (other.cut and other.tokens < other.seconds)]
    if not counted:
        return None
    count = subject.at_most if subject.tokens is None else max(1, subject.tokens)
    uncut = [other for other in counted if not other.cut]
    sizes = {int(math.log2(other.tokens or 1)) for other in uncut}
    alike, least = counted, count
    if sizes and not subject.cut and subject.tokens is not None:
        below = [size for size in sizes if 2**size <= count]
        size = max(below) if below else min(sizes)
        alike = [other for other in uncut if int(math.log2(other.tokens or 1)) == size]
        least = count if below else 2**size
    per_token = weighted_median([(other.seconds / (other.tokens or 1), other.tokens or 1) for other in alike])
    rate = weighted_median([((other.tokens or 1) * load(other, requests) / other.seconds, other.tokens or 1) for other in alike])
    flight, works = load(subject, requests), []
    for other in counted:
        work = (other.tokens or 1) + READ * other.reads
        all_work = (other.tokens or 1) * load(other, requests) + READ * (other.reads + others_read(other, requests))
        works.append((other.seconds / work, all_work / other.seconds, work))
    per_work = weighted_median([(value, weight) for value, _, weight in works])
    work_rate = weighted_median([(value, weight) for _, value, weight in works])
    own_work = (count + READ * subject.reads) * per_work
    all_work_s = (count * flight + READ * (subject.reads + others_read(subject, requests))) / work_rate
    return max(least * per_token, count * flight / rate, own_work, all_work_s)


played = st.builds(
    Played,
    begins=st.floats(0.0, 60.0),
    seconds=st.floats(0.25, 40.0),
    tokens=st.none() | st.integers(0, 600),
    at_most=st.integers(1, 600),
    cut=st.booleans(),
    reads=st.just(0) | st.integers(1, 3000),
)


@given(requests=st.lists(played, min_size=2, max_size=10, unique_by=(lambda subject: subject.begins, lambda subject: subject.ends)))
@settings(max_examples=examples(100))
def test_every_request_of_a_run_has_the_usual_time_of_its_definition(requests: list[Played]) -> None:
    pace, running, ended = Pace(), {}, list[Played]()
    events = sorted(
        [(subject.begins, 1, number) for number, subject in enumerate(requests)]
        + [(subject.ends, 0, n) for n, subject in enumerate(requests)]
    )
    for at, begins, number in events:
        subject = requests[number]
        if begins:
            running[number] = pace.begin(at, reads=subject.reads)
            continue
        reading = pace.end(running.pop(number), at, tokens=subject.tokens, at_most=subject.at_most, cut=subject.cut)
        assert reading.seconds == pytest.approx(subject.seconds) and reading.tokens == subject.tokens
        assert reading.in_flight == pytest.approx(load(subject, requests))
        expected = usual(subject, ended, requests)
        assert reading.usual_s == (None if expected is None else pytest.approx(expected, rel=1e-6))
        assert pace.in_flight == len(running)
        ended.append(subject)


def test_a_request_without_duration_is_not_a_measurement() -> None:
    pace = Pace()
    reading = pace.end(pace.begin(5.0), 5.0, tokens=10, at_most=10)
    assert (reading.seconds, reading.in_flight, pace.known) == (0.0, 1.0, False)
    assert pace.end(pace.begin(9.0), 8.0, tokens=10, at_most=10).seconds == 0.0, "a clock that was set back"


def test_prompt_tokens_corrected_at_the_end_replace_those_of_the_beginning() -> None:
    pace = Pace()
    pace.end(pace.begin(0.0, reads=8), 10.0, tokens=100, at_most=100, reads=800)
    (row,) = pace.to_data()["work"]["requests"]
    assert row == [0.05, 20.0, 200.0], "100 tokens and the work of another 100 in 10 s"
    request = pace.begin(10.0)
    other = pace.begin(11.0, reads=80)
    pace.end(other, 15.0, tokens=100, at_most=100, reads=160)
    pace.end(request, 20.0, tokens=100, at_most=100)
    assert pace.to_data()["work"]["requests"][-1] == [0.1, 16.0, 100.0], "(100 * 1.4 + 160 / 8) / 10 s"


def test_a_request_without_prompt_tokens_counts_only_its_sampled_tokens() -> None:
    pace = Pace()
    pace.end(pace.begin(0.0), 10.0, tokens=1, at_most=1)
    assert pace.to_data()["work"]["requests"] == [[10.0, 0.1, 1]] and pace.usual_s(1, 1.0) == 10.0


def test_requests_wait_beyond_the_slots() -> None:
    pace, unknown = Pace(slots=2), Pace()
    waiting = []
    for _ in range(4):
        pace.begin(0.0)
        unknown.begin(0.0)
        waiting.append(pace.waiting)
    assert waiting == [0, 0, 1, 2] and unknown.waiting == 0


def used(pace: Pace, tokens: int, seconds: float, *, at: float = 0.0, cut: bool = False) -> float:
    """Adds one request, and returns its end time."""
    pace.end(pace.begin(at), at + seconds, tokens=tokens, at_most=tokens, cut=cut)
    return at + seconds


def test_a_cut_request_enters_the_history_from_1_token_per_second() -> None:
    for tokens, known in ((9, False), (10, True)):
        pace = Pace()
        used(pace, tokens, 10.0, cut=True)
        assert pace.known is known and pace.to_data()["sizes"] == {}
    pace = Pace()
    used(pace, 9, 10.0)
    assert list(pace.to_data()["sizes"]) == ["4"], "it ended normally"


def test_the_history_keeps_every_second_request_each_time_it_is_full() -> None:
    pace, now = Pace(), 0.0
    for _ in range(600):
        now = used(pace, 100, 1.0, at=now)
    history = pace.to_data()["all"]
    assert (history["stride"], len(history["requests"])) == (4, 149)
    restored = Pace()
    restored.restore(pace.to_data())
    sizes = []
    for _ in range(4):
        now = used(restored, 100, 1.0, at=now)
        sizes.append(len(restored.to_data()["all"]["requests"]))
    assert sizes == [149, 149, 149, 150]


def test_the_medians_are_computed_again_when_a_sixteenth_of_the_history_is_new() -> None:
    pace, now = Pace(), 0.0
    for _ in range(15):
        now = used(pace, 100, 10.0, at=now)
        pace.usual_s(1, 1.0, cut=True)
    now = used(pace, 100_000, 100_000.0, at=now)
    assert pace.usual_s(1, 1.0, cut=True) == 1.0, "1 of 16"
    now = used(pace, 10_000_000, 100_000_000.0, at=now)
    assert pace.usual_s(1, 1.0, cut=True) == 1.0, "1 of 17"
    used(pace, 100, 10.0, at=now)
    assert pace.usual_s(1, 1.0, cut=True) == 10.0, "2 of 18"


def test_a_measurement_weighs_16_tokens() -> None:
    pace = Pace()
    pace.set_idle_token_s(0.5)
    used(pace, 16, 16.0)
    assert pace.usual_s(1, 1.0, cut=True) == 1.0, "half of the weight is slow"
    pace = Pace()
    pace.set_idle_token_s(0.5)
    used(pace, 15, 15.0)
    assert pace.usual_s(1, 1.0, cut=True) == 0.5


def test_the_start_is_compared_after_16_measurements_and_reported_beyond_twice_the_time() -> None:
    pace, now = Pace(), 0.0
    pace.set_idle_token_s(0.5)
    for number in range(15):
        assert pace.slow_start_alert() == "", number
        now = used(pace, 64, 64.5, at=now)
    assert "2.0 times slower" in pace.slow_start_alert()
    even, now = Pace(), 0.0
    even.set_idle_token_s(0.5)
    for _ in range(40):
        now = used(even, 64, 64.0, at=now)
    assert even.slow_start_alert() == "", "twice is not slow yet"


def test_a_batch_that_shares_the_measured_throughput_is_not_a_slow_start() -> None:
    pace = Pace()
    pace.set_idle_token_s(0.5)
    for round_ in range(4):
        requests = [pace.begin(1000.0 * round_) for _ in range(8)]
        for request in requests:  # 8 * 64 tokens at 0.75 s each
            pace.end(request, 1000.0 * round_ + 8 * 64 * 0.75, tokens=64, at_most=64)
    assert pace.slow_start_alert() == ""


def stored(rows: Sequence[Sequence[float]], *, stride: int = 1, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    history = {"stride": stride, "requests": [list(row) for row in rows]}
    return {"all": history, "work": history, "sizes": sizes or {}}


@pytest.mark.parametrize(
    "data",
    [
        stored([[0.5, 0.5, 0.5]]),
        stored([[1.0, 1.0, 1.0]] * 256),
        stored([], sizes={str(size): {"stride": 1, "requests": []} for size in range(64)}),
        stored([[1.0, 1.0, 1.0]], sizes={"1": {"stride": 1, "requests": [[1.0, 1.0, 1.0]]}}),
    ],
    ids=["small numbers", "the most requests", "the most sizes", "a size"],
)
def test_histories_up_to_the_bounds_are_restored(data: dict[str, Any]) -> None:
    pace = Pace()
    pace.restore(data)
    restored = pace.to_data()
    assert restored["all"] == data["all"] and restored["work"] == data["work"]
    assert restored["sizes"] == {size: history for size, history in data["sizes"].items() if history["requests"]}


@pytest.mark.parametrize(
    "data",
    [
        stored([[0.0, 1.0, 1.0]]),
        stored([[1.0, math.inf, 1.0]]),
        stored([[1.0, 1.0, -1.0]]),
        stored([[1.0, 1.0, 1.0]] * 257),
        stored([[1.0, 1.0, 1.0]], stride=0),
        stored([], sizes={str(size): {"stride": 1, "requests": []} for size in range(65)}),
        {**stored([]), "sizes": []},
        {**stored([]), "work": stored([[1.0, 1.0, 1.0]])["all"]},
    ],
    ids=["zero", "infinite", "negative", "too many", "no stride", "too many sizes", "sizes in a list", "different lengths"],
)
def test_histories_beyond_the_bounds_raise_an_error(data: dict[str, Any]) -> None:
    pace = Pace()
    used(pace, 100, 10.0)
    before = pace.to_data()
    with pytest.raises(ValueError, match="history of requests"):
        pace.restore(data)
    assert pace.to_data() == before


def reading(seconds: float, *, usual_s: float | None = None, tokens: int = 1000) -> Reading:
    return Reading(tokens=tokens, seconds=seconds, in_flight=1.0, usual_s=usual_s)


def test_time_in_which_several_requests_ran_counts_once() -> None:
    time = SamplingTime(before=(3.0, 5.0))
    assert (time.sampled_s, time.lost_s, time.newest) == (3.0, 5.0, None)
    time.begin(10.0)
    time.begin(12.0)
    time.end(16.0, reading(6.0))
    time.end(20.0, last := reading(8.0, usual_s=2.0))
    # 10 s of wall time and 14 s in requests: 8 sampled, 6 lost
    assert time.sampled_s == pytest.approx(3.0 + 8.0 * 10 / 14) and time.lost_s == pytest.approx(5.0 + 6.0 * 10 / 14)
    time.begin(100.0)
    time.end(104.0, last := reading(4.0))
    assert time.sampled_s == pytest.approx(3.0 + 12.0 * 14 / 18) and time.lost_s == pytest.approx(5.0 + 6.0 * 14 / 18)
    assert time.newest is last


def test_the_time_of_the_first_request_counts_as_sampling_time() -> None:
    time = SamplingTime()
    time.begin(0.0)
    time.end(0.5, reading(0.5))
    assert (time.sampled_s, time.lost_s) == (0.5, 0.0)
