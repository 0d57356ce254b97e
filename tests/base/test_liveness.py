"""The deadline for the progress of a part, on a clock that only the test advances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.liveness import (
    DEADLINE_FACTOR,
    MIN_DEADLINE_S,
    SOUND_S,
    STOPPED_S,
    AnswerLiveness,
    Liveness,
    Restarts,
    StoppedProcesses,
    external_parts,
)
from agentrl.testing.clock import JumpingClock

FIRST_S = 1800.0


def part(clock: JumpingClock) -> Liveness:
    return Liveness("the part", first_s=FIRST_S, clock=clock.monotonic)


def silent_for(seconds: float, clock: JumpingClock, live: Liveness, look_s: float = 0.5) -> str:
    """Returns the first verdict within so many seconds without progress, checked every `look_s` seconds."""
    for _ in range(int(seconds / look_s)):
        clock.now += look_s
        if verdict := live.overdue():
            return verdict
    return ""


def steps(clock: JumpingClock, live: Liveness, count: int, seconds: float, work: str = "making a step") -> None:
    for _ in range(count):
        live.progress(work)
        clock.now += seconds
    live.progress(work)


def test_unknown_work_has_the_initial_deadline() -> None:
    clock = JumpingClock()
    live = part(clock)
    assert not silent_for(FIRST_S - 1, clock, live)
    assert "no progress for 18" in silent_for(10, clock, live)


def test_a_stop_after_steps_of_five_seconds_is_detected_within_a_minute() -> None:
    clock = JumpingClock()
    live = part(clock)
    steps(clock, live, 3, 5.0)
    assert not silent_for(MIN_DEADLINE_S - 1, clock, live)
    verdict = silent_for(5, clock, live)
    assert "while making a step" in verdict and "longest so far: 5.0 s" in verdict and "deadline: 60 s" in verdict


def test_the_deadline_of_slow_steps_is_ten_times_their_duration() -> None:
    clock = JumpingClock()
    live = part(clock)
    steps(clock, live, 3, 40.0)
    assert live.deadline_s == 400.0
    assert not silent_for(399, clock, live)
    assert silent_for(3, clock, live)


def test_each_kind_of_work_has_its_own_history() -> None:
    """A checkpoint that takes two minutes between micro-batches of a tenth of a second."""
    clock = JumpingClock()
    live = part(clock)
    for _ in range(3):
        live.progress("writing a checkpoint")
        clock.now += 120.0
        steps(clock, live, 500, 0.1, "computing a micro-batch")
    assert live.deadline_s == MIN_DEADLINE_S
    live.progress("writing a checkpoint")
    assert live.deadline_s == DEADLINE_FACTOR * 120.0


def test_work_of_an_unknown_size_has_the_initial_deadline() -> None:
    clock = JumpingClock()
    live = part(clock)
    for _ in range(3):
        live.progress("computing", 200)
        clock.now += 0.1
    live.progress("computing", 400)
    assert live.deadline_s == MIN_DEADLINE_S
    live.progress("computing", 802)
    assert live.deadline_s == FIRST_S
    live.progress("computing", 16_384)
    assert live.deadline_s == FIRST_S
    clock.now += 30.0
    live.progress("computing", 16_384)
    assert live.deadline_s == DEADLINE_FACTOR * 30.0


def test_a_restarted_part_is_compared_with_its_first_times() -> None:
    """The first micro-batch after a restart compiles again, however short the later ones were."""
    clock = JumpingClock()
    live = part(clock)
    for life in range(2):
        live.begin()
        clock.now += 8.0
        live.progress("computing")
        if life:
            break
        clock.now += 200.0
        steps(clock, live, 5, 0.1, "computing")
        assert live.deadline_s == MIN_DEADLINE_S
    assert live.deadline_s == DEADLINE_FACTOR * 200.0
    clock.now += 150.0
    live.progress("computing")
    assert live.deadline_s == MIN_DEADLINE_S


def test_a_paused_part_is_never_overdue() -> None:
    clock = JumpingClock()
    live = part(clock)
    steps(clock, live, 3, 1.0)
    live.pause()
    assert not silent_for(10 * FIRST_S, clock, live, look_s=5.0)
    live.progress("making a step")
    assert silent_for(MIN_DEADLINE_S + 2, clock, live)


def test_time_without_checks_does_not_count() -> None:
    """The driver was stopped for an hour; the part's reports of that time were lost."""
    clock = JumpingClock()
    live = part(clock)
    steps(clock, live, 3, 1.0)
    clock.now += 3600.0
    assert not live.overdue()
    assert not silent_for(MIN_DEADLINE_S - 25, clock, live)
    assert silent_for(26, clock, live)


def test_reports_carry_their_own_time() -> None:
    """If several reports are read at once, durations come from their times, not from the time of reading."""
    clock = JumpingClock()
    live, now = part(clock), clock.now
    for at in (-100.0, -60.0, -20.0):
        live.progress("computing", at=now + at)
    live.progress("computing", at=now + 3600.0)  # no report is from the future
    assert live.deadline_s == DEADLINE_FACTOR * 40.0


