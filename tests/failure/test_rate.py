"""The rate of faults that the policy did not cause, and the pause above a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError
from agentrl.failure import FaultRate
from agentrl.records import Blame, Failure


def sandbox_failure(kind: str = "SandboxTimeout", message: str = "no sandbox opened in 60.0 s", stage: str = "sandbox") -> Failure:
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message=message)


async def pause_message(rate: FaultRate) -> str:
    """Returns the message when the run pauses, or an empty text while it continues."""
    watching = asyncio.create_task(rate.watch())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not watching.done():
        watching.cancel()
        return ""
    assert isinstance(watching.exception(), InfrastructureError)
    return str(watching.exception())


async def test_the_run_pauses_and_reports_the_faults_with_counts() -> None:
    rate = FaultRate(0.5, concurrency=4)
    for number in range(40):
        rate.record_attempt(sandbox_failure(message=f"no sandbox opened in {number} s\x1b[2J") if number % 4 >= 2 else None)
    assert rate.share == 0.5 and await pause_message(rate) == "", "a share at the limit is allowed"
    rate.record_attempt(sandbox_failure("ServingError", "connection\nrefused", "generate"))
    text = await pause_message(rate)
    assert "21 of the newest 41 attempts failed" in text and "the limit is 50%" in text
    assert (
        "20 x sandbox SandboxTimeout: no sandbox opened in 39 s\ufffd[2J\n" in text
        and "1 x generate ServingError: connection refused\n" in text
    )
    assert "--resume" in text


async def test_a_limit_of_1_never_pauses_a_run() -> None:
    rate = FaultRate(1.0, concurrency=1)
    for _ in range(1000):
        rate.record_attempt(sandbox_failure())
    assert rate.share == 1.0 and await pause_message(rate) == ""


@pytest.mark.parametrize("sound", [0, 63, 64, 500])
async def test_the_death_of_a_server_does_not_pause_the_run(sound: int) -> None:
    """All attempts in flight fail at once, and their retries succeed."""
    rate = FaultRate(0.5, concurrency=64)
    for failure in [*[None] * sound, *[sandbox_failure("ServingError")] * 64, *[None] * 64]:
        rate.record_attempt(failure)
    assert await pause_message(rate) == ""


async def test_counts_and_messages_are_bounded() -> None:
    rate = FaultRate(0.1, concurrency=1000)
    for number in range(5000):
        rate.record_attempt(sandbox_failure(kind=f"Kind{number}" + "x" * 10_000, message="m" * 10_000))
    text = await pause_message(rate)
    assert len(rate.kinds) <= 33 and rate.kinds.total() == 4000
    assert len(text) < 5000 and "4000 of the newest 4000" in text and "\n  4000 x others: " in text and "other kinds" not in text


async def test_metrics_count_attempts_since_the_last_call() -> None:
    rate = FaultRate(0.5, concurrency=1)
    for failure in (None, sandbox_failure(), None):
        rate.record_attempt(failure)
    assert rate.attempt_metrics() == {"attempts_ended": 3, "attempts_failed": 1, "excluded_policy_reachable": 0.0}
    rate.record_attempt(sandbox_failure())
    assert rate.attempt_metrics() == {"attempts_ended": 1, "attempts_failed": 1, "excluded_policy_reachable": 0.0}


@given(st.lists(st.booleans(), max_size=400), st.floats(0, 1), st.integers(1, 80))
def test_it_pauses_exactly_if_the_share_of_the_newest_exceeds_the_limit(faults: Sequence[bool], limit: float, concurrency: int) -> None:
    async def run() -> tuple[bool, bool]:
        rate, expected = FaultRate(limit, concurrency=concurrency), False
        for number, fault in enumerate(faults, start=1):
            rate.record_attempt(sandbox_failure() if fault else None)
            newest = faults[max(0, number - max(64, 4 * concurrency)) : number]
            expected |= len(newest) >= max(32, 2 * concurrency) and sum(newest) / len(newest) > limit
        return bool(await pause_message(rate)), expected

    paused, expected = asyncio.run(run())
    assert paused == expected


def test_exclusions_that_the_policy_could_have_caused_alert_once() -> None:
    rate = FaultRate(0.5, concurrency=4)
    unprovoked = Failure(stage="generate", blame=Blame.INFRASTRUCTURE, kind="ServingError", message="down", turn=0)
    provoked = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="SandboxTimeout", message="no answer", turn=2)
    for _ in range(40):
        rate.record_attempt(None)
        rate.record_attempt(unprovoked)
    assert rate.attempt_metrics()["excluded_policy_reachable"] == 0.0 and rate.suspect_alert() == "", "all failed in the first turn"
    for _ in range(10):
        rate.record_attempt(provoked)
    alert = rate.suspect_alert()
    assert "10 of the newest 64" in alert and "agentrl" in alert and rate.suspect_alert() == ""
    assert rate.attempt_metrics()["excluded_policy_reachable"] == 1.0
    assert rate.attempt_metrics() == {"attempts_ended": 0, "attempts_failed": 0}, "without attempts there is no share"
    for _ in range(64):
        rate.record_attempt(None)
    assert rate.suspect_alert() == ""
    for _ in range(10):
        rate.record_attempt(provoked)
    assert rate.suspect_alert(), "a second alert after the share fell and rose again"


@pytest.mark.parametrize("kind", ["ServerDied", "SlowServer", "slow_server"])
def test_a_lost_or_slow_server_gives_no_alert(kind: str) -> None:
    """The failure ends all attempts in flight, at any turn."""
    rate = FaultRate(1.0, concurrency=64)
    for _ in range(4):
        for failure in [*[None] * 64, *[Failure(stage="generate", blame=Blame.INFRASTRUCTURE, kind=kind, message="gone", turn=3)] * 64]:
            rate.record_attempt(failure)
    assert rate.suspect_alert() == ""
    assert rate.attempt_metrics() == {"attempts_ended": 512, "attempts_failed": 256, "excluded_policy_reachable": 0.0}


def test_an_alert_names_the_fault_after_the_first_turn() -> None:
    rate = FaultRate(1.0, concurrency=4)
    died = Failure(stage="generate", blame=Blame.INFRASTRUCTURE, kind="ServerDied", message="the server died", turn=3)
    tool = Failure(stage="tool", blame=Blame.INFRASTRUCTURE, kind="ToolUnavailable", message="tool search: refused", turn=2)
    for failure in [*[None] * 20, *[died] * 30, *[tool] * 14]:
        rate.record_attempt(failure)
    alert = rate.suspect_alert()
    assert alert.startswith("14 of the newest 64 attempts failed after the policy's first turn")
    assert "most often with tool ToolUnavailable (14): tool search: refused\n  fix: repair the component that fails. If it works" in alert


def late(kind: str = "SandboxTimeout", *, turn: int | None = 2, stage: str = "sandbox") -> Failure:
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message="no answer", turn=turn)


async def test_the_limit_applies_from_32_attempts_on() -> None:
    rate = FaultRate(0.5, concurrency=1)
    assert rate.share == 0.0
    for _ in range(31):
        rate.record_attempt(sandbox_failure())
    assert await pause_message(rate) == ""
    rate.record_attempt(sandbox_failure())
    assert "32 of the newest 32" in await pause_message(rate)


def test_the_oldest_attempt_leaves_the_rate() -> None:
    for faults in ([0], [1]):
        rate = FaultRate(0.5, concurrency=1)
        for number in range(65):
            rate.record_attempt(sandbox_failure() if number in faults else None)
        assert rate.share == (0 if faults == [0] else 1 / 64)


def test_a_share_of_a_tenth_gives_no_alert() -> None:
    rate = FaultRate(1.0, concurrency=25)
    for number in range(100):
        rate.record_attempt(late() if number < 10 else None)
    assert rate.suspect_alert() == ""
    rate.record_attempt(late())
    assert rate.suspect_alert() == "", "the oldest attempt is no longer counted"
    rate = FaultRate(1.0, concurrency=25)
    for number in range(100):
        rate.record_attempt(late() if number < 11 else None)
    assert rate.suspect_alert().startswith("11 of the newest 100")


def test_an_alert_needs_32_attempts() -> None:
    rate = FaultRate(1.0, concurrency=1)
    for _ in range(31):
        rate.record_attempt(late())
    assert rate.suspect_alert() == ""
    rate.record_attempt(late())
    assert rate.suspect_alert().startswith("32 of the newest 32")


@pytest.mark.parametrize(
    ("failure", "counts"),
    [
        (late(turn=0), 0),
        (late(turn=None), 0),
        (late(turn=1), 1),
        (late(turn=None, stage="score"), 1),
        (late("ServerDied", turn=3, stage="score"), 0),
    ],
)
def test_faults_that_the_policy_could_have_caused_are_counted(failure: Failure, counts: int) -> None:
    rate = FaultRate(1.0, concurrency=1)
    rate.record_attempt(failure)
    assert rate.attempt_metrics()["excluded_policy_reachable"] == counts


async def test_32_kinds_are_counted_separately_and_8_are_shown() -> None:
    rate = FaultRate(0.1, concurrency=25)
    for number in range(40):
        for _ in range(2 if number < 8 else 1):
            rate.record_attempt(sandbox_failure(kind=f"Kind{number}"))
    assert len(rate.kinds) == 33 and rate.kinds["others"] == 8
    rate = FaultRate(0.1, concurrency=25)
    for number in range(10):
        for _ in range(10 - number):
            rate.record_attempt(sandbox_failure(kind=f"Kind{number}", message="gone"))
    text = await pause_message(rate)
    assert "3 x sandbox Kind7: gone\n  3 faults of 2 other kinds\n  fix" in text and "Kind8" not in text
    one = FaultRate(0.1, concurrency=25)
    for number in range(81):
        one.record_attempt(sandbox_failure(kind=f"Kind{min(number // 10, 8)}"))
    assert "\n  1 fault of 1 other kind\n  fix" in await pause_message(one)
    few = FaultRate(0.1, concurrency=25)
    for number in range(80):
        few.record_attempt(sandbox_failure(kind=f"Kind{number % 8}"))
    assert "other kinds" not in await pause_message(few)


async def test_the_message_of_a_kind_is_truncated() -> None:
    rate = FaultRate(0.1, concurrency=1)
    for _ in range(32):
        rate.record_attempt(sandbox_failure(kind="k" * 200, message="m" * 1000))
    (kind,) = rate.kinds
    assert kind == "sandbox " + "k" * 92 and f": {'m' * 600}\n" in await pause_message(rate)


def test_attempts_that_another_one_ended_do_not_pause_the_run() -> None:
    rate = FaultRate(0.5, concurrency=64)
    crash, neighbor = (
        Failure(stage="environment", blame=Blame.INFRASTRUCTURE, kind=kind, message="its process ended", turn=1)
        for kind in ("EnvironmentCrash", "NeighborCrash")
    )
    for failure in (None, None, crash, *[neighbor] * 63) * 100:
        rate.record_attempt(failure)
    assert rate.share == pytest.approx(1 / 3, abs=0.01) and set(rate.kinds) == {"environment EnvironmentCrash"}
    assert rate.attempt_metrics()["attempts_failed"] == 6400
