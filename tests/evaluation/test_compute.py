"""Success against compute, compared with a direct count, and general properties."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluation.statistics import MAX_POINTS, CountedAttempt, attempt_counts, compute_curves, pass_at_attempt_counts

attempts = st.builds(CountedAttempt, passed=st.booleans(), tokens=st.integers(0, 400))
tables = st.integers(1, 5).flatmap(lambda k: st.lists(st.lists(attempts, min_size=k, max_size=k), min_size=1, max_size=6))


def test_attempt_counts_end_with_all_attempts() -> None:
    assert [attempt_counts(count) for count in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_curves_of_a_table_with_known_answers() -> None:
    tasks = [
        [CountedAttempt(passed=True, tokens=10), CountedAttempt(passed=False, tokens=30)],
        [CountedAttempt(passed=True, tokens=20)] * 2,
    ]
    once, twice = compute_curves(tasks)
    assert once.points == ((0, 0.0), (10, 0.25), (17.5, 0.75), (20, 0.75))
    assert twice.points == ((0, 0.0), (20, 0.5), (35, 1.0), (40, 1.0))
    assert pass_at_attempt_counts(tasks) == {1: 0.75, 2: 1.0}


@given(tables)
def test_every_point_equals_a_direct_count(tasks: list[list[CountedAttempt]]) -> None:
    longest = max(attempt.tokens for tries in tasks for attempt in tries)
    for curve in compute_curves(tasks):
        shares = []
        for tries in tasks:
            choices = list(combinations(tries, curve.attempts))
            shares.append(sum(any(attempt.passed for attempt in choice) for choice in choices) / len(choices))
        spent, solved = curve.points[-1]
        assert abs(solved - sum(shares) / len(shares)) < 1e-9, "with the largest budget no attempt is cut off"
        assert abs(solved - pass_at_attempt_counts(tasks)[curve.attempts]) < 1e-9
        assert spent <= curve.attempts * longest
        assert list(curve.points) == sorted(curve.points) and len(curve.points) <= MAX_POINTS
        assert all(low <= high for (_, low), (_, high) in zip(curve.points, curve.points[1:], strict=False)), "more tokens solve no less"


def test_tasks_without_attempts_have_no_curve() -> None:
    assert (
        compute_curves([]) == () and pass_at_attempt_counts([]) == {} and compute_curves([[]]) == () and pass_at_attempt_counts([[]]) == {}
    )
