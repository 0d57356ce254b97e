"""The blame for an episode that ran out of time, by sampled tokens, time and server speed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent import TurnLoop
from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.errors import InfrastructureError
from agentrl.failure import FaultRate
from agentrl.records import Blame, Episode, Limits, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.rollout.pace import LOST_SHARE, REQUESTS_PER_EPISODE, SLOW_FACTOR, Pace, Reading, blame_for_timeout
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.clock import VirtualLoop, run_virtually
from agentrl.testing.policies import PacedPolicy
from agentrl.testing.sandboxes import printing, sample_task
from tests.chats import chat_of, shared_tokenizer
from tests.strategies import examples

TOKENIZER = shared_tokenizer()
WALL_S = 120.0
ENDLESS = 10**9
TASK = replace(sample_task(), tools=(), limits=Limits(turns=4, turn_tokens=10**6, episode_tokens=10**6, wall_s=WALL_S))


def runner_of(policy: PacedPolicy, *, request_timeout_s: float = 120.0) -> EpisodeRunner:
    return EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(TOKENIZER)),
        sampling=Sampling(),
        max_model_len=10**6,
        request_timeout_s=request_timeout_s,
    )


def played(
    policy: PacedPolicy, *names: str, before: Sequence[str] = (), task: Task = TASK, at: float = 0.0, request_timeout_s: float = 120.0
) -> list[Episode]:
    """Runs the episodes `before` in sequence, then `names` concurrently from the time `at` on."""

    async def play() -> list[Episode]:
        runner = runner_of(policy, request_timeout_s=request_timeout_s)
        for name in before:
            await runner.run(task, episode_id=name)
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        return list(await asyncio.gather(*(runner.run(task, episode_id=name) for name in names)))

    return run_virtually(play())


def wants(babble: int = ENDLESS, sound: int = 50) -> Callable[[str, int], int]:
    return lambda episode, turn: babble if episode.startswith("babble") else sound


def has_every_token(policy: PacedPolicy, episode: Episode) -> bool:
    """Whether the record contains exactly the sampled tokens."""
    (line,) = episode.trajectories
    turns = {f"{episode.id}-{number}": len(turn.completion_ids) for number, turn in enumerate(line.turns)}
    return turns == {name: count for name, count in policy.sampled.items() if name.rpartition("-")[0] == episode.id and count}


@given(speed=st.floats(1.5, 100.0), history=st.booleans(), timeout_s=st.sampled_from([20.0, 120.0, 1000.0]))
@settings(max_examples=examples(25))
def test_endless_sampling_on_a_sound_server_is_scored(speed: float, history: bool, timeout_s: float) -> None:
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: speed)
    sound = ["sound"] if history else []
    (episode,) = played(policy, "babble", before=sound, request_timeout_s=timeout_s)
    assert not episode.left_out and episode.trajectories[0].stop_reason == "wall_limit"
    assert has_every_token(policy, episode) and episode.completion_tokens >= 0.9 * speed * WALL_S
    assert [failure.blame for failure in episode.failures] == [Blame.POLICY]
    assert episode.wall_s <= WALL_S


@given(speed=st.floats(2.0, 100.0), stalls=st.floats(0.0, 95.0), wanted=st.sampled_from([ENDLESS, 400, 40]))
@settings(max_examples=examples(40))
def test_a_server_that_stalls_never_costs_a_score(speed: float, stalls: float, wanted: int) -> None:
    """The server stalls until the end. Episodes that end earlier are scored, and all others are infrastructure faults."""
    begins = 1000.0
    policy = PacedPolicy(TOKENIZER, wants=wants(wanted), speed=lambda now, in_flight: speed * (now < begins + stalls))
    (episode,) = played(policy, "babble", before=["sound"], at=begins)
    if episode.trajectories[0].stop_reason == "wall_limit":
        assert episode.left_out and [failure.kind for failure in episode.failures] == ["slow_server"]
        assert "fix: " in episode.failures[0].message and "tokens/s" in episode.failures[0].message
    else:
        assert policy.sampled["babble-0"] == wanted and not episode.left_out


@given(speed=st.floats(5.0, 100.0), stalls=st.floats(1.0, 60.0), lasts=st.floats(1.0, 100.0), wanted=st.sampled_from([ENDLESS, 400]))
@settings(max_examples=examples(40))
def test_a_server_that_stalls_for_a_while_never_costs_a_score(speed: float, stalls: float, lasts: float, wanted: int) -> None:
    begins = 1000.0
    stalled = (begins + stalls, begins + stalls + lasts)
    policy = PacedPolicy(TOKENIZER, wants=wants(wanted), speed=lambda now, in_flight: speed * (not stalled[0] <= now < stalled[1]))
    (episode,) = played(policy, "babble", before=["sound"], at=begins)
    if episode.trajectories[0].stop_reason != "wall_limit":
        assert policy.sampled["babble-0"] == wanted and not episode.left_out
    elif lasts >= 2.5 * WALL_S / REQUESTS_PER_EPISODE:
        assert episode.left_out, "at least one request was stalled all the time"
    assert episode.left_out or has_every_token(policy, episode)


@pytest.mark.slow
@given(speed=st.floats(10.0, 100.0), slower=st.floats(2.6, 50.0))
@settings(max_examples=examples(25))
def test_a_server_much_slower_than_usual_is_an_infrastructure_fault(speed: float, slower: float) -> None:
    begins = 1000.0
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: speed if now < begins else speed / slower)
    (episode,) = played(policy, "babble", before=[f"babble-before{n}" for n in range(3)], at=begins)
    assert episode.left_out and episode.failures[0].kind == "slow_server"


@pytest.mark.slow
@given(speed=st.floats(10.0, 100.0), slower=st.floats(0.2, 1.9))
@settings(max_examples=examples(25))
def test_a_server_less_than_twice_as_slow_as_usual_causes_no_fault(speed: float, slower: float) -> None:
    begins = 1000.0
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: speed if now < begins else speed / slower)
    (episode,) = played(policy, "babble", before=[f"babble-before{n}" for n in range(3)], at=begins)
    assert not episode.left_out


@pytest.mark.slow
@given(at_once=st.integers(2, 40), capacity=st.floats(50.0, 2000.0))
@settings(max_examples=examples(20))
def test_policies_that_share_a_server_do_not_make_it_slow(at_once: int, capacity: float) -> None:
    """The history has one request at a time. Then many policies sample without end, each with its share of the server."""
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: capacity / in_flight)
    episodes = played(policy, *(f"babble{n}" for n in range(at_once)), before=["sound", "sound2"])
    assert not any(episode.left_out for episode in episodes)
    assert all(has_every_token(policy, episode) for episode in episodes)


@pytest.mark.parametrize("wanted", [1, 3, 30])
def test_many_short_turns_are_not_a_slow_server(wanted: int) -> None:
    """If requests have a delay before the first token, short requests are compared with short ones."""
    policy = PacedPolicy(TOKENIZER, wants=wants(sound=wanted), speed=lambda now, in_flight: wanted / (2.0 + 0.01 * wanted))
    (episode,) = played(policy, "many", before=["sound"])
    assert not episode.left_out


def test_a_policy_that_cannot_be_cut_off_loses_only_the_request_in_progress() -> None:
    """Its earlier turns are recorded and the rule is the same: here the request was not overdue."""

    class Talking(TurnLoop):
        async def act(self, episode: Any) -> str:
            trajectory = episode.trajectories[0]
            trajectory.add_prompt(self.chat.opening(episode.task.prompt, []))
            while not (limit := trajectory.limit()):
                completion = await trajectory.sample(stop_token_ids=self.chat.stop_token_ids)
                trajectory.add_turn(completion, self.chat.parse(completion.token_ids).message)
                trajectory.add_prompt((1,))
            return str(limit)

    policy = PacedPolicy(TOKENIZER, wants=lambda episode, turn: 400, speed=lambda now, in_flight: 10.0, cuts=False)

    async def play() -> Episode:
        runner = replace(runner_of(policy), agent=Talking(chat=chat_of(TOKENIZER)))
        return await runner.run(TASK, episode_id="e")

    episode = run_virtually(play())
    assert not episode.left_out and [len(turn.completion_ids) for turn in episode.trajectories[0].turns] == [400, 400]


@pytest.mark.parametrize("hold_s", [0.0, 1.4])
def test_a_stalled_driver_never_costs_a_score(hold_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: 50.0)
    task = replace(TASK, limits=replace(TASK.limits, wall_s=4.0))

    async def play() -> Episode:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        monkeypatch.setattr(DRIVER_LAG, "_clock", loop.time)
        loop.call_later(1.0, loop.hold, hold_s)
        async with DRIVER_LAG.watched(lambda alert: None):
            return await runner_of(policy).run(task, episode_id="babble")

    episode = run_virtually(play())
    (failure,) = episode.failures
    assert (failure.blame, episode.left_out) == ((Blame.INFRASTRUCTURE, True) if hold_s else (Blame.POLICY, False))
    assert (failure.kind == "driver_stalled" and "the driver's event loop was blocked" in failure.message) is bool(hold_s)


@given(
    program=st.floats(0, 1),
    sampled=st.floats(0, 1),
    lost=st.floats(0, 1),
    limit=st.floats(0.1, 10_000.0),
)
def test_the_blame_rule(program: float, sampled: float, lost: float, limit: float) -> None:
    blame = blame_for_timeout(limit, program_s=program * limit, sampled_s=sampled * limit, lost_s=lost * limit)
    assert blame_for_timeout(limit, program_s=program * limit, sampled_s=sampled * limit, lost_s=0.0, stalled_s=lost * limit) is blame
    if lost > LOST_SHARE + 1e-6:
        assert blame is Blame.INFRASTRUCTURE, "a stalled server never costs a score"
    elif lost < LOST_SHARE - 1e-6 and program + sampled > 0.5 + 1e-6:
        assert blame is Blame.POLICY, "sampling does not avoid the blame"
    elif program + sampled < 0.5 - 1e-6:
        assert blame is Blame.INFRASTRUCTURE


readings = st.tuples(st.integers(1, 5000), st.floats(0.01, 200.0))


@given(history=st.lists(readings, min_size=1, max_size=400), tokens=st.integers(1, 100_000))
@settings(max_examples=examples(100))
def test_more_tokens_never_turn_a_usual_request_into_a_slow_one(history: list[tuple[int, float]], tokens: int) -> None:
    """Of two requests with the same tokens per second and load, the one with more tokens does not count as slower."""
    pace, now = Pace(), 0.0
    for count, seconds in history:
        request = pace.begin(now)
        now += seconds
        pace.end(request, now, tokens=count, at_most=count)
    for cut in (False, True):
        shorter, longer = pace.usual_s(tokens, 1.0, cut=cut), pace.usual_s(2 * tokens, 1.0, cut=cut)
        assert shorter is not None and longer is not None and shorter > 0
        same_size = not any(count.bit_length() == (2 * tokens).bit_length() for count, _ in history)
        smaller = any(count.bit_length() <= tokens.bit_length() for count, _ in history)
        assert longer >= 2 * shorter * (1 - 1e-9) or not (cut or (same_size and smaller))


def test_the_history_is_spread_over_the_run_and_bounded() -> None:
    pace, now = Pace(), 0.0
    for number in range(20_000):
        request, seconds = pace.begin(now), 1.0 if number < 12_000 else 10.0
        now += seconds
        pace.end(request, now, tokens=100, at_most=100)
    assert pace.usual_s(100, 1.0) == pytest.approx(1.0), "the longer part of the run decides, not the newest requests"
    assert [len(history) for history in (pace._all, *pace._sizes.values())] < [257, 257]


def test_a_request_cut_off_in_a_stall_is_not_the_usual_pace() -> None:
    pace = Pace()
    request = pace.begin(0.0)
    reading = pace.end(request, 60.0, tokens=3, at_most=1000, cut=True)
    assert not pace.known and reading.lost_s == 60.0 and reading.sampled_s == 0.0


def test_a_request_is_slow_beyond_twice_the_usual_time() -> None:
    pace = Pace()
    pace.end(pace.begin(0.0), 10.0, tokens=100, at_most=100)
    fast = pace.end(pace.begin(10.0), 10.0 + 10 * SLOW_FACTOR, tokens=100, at_most=100)
    slow = pace.end(pace.begin(100.0), 100.0 + 10 * SLOW_FACTOR + 30, tokens=100, at_most=100)
    assert (fast.lost_s, slow.lost_s > 0) == (0.0, True)


def test_a_run_paused_for_a_slow_server_reports_reason_and_fix() -> None:
    """The message names the slow server instead of "85 x episode wall_limit ... repair the cause"."""
    begins = 1000.0
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: 40.0 if now < begins else 0.2)
    rate = FaultRate(0.5, concurrency=1)
    for episode in played(policy, *(f"babble{n}" for n in range(33)), before=["babble-before"], at=begins):
        rate.record_attempt(episode.failures[-1] if episode.left_out else None)
    with pytest.raises(InfrastructureError) as error:
        asyncio.run(asyncio.wait_for(rate.watch(), 1))
    for text in ("33 x generate slow_server", "tokens/s", "requests in flight", "serving.threads", "rollout.concurrency", "Limits.wall_s"):
        assert text in str(error.value), text


class ReadingLoop(TurnLoop):
    """Adds a long prompt after each turn, and sleeps in the fourth."""

    async def act(self, episode: Any) -> str:
        trajectory = episode.trajectories[0]
        trajectory.add_prompt(self.chat.opening(episode.task.prompt, []))
        while not (limit := trajectory.limit()):
            completion = await trajectory.sample(stop_token_ids=self.chat.stop_token_ids)
            trajectory.add_turn(completion, self.chat.parse(completion.token_ids).message)
            if episode.id.startswith("sound"):
                return "answered"
            if len(trajectory.turns) == 4:
                with episode.running(None):
                    await asyncio.sleep(10 * WALL_S)
            trajectory.add_prompt((1,) * 2000)
        return str(limit)


def read(policy: PacedPolicy, *names: str, begins: float = 0.0) -> list[Episode]:
    async def play() -> list[Episode]:
        runner = replace(runner_of(policy), agent=ReadingLoop(chat=chat_of(TOKENIZER)))
        for number in range(20):
            await runner.run(TASK, episode_id=f"sound{number}")
        await asyncio.sleep(max(0.0, begins - asyncio.get_running_loop().time()))
        return list(await asyncio.gather(*(runner.run(TASK, episode_id=name) for name in names)))

    return run_virtually(play())


def test_prompt_tokens_do_not_make_the_server_count_as_slow() -> None:
    """Long outputs in the context cost the server seconds without sampling. They do not lead to an exclusion."""
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: 25.0, reading=250.0)
    (episode,) = read(policy, "reader")
    assert not episode.left_out, episode.failures


def test_a_stall_counts_as_slow_even_with_long_prompts() -> None:
    begins = 2000.0
    policy = PacedPolicy(TOKENIZER, wants=wants(), speed=lambda now, in_flight: 25.0 * (now < begins + 5.0), reading=250.0)
    (episode,) = read(policy, "reader", begins=begins)
    assert episode.left_out and episode.failures[0].kind == "slow_server"


def test_the_context_is_recomputed_after_a_new_version() -> None:
    pace, now = Pace(), 0.0
    for _ in range(20):
        request = pace.begin(now, reads=10)
        pace.end(request, now := now + 2.0, tokens=50, at_most=50)
    old = pace.end(pace.begin(now, reads=10), now + 10.0, tokens=50, at_most=50)
    new = pace.end(pace.begin(now + 10.0, reads=10), now + 20.0, tokens=50, at_most=50, reads=2000)
    assert old.lost_s == pytest.approx(8.0, abs=0.1) and new.lost_s == 0.0


def test_prompts_of_other_requests_do_not_make_the_server_count_as_slow() -> None:
    pace, now = Pace(), 0.0
    for _ in range(20):
        request = pace.begin(now)
        pace.end(request, now := now + 2.0, tokens=50, at_most=50)
    request = pace.begin(now)
    other = pace.begin(now + 1.0, reads=2000)
    assert pace.end(request, now + 10.0, tokens=50, at_most=50).lost_s == 0.0
    pace.end(other, now + 12.0, tokens=50, at_most=50)


def used(pace: Pace, seconds: float, *, requests: int = 1, tokens: int = 100, at: float = 0.0) -> list[Reading]:
    """Adds sequential requests with this duration in seconds, and returns their readings."""
    measurements = []
    for _ in range(requests):
        measurements.append(pace.end(pace.begin(at), at + seconds, tokens=tokens, at_most=tokens))
        at += seconds
    return measurements


def test_the_first_requests_are_compared_with_the_measurement_at_the_servers_start() -> None:
    pace = Pace()
    pace.set_idle_token_s(0.05)
    assert pace.known
    (slow,) = used(pace, 50.0)
    assert slow.usual_s == pytest.approx(5.0) and slow.lost_s == pytest.approx(45.0)
    assert used(Pace(), 50.0)[0].lost_s == 0.0, "without a measurement there is nothing to compare with"


def test_requests_in_flight_share_the_measured_throughput() -> None:
    """A server is slow if a batch takes longer than its requests in sequence."""
    pace = Pace()
    pace.set_idle_token_s(0.05)
    requests = [pace.begin(0.0) for _ in range(8)]
    assert [pace.end(request, 8 * 5.0, tokens=100, at_most=100).lost_s for request in requests] == [0.0] * 8


def test_a_measurement_counts_little_once_there_are_requests() -> None:
    pace = Pace()
    pace.set_idle_token_s(0.01)
    used(pace, 10.0, requests=3)
    assert used(pace, 10.0)[0].lost_s == 0.0 and pace.usual_s(100, 1.0) == pytest.approx(10.0)
    pace.set_idle_token_s(1000.0)
    assert pace.usual_s(100, 1.0) == pytest.approx(10.0), "the new measurement is that of a restarted server"


@pytest.mark.parametrize("token_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_measurement_is_ignored(token_s: float) -> None:
    pace = Pace()
    pace.set_idle_token_s(token_s)
    assert not pace.known and pace.slow_start_alert() == ""


def test_a_server_slow_from_its_first_request_is_reported_once() -> None:
    pace = Pace()
    pace.set_idle_token_s(0.05)
    used(pace, 15.0, requests=10)
    assert pace.slow_start_alert() == "", "too few requests"
    used(pace, 15.0, requests=10, at=1000.0)
    alert = pace.slow_start_alert()
    assert "3.0 times slower for its first requests than in the measurement at its start" in alert and "fix: " in alert
    assert pace.slow_start_alert() == ""
    sound = Pace()
    sound.set_idle_token_s(0.05)
    used(sound, 6.0, requests=40)
    assert sound.slow_start_alert() == ""


@given(
    history=st.lists(readings, min_size=1, max_size=600),
    tokens=st.integers(1, 100_000),
    in_flight=st.floats(1.0, 50.0),
    cut=st.booleans(),
)
@settings(max_examples=examples(50))
def test_a_restored_pace_gives_the_same_times(history: list[tuple[int, float]], tokens: int, in_flight: float, cut: bool) -> None:
    pace, now = Pace(), 0.0
    for count, seconds in history:
        pace.end(pace.begin(now), now := now + seconds, tokens=count, at_most=count)
    for recorded in (pace._all, pace._work, *pace._sizes.values()):
        recorded._newer = len(recorded)  # medians up to a sixteenth old are recomputed, as after a restart
    restored = Pace()
    restored.restore(json.loads(json.dumps(pace.to_data())))
    assert restored.usual_s(tokens, in_flight, cut=cut) == pytest.approx(pace.usual_s(tokens, in_flight, cut=cut), rel=0.2)
    assert restored.to_data() == pace.to_data()


BAD = [None, 3, {}, {"all": {}, "work": {}, "sizes": {}}, {"all": {"stride": 1, "requests": [[1, 2]]}, "work": {}, "sizes": {}}]
BAD += [{"all": {"stride": 1, "requests": [[1.0, float("nan"), 2.0]]}, "work": {"stride": 1, "requests": []}, "sizes": {}}]
BAD += [{"all": {"stride": 1, "requests": [[1.0, 1.0, 1.0]] * 300}, "work": {"stride": 1, "requests": []}, "sizes": {}}]
BAD += [{"all": {"stride": 0, "requests": []}, "work": {"stride": 1, "requests": []}, "sizes": {"a": {}}}]
BAD += [{"all": {"stride": 1, "requests": [[1.0, 1.0, 1.0]]}, "work": {"stride": 1, "requests": []}, "sizes": {}}]


@pytest.mark.parametrize("data", BAD)
def test_an_invalid_history_raises_and_changes_nothing(data: Any) -> None:
    pace = Pace()
    used(pace, 10.0)
    with pytest.raises(ValueError, match=r"history|invalid literal"):
        pace.restore(data)
    assert pace.usual_s(100, 1.0) == pytest.approx(10.0)
