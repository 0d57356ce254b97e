"""The requests of one episode: their deadlines, continuations, times, and the failure of an episode that ran out of time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from agentrl.records import CUT, Blame, Completion, Failure, SamplingParams, VersionSpan
from agentrl.rollout.pace import OutOfTime, Pace, Reading, RequestInProgress, SamplingTime
from agentrl.rollout.requests import ADVICE, EpisodeRequests, SlowServer
from agentrl.testing.clock import run_virtually

TOKEN = 7


@dataclass(frozen=True, slots=True)
class Part:
    """A server's answer to one request. `versions`: those of its first tokens in order; the others have the first version."""

    seconds: float
    tokens: int
    finish_reason: str = "stop"
    versions: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Call:
    token_ids: tuple[int, ...]
    max_tokens: int
    request_id: str
    timeout_s: float


class Server:
    """A policy with planned answers."""

    def __init__(self, *parts: Part) -> None:
        self._parts = list(parts)
        self.calls: list[Call] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        self.calls.append(Call(tuple(prompt_ids), params.max_tokens, request_id, timeout_s))
        part = self._parts.pop(0)
        await asyncio.sleep(part.seconds)
        starts = range(len(part.versions)) if part.tokens else ()
        ends = [*list(starts)[1:], part.tokens]
        return Completion(
            token_ids=(TOKEN,) * part.tokens,
            logprobs=(-0.5,) * part.tokens,
            versions=tuple(VersionSpan(version=part.versions[n], start=n, end=ends[n]) for n in starts),
            finish_reason=part.finish_reason,
        )


class Watched(Pace):
    """Records the prompt tokens of each request at its start and end."""

    def __init__(self, token_s: float | None = None) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.corrected: list[int | None] = []
        if token_s is not None:
            self.set_idle_token_s(token_s)

    def begin(self, now: float, *, reads: int = 0) -> RequestInProgress:
        self.begun.append(reads)
        return super().begin(now, reads=reads)

    def end(self, *arguments: Any, reads: int | None = None, **options: Any) -> Reading:
        self.corrected.append(reads)
        return super().end(*arguments, reads=reads, **options)


def requests_of(
    server: Server, pace: Pace | None = None, *, limit_s: float = 80.0, timeout_s: float = 30.0, spent_s: float = 0.0
) -> EpisodeRequests:
    return EpisodeRequests(
        policy=server,
        pace=pace or Pace(),
        limit_s=limit_s,
        timeout_s=timeout_s,
        spent_s=lambda: spent_s + asyncio.get_running_loop().time(),
        sampling=SamplingTime(),
    )


def sampled(requests: EpisodeRequests, *, constraint: str = "", max_tokens: int = 100, reads: int = 0, times: int = 1) -> list[Completion]:
    """Samples sequential turns with the prompt `1, 2`."""

    async def sample() -> list[Completion]:
        return [
            await requests.sample(
                [1, 2], lambda most: SamplingParams(max_tokens=most, constraint=constraint), max_tokens, f"r{number}", reads=reads
            )
            for number in range(times)
        ]

    return run_virtually(sample())


@pytest.mark.parametrize(
    ("limit_s", "timeout_s", "spent_s", "known", "constraint", "expected_s"),
    [
        (80.0, 30.0, 0.0, False, "", 5.0),  # an eighth of the limit, and half of that while there is no history
        (800.0, 30.0, 0.0, False, "", 10.0),  # without a history at most 10 s
        (80.0, 30.0, 0.0, True, "", 10.0),
        (80.0, 7.0, 0.0, True, "", 7.0),
        (80.0, 30.0, 70.0, True, "", 6.0),  # the time left, less 4 s for the cut
        (80.0, 30.0, 75.5, True, "", 0.5),
        (80.0, 30.0, 0.0, False, "json", 76.0),  # a constrained request cannot be continued
        (80.0, 30.0, 0.0, True, "json", 76.0),
    ],
)
def test_the_deadline_of_the_first_request(
    limit_s: float, timeout_s: float, spent_s: float, known: bool, constraint: str, expected_s: float
) -> None:
    server = Server(Part(0.25, 3))
    sampled(
        requests_of(server, Watched(0.05 if known else None), limit_s=limit_s, timeout_s=timeout_s, spent_s=spent_s), constraint=constraint
    )
    assert [call.timeout_s for call in server.calls] == [expected_s]