@given(st.lists(st.integers(1, 400), min_size=2, max_size=20))
def test_work_shorter_than_ten_times_the_longest_before_is_never_overdue(durations: list[int]) -> None:
    clock, times_s = JumpingClock(0.0), list[int]()
    live = part(clock)
    live.progress("working")
    for number, checks in enumerate(durations):
        # The first time after a start is only compared with other first times.
        allowed = FIRST_S if number < 2 else max(MIN_DEADLINE_S, DEADLINE_FACTOR * max(times_s[1:]))
        times_s.append(min(5 * checks, int(allowed - 1) // 5 * 5))
        assert not silent_for(times_s[-1], clock, live, look_s=5.0)
        live.progress("working")
    assert silent_for(max(MIN_DEADLINE_S, DEADLINE_FACTOR * max(times_s[1:])) + 10, clock, live, look_s=5.0)


def test_progress_exactly_at_the_deadline_is_not_late() -> None:
    clock = JumpingClock(0.0)
    live = part(clock)
    steps(clock, live, 3, 1.0)
    assert not silent_for(MIN_DEADLINE_S, clock, live) and live.silent_s == MIN_DEADLINE_S
    live.progress("making a step")
    assert live.silent_s == 0.0
    clock.now += 5.0
    live.overdue()
    live.pause()
    assert live.silent_s == 0.0


def test_short_work_sets_a_deadline_from_its_duration() -> None:
    clock = JumpingClock(0.0)
    live = Liveness("the part", first_s=FIRST_S, least_s=0.5, clock=clock.monotonic)
    steps(clock, live, 3, 0.25)
    assert live.deadline_s == 2.5
    live.progress("making a step", at=clock.now - 10.0)  # reports in the wrong order
    live.progress("making a step", at=clock.now - 20.0)
    assert live.deadline_s == 2.5


def test_the_longest_of_the_last_1024_pieces_of_work_counts() -> None:
    clock = JumpingClock(0.0)
    live = part(clock)
    live.progress("working")
    live.progress("working")  # first times count separately
    clock.now += 100.0
    steps(clock, live, 1023, 1.0, "working")
    assert live.deadline_s == DEADLINE_FACTOR * 100.0
    clock.now += 1.0
    live.progress("working")
    assert live.deadline_s == MIN_DEADLINE_S


def test_work_without_a_size_has_the_size_1() -> None:
    clock = JumpingClock(0.0)
    for history, current in (({}, {"size": 2.0}), ({"size": 1.0}, {}), ({"size": 0.5}, {})):
        live = part(clock)
        live.progress("working")
        for _ in range(3):
            live.progress("working", **history)
        live.progress("working", **current)
        assert live.deadline_s == MIN_DEADLINE_S
    live = part(clock)
    for _ in range(3):
        live.progress("working")
    live.progress("working", 2.125)
    assert live.deadline_s == FIRST_S


def test_no_deadline_is_shorter_than_ten_times_a_measured_piece_of_work() -> None:
    """A long prompt on a CPU shows no progress for minutes, however quickly short ones were computed."""
    clock = JumpingClock()
    live = part(clock)
    live.needs_s = 30.0
    assert live.deadline_s == FIRST_S
    steps(clock, live, 3, 1.0)
    assert live.deadline_s == DEADLINE_FACTOR * 30.0
    assert not silent_for(299, clock, live) and silent_for(3, clock, live)
    live.needs_s = 1000.0
    live.begin()
    assert live.deadline_s == DEADLINE_FACTOR * 1000.0, "nor is the first one"


def test_consecutive_restarts_are_counted() -> None:
    clock = JumpingClock()
    restarts = Restarts(clock=clock.monotonic)
    assert [restarts.failed() for _ in range(3)] == [1, 2, 3]
    restarts.started()
    clock.now += SOUND_S - 1
    restarts.progress()
    assert restarts.failed() == 4, "it worked too briefly"
    restarts.started()
    for _ in range(20):
        clock.now += SOUND_S / 10
        restarts.progress()
    assert restarts.failed() == 1 and restarts.total == 5


def test_ten_minutes_of_work_end_a_row_of_failures() -> None:
    for seconds, row in ((599.0, 2), (600.0, 1)):
        clock = JumpingClock(0.0)
        restarts = Restarts(clock=clock.monotonic)
        assert restarts.failed() == 1
        restarts.started()
        clock.now += seconds
        restarts.progress()
        assert restarts.failed() == row, seconds


@given(st.integers(1, 400))
def test_rare_failures_do_not_add_up(hours: int) -> None:
    clock = JumpingClock()
    restarts = Restarts(clock=clock.monotonic)
    for _ in range(hours):
        clock.now += 3600.0
        restarts.progress()
        assert restarts.failed() == 1
        restarts.started()
    assert restarts.total == hours


def answering(clock: JumpingClock) -> AnswerLiveness:
    return AnswerLiveness("MCP server search", fix="check it", first_s=120.0, clock=clock.monotonic)


def passes(clock: JumpingClock, live: AnswerLiveness, seconds: float) -> str:
    for _ in range(int(seconds / 5)):
        clock.now += 5.0
        live.overdue()
    return live.overdue()


def test_a_part_without_answers_is_overdue_however_its_calls_end() -> None:
    """Each call ends at its own deadline of ten seconds, and is followed by another."""
    clock = JumpingClock()
    live = answering(clock)
    for number in range(40):
        with live.question():
            passes(clock, live, 10)
        passes(clock, live, 600)
        assert bool(live.overdue()) == (10 * (number + 1) > 120), "only time with an open call counts"
    assert live.overdue() == "MCP server search has not answered for 400 s (no answer so far; deadline: 120 s)"
    live.answered(3.0)
    assert live.overdue() == ""


def test_a_part_that_answers_other_callers_is_not_overdue() -> None:
    clock = JumpingClock()
    live = answering(clock)
    with live.question():
        for _ in range(100):
            with live.question():
                passes(clock, live, 10)
                live.answered(10.0)
            assert live.overdue() == ""
        assert live.deadline_s == DEADLINE_FACTOR * 10.0
        assert passes(clock, live, 95) == "" and "longest so far: 10.0 s; deadline: 100 s" in passes(clock, live, 10)


def test_only_time_with_an_open_question_counts() -> None:
    clock = JumpingClock(0.0)
    live = AnswerLiveness("MCP server search", fix="check it", first_s=25.0, clock=clock.monotonic)
    for number in range(1, 7):
        clock.now += 15.0
        with live.question():
            clock.now += 5.0
        clock.now += 15.0
        assert bool(live.overdue()) == (number == 6)
    assert "has not answered for 30 s" in live.overdue()


def test_the_deadline_of_an_answer_is_based_on_the_longest_and_starts_at_the_last_answer() -> None:
    clock = JumpingClock(0.0)
    live = AnswerLiveness("the judge", fix="check it", first_s=120.0, least_s=1.0, clock=clock.monotonic)
    for seconds, deadline_s in ((0.25, 2.5), (0.5, 5.0), (0.125, 5.0)):
        live.answered(seconds)
        assert live.deadline_s == deadline_s
    with live.question():
        clock.now += 4.0
        live.answered(0.5)
        clock.now += 5.0
        assert live.overdue() == "", "the deadline itself is not late"
        clock.now += 0.5
        assert live.overdue() == "the judge has not answered for 6 s (longest so far: 0.5 s; deadline: 5 s)"


def test_a_part_is_watched_from_its_first_question() -> None:
    live = answering(JumpingClock())
    assert live not in external_parts()
    with live.question():
        assert live in external_parts()
    assert live in external_parts()


def test_time_while_the_driver_was_stopped_does_not_count() -> None:
    clock = JumpingClock()
    live = answering(clock)
    with live.question():
        clock.now += 3600.0
        assert live.overdue() == ""


def test_a_stopped_process_is_reported_after_some_seconds_and_a_suspended_checker_does_not_count() -> None:
    clock, states = JumpingClock(), {10: "S", 11: "R"}
    stopped = StoppedProcesses("the part", states=lambda root: states if root == 10 else {}, clock=clock.monotonic)

    def verdicts(seconds: float) -> list[str]:
        results = []
        for _ in range(int(seconds * 2)):
            clock.now += 0.5
            results.append(stopped.overdue(10))
        return results

    assert not any(verdicts(60.0))
    states[11] = "T"
    assert not any(verdicts(STOPPED_S - 2.5))
    states[11] = "S"
    assert not any(verdicts(2.5))
    states[11] = "T"
    assert not any(verdicts(2.5))
    clock.now += 1000.0  # the checker was stopped too, and its part may just be continuing
    assert not any(verdicts(STOPPED_S - 0.5))
    assert any("the part has made no progress for" in text and "stopped process 11" in text for text in verdicts(5.0))


def test_completed_work_ends_a_row_of_failures() -> None:
    restarts = Restarts(clock=JumpingClock().monotonic)
    assert [restarts.failed(), restarts.failed()] == [1, 2]
    restarts.completed()
    assert restarts.failed() == 1 and restarts.total == 3


def test_the_seconds_by_kind_of_work_add_up_to_the_unpaused_time() -> None:
    now = 100.0
    part = Liveness("the learner", first_s=10.0, clock=lambda: now)
    for number in range(200):
        part.progress(f"work {number % 100}")
        now += 1.0
    assert sum(part.spent_s().values()) == 200.0 and len(part.spent_s()) <= 66, "many kinds count as one"
    assert part.spent_s()["work 3"] == 2.0
    part.pause()
    now += 50.0
    assert sum(part.spent_s().values()) == 200.0
    part.progress("work 3")
    now += 5.0
    assert part.spent_s()["work 3"] == 7.0, "with the current work"