def test_a_request_that_is_cut_off_is_continued_from_its_tokens() -> None:
    server, pace = Server(Part(5.0, 3, CUT), Part(10.0, 4, CUT), Part(1.0, 2)), Watched()
    (completion,) = sampled(requests_of(server, pace), reads=50)
    assert completion.token_ids == (TOKEN,) * 9 and completion.finish_reason == "stop"
    assert [(call.token_ids, call.max_tokens, call.request_id) for call in server.calls] == [
        ((1, 2), 100, "r0"),
        ((1, 2, *(TOKEN,) * 3), 97, "r0.1"),
        ((1, 2, *(TOKEN,) * 7), 93, "r0.2"),
    ]
    assert [call.timeout_s for call in server.calls] == [5.0, 10.0, 10.0], "only the first is short without a history"
    assert pace.begun == [50, 0, 0] and pace.corrected == [50, 0, 0] and pace.in_flight == 0


@pytest.mark.parametrize(
    ("token_s", "seconds", "remaining"),
    [
        (0.05, 2.0, 483),  # usually (1 + 800 / 8) * 0.05 s, of which 2 s have passed
        (0.05, 10.0, 0),
        (None, 2.0, 800),
    ],
)
def test_a_request_without_a_token_had_time_to_read_a_part_of_the_prompt(token_s: float | None, seconds: float, remaining: int) -> None:
    server, pace = Server(Part(seconds, 0, CUT), Part(1.0, 3)), Watched(token_s)
    sampled(requests_of(server, pace), reads=800)
    assert pace.begun == [800, remaining]


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "expected"), [(100, CUT, "length"), (100, "stop", "stop"), (100, "length", "length"), (3, "stop", "stop")]
)
def test_a_completion_with_all_its_tokens_is_not_cut_off(tokens: int, finish_reason: str, expected: str) -> None:
    server = Server(Part(1.0, tokens, finish_reason))
    (completion,) = sampled(requests_of(server))
    assert (completion.finish_reason, len(completion.token_ids), len(server.calls)) == (expected, tokens, 1)


def test_a_completion_without_a_token_is_valid_if_the_server_ended_it() -> None:
    (completion,) = sampled(requests_of(Server(Part(1.0, 0, "stop"))))
    assert completion.token_ids == () and completion.finish_reason == "stop"


def test_the_end_of_the_episodes_time_leaves_the_tokens_so_far() -> None:
    server = Server(Part(5.9, 3, CUT))
    requests = requests_of(server, Watched(0.05), spent_s=70.0)
    (completion,) = sampled(requests)
    assert (completion.finish_reason, len(completion.token_ids), len(server.calls)) == (CUT, 3, 1)


@pytest.mark.parametrize("spent_s", [76.0, 200.0])
def test_an_episode_without_time_sends_no_request(spent_s: float) -> None:
    server = Server()
    with pytest.raises(OutOfTime):
        sampled(requests_of(server, spent_s=spent_s))
    assert server.calls == []


def test_a_request_cut_before_its_first_token_raises_out_of_time() -> None:
    with pytest.raises(OutOfTime):
        sampled(requests_of(Server(Part(6.0, 0, CUT)), Watched(0.05), spent_s=70.0))


def test_an_episode_is_out_of_time_at_its_limit() -> None:
    async def states() -> list[bool]:
        out_of_time = [requests_of(Server(), spent_s=spent_s).out_of_time for spent_s in (75.5, 76.0, 77.0)]
        requests = requests_of(Server(Part(5.9, 3, CUT)), Watched(0.05), spent_s=70.0)
        await requests.sample([1], lambda most: SamplingParams(max_tokens=most), 100, "r", reads=0)
        ended = requests_of(Server(Part(0.1, 3, "stop")), Watched(0.05), spent_s=60.0)
        await ended.sample([1], lambda most: SamplingParams(max_tokens=most), 100, "r", reads=0)
        return [*out_of_time, requests.out_of_time, ended.out_of_time]

    assert run_virtually(states()) == [False, True, True, True, False], "a server may cut a little early"


def test_a_constrained_request_that_ends_in_time_leaves_time() -> None:
    requests = requests_of(Server(Part(1.0, 3), Part(1.0, 3)), Watched(0.05))
    assert [completion.finish_reason for completion in sampled(requests, constraint="json", times=2)] == ["stop", "stop"]


def test_a_turn_that_lost_the_time_of_a_request_raises_slow_server() -> None:
    server = Server(Part(30.0, 0, CUT))
    with pytest.raises(SlowServer) as error:
        sampled(requests_of(server, limit_s=800.0))
    assert str(error.value) == (
        "request r0: the server was slow for 30 s; the newest request had 0 tokens/s (no history) with 1 requests in flight\n"
        f"  fix: {ADVICE}"
    )
    server = Server(Part(30.0, 0, CUT), Part(30.0, 0, CUT), Part(1.0, 3))
    with pytest.raises(SlowServer, match=r"request r0\.1"):
        sampled(requests_of(server, Watched(0.05), limit_s=800.0))


def test_time_lost_in_earlier_turns_does_not_count_for_this_one() -> None:
    turn = (Part(20.0, 0, CUT), Part(1.0, 5))
    requests = requests_of(Server(*turn, *turn), limit_s=800.0)
    assert len(sampled(requests, times=2)) == 2 and requests.sampling.lost_s == pytest.approx(40.0, abs=0.5)


def test_concurrent_turns_have_separate_losses() -> None:
    """The later turn does not reset the lost time of the first."""

    class Stalled(Server):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
            self._parts = [Part(16.0, 0, CUT) if request_id.startswith("slow") else Part(0.25, 5)]
            return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)

    async def sample(requests: EpisodeRequests, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await requests.sample([1], lambda most: SamplingParams(max_tokens=most), 100, name, reads=0)

    async def both() -> None:
        requests = requests_of(server, Watched(0.05), limit_s=8000.0)
        await asyncio.gather(sample(requests, "slow", 0.0), sample(requests, "quick", 17.0))

    server = Stalled()
    with pytest.raises(SlowServer):
        run_virtually(both())
    assert sum(call.request_id.startswith("slow") for call in server.calls) == 2, "two stalls of 16 s, and 30 s are allowed"


def test_a_new_version_computes_the_complete_prompt_again() -> None:
    pace = Watched()
    parts = (Part(1.0, 3, versions=(0,)), Part(1.0, 3, versions=(0, 1)), Part(1.0, 3, versions=(1,)), Part(1.0, 3, versions=(2,)))
    sampled(requests_of(Server(*parts), pace), reads=1, times=4)
    assert pace.begun == [1, 1, 1, 1] and pace.corrected == [1, 1, 1, 2]


def external_tokens(pace: Pace, *, within_s: float = 1000.0, spent_s: float = 0.0, at_most: int = 100) -> int:
    async def most() -> int:
        with requests_of(Server(), pace, spent_s=spent_s).external_request(at_most, within_s=within_s) as request:
            return request.most

    return run_virtually(most())


@pytest.mark.parametrize(
    ("token_s", "within_s", "spent_s", "most"),
    [
        (0.05, 1000.0, 0.0, 100),  # twice the usual 5 s fit
        (0.05, 10.0, 0.0, 100),
        (0.05, 6.0, 0.0, 60),
        (0.05, 1000.0, 73.0, 30),  # 3 s are left
        (0.05, 1000.0, 79.0, 1),
        (0.05, 0.001, 0.0, 1),
        (None, 0.001, 0.0, 100),
    ],
)
def test_a_request_of_the_agent_may_take_twice_the_usual_time(token_s: float | None, within_s: float, spent_s: float, most: int) -> None:
    assert external_tokens(Watched(token_s), within_s=within_s, spent_s=spent_s) == most


def test_a_request_of_the_agent_is_judged_by_the_pace_of_all_requests() -> None:
    """Its number of tokens is unknown, so it has no size."""
    pace = Pace()
    pace.end(pace.begin(0.0), 64.0, tokens=64, at_most=64)
    pace.end(pace.begin(64.0), 114.0, tokens=1000, at_most=1000, cut=True)
    assert external_tokens(pace, within_s=10.0) == 100


def test_the_time_of_a_request_of_the_agent_counts() -> None:
    async def send(pace: Pace, tokens: int | None) -> SamplingTime:
        requests = requests_of(Server(), pace)
        with requests.external_request(100, within_s=6.0) as request:
            await asyncio.sleep(4.0)
            request.tokens = tokens
        return requests.sampling

    known = run_virtually(send(Watched(), 10))
    assert known.newest == Reading(tokens=10, seconds=4.0, in_flight=1.0, usual_s=None)
    assert (known.sampled_s, known.lost_s) == (4.0, 0.0)
    unknown = run_virtually(send(Watched(0.05), None))
    assert unknown.newest is not None and unknown.newest.usual_s == pytest.approx(3.0), "of the 60 tokens requested"
    assert (unknown.sampled_s, unknown.lost_s) == (0.0, 0.0)


def ended(*, program_s: float = 0.0, sampled_s: float = 0.0, lost_s: float = 0.0, pace: Pace | None = None) -> Failure | None:
    requests = requests_of(Server(), pace, limit_s=100.0)
    requests.sampling = SamplingTime(before=(sampled_s, lost_s))
    return requests.timeout_failure(program_s=program_s, sandbox_s=7.0, turn=3)


def test_an_episode_of_long_programs_has_no_failure() -> None:
    assert ended(program_s=60.0, sampled_s=10.0) is None


def test_an_episode_of_long_samples_is_blamed_on_the_policy() -> None:
    failure = ended(program_s=40.0, sampled_s=40.0)
    assert failure is not None and (failure.stage, failure.blame, failure.kind, failure.turn) == ("generate", Blame.POLICY, "wall_limit", 3)
    assert failure.message == (
        f"the policy used up its 100 s: programs took 40.0 s, sampling 40.0 s\n  fix: if it needs more time, {ADVICE}"
    )


@pytest.mark.parametrize(
    ("token_s", "kind", "slow"),
    [
        (None, "wall_limit", "the server was silent for 20.0 s, and the run has no usual pace yet"),
        (0.05, "slow_server", "the server was slow: requests that took over 2 times as long as usual cost 20.0 s"),
    ],
)
def test_an_episode_that_lost_much_time_is_blamed_on_the_server(token_s: float | None, kind: str, slow: str) -> None:
    failure = ended(program_s=60.0, sampled_s=15.0, lost_s=20.0, pace=Watched(token_s))
    assert failure is not None and (failure.stage, failure.blame, failure.kind) == ("generate", Blame.INFRASTRUCTURE, kind)
    assert failure.message == f"{slow}; the episode had 100 s: programs took 60.0 s, sampling 35.0 s\n  fix: {ADVICE}"


@pytest.mark.parametrize("lost_s", [5.0, 10.0])
def test_other_lost_time_is_an_infrastructure_fault(lost_s: float) -> None:
    failure = ended(program_s=10.0, sampled_s=20.0, lost_s=lost_s)
    assert failure is not None and (failure.stage, failure.blame, failure.kind) == ("episode", Blame.INFRASTRUCTURE, "wall_limit")
    assert failure.message == (
        f"the episode used up its 100 s: programs took 10.0 s, sampling {20.0 + lost_s:.1f} s, everything else {70.0 - lost_s:.1f} s"
        f" (sandboxes 7.0 s, including programs)\n  fix: {ADVICE}"
    )


@pytest.mark.parametrize(
    ("tokens", "usual_s", "figures"),
    [
        (None, None, "unknown (no history)"),
        (None, 5.0, "unknown (usually done in 5 s)"),
        (50, 5.0, "5 tokens/s (usually 10)"),
        (50, None, "5 tokens/s (no history)"),
        (0, 5.0, "0 tokens/s (usually done in 5 s)"),
        (0, None, "0 tokens/s (no history)"),
    ],
)
def test_the_figures_of_the_newest_request(tokens: int | None, usual_s: float | None, figures: str) -> None:
    requests = requests_of(Server(), pace := Pace(slots=2), limit_s=100.0)
    for _ in range(5):
        pace.begin(0.0)
    requests.sampling = SamplingTime(before=(80.0, 0.0))
    requests.sampling.begin(0.0)
    requests.sampling.end(10.0, Reading(tokens=tokens, seconds=10.0, in_flight=2.5, usual_s=usual_s))
    failure = requests.timeout_failure(program_s=0.0, sandbox_s=0.0, turn=3)
    assert failure is not None
    assert f"; the newest request had {figures} with 2.5 requests in flight, 3 of them waiting\n  fix" in failure.message
