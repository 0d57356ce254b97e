"""Members, draws and ratings of a league."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import StoreError
from agentrl.version.league import ELO, FILE, VERSIONS, WINDOW, LeagueTable, ratings


def test_members_are_spread_evenly_and_their_number_is_bounded(tmp_path: Path) -> None:
    table, evicted = LeagueTable(tmp_path, size=5), list[int]()
    for version in range(1, 101):
        before = {*table.members, version}
        table.add(version)
        evicted += before - {*table.members}
    assert len(table.members) == 5 and table.members[0] == 0 and table.members[-1] == 100
    assert sorted({*evicted, *table.members}) == list(range(101)) and len(evicted) == 96
    gaps = [after - before for before, after in zip(table.members, table.members[1:], strict=False)]
    assert max(gaps) <= 64
    members = [*table.members]
    table.add(100)
    assert table.members == members


@given(st.integers(2, 12), st.lists(st.integers(0, 500), max_size=60))
def test_any_versions_in_any_order_keep_the_members_ascending(size: int, versions: list[int]) -> None:
    table = LeagueTable(Path("/nonexistent"), size=size)
    for version in versions:
        table.add(version)
        assert table.members == sorted({*table.members}) and len(table.members) <= size and table.members[0] == 0


def test_hard_opponents_are_drawn_more_often(tmp_path: Path) -> None:
    table = LeagueTable(tmp_path)
    for version in (1, 2, 3):
        table.add(version)
    for _ in range(98):
        table.record(9, 0, 1.0)
        table.record(9, 1, -1.0)
        table.record(9, 2, 0.0)
    weights = table.weights(10)
    beaten, hard, even = (1 - 0.99) ** 2 + 0.01, (1 - 0.01) ** 2 + 0.01, 0.25 + 0.01
    total = beaten + hard + 2 * even  # the one that never played counts as even
    assert weights == pytest.approx({0: beaten / total, 1: hard / total, 2: even / total, 3: even / total})
    drawn = Counter(table.draw(10, seed=seed) for seed in range(2000))
    assert drawn[1] / 2000 == pytest.approx(hard / total, abs=0.04) and drawn[0] > 0
    assert table.weights(9 + WINDOW) == pytest.approx(dict.fromkeys(range(4), 0.25)), "old results do not count"


def test_results_survive_a_restart_and_a_damaged_file_is_reported(tmp_path: Path) -> None:
    table = LeagueTable(tmp_path)
    table.add(4)
    table.record(5, 4, 2.0)
    table.record(5, 4, 0.0)
    table.record(5, 0, -1.0)
    table.save()
    reloaded = LeagueTable(tmp_path)
    assert reloaded.members == [0, 4] and reloaded.results == table.results and reloaded.ratings() == table.ratings()
    for damaged in (
        "{",
        "[]",
        '{"members": [4, 0], "results": []}',
        '{"members": [0], "results": [[1, 0, -1, 0, 0]]}',
        "[" * 100_000,
        '{"members": [Infinity], "results": []}',
    ):
        (tmp_path / FILE).write_text(damaged)
        with pytest.raises(StoreError, match="damaged"):
            LeagueTable(tmp_path)


def test_the_number_of_results_is_bounded(tmp_path: Path) -> None:
    table = LeagueTable(tmp_path)
    for version in range(3 * VERSIONS):
        table.record(version, 0, 1.0)
    assert len(table.results) <= VERSIONS + 1


def test_ratings_of_two_versions_equal_the_closed_form() -> None:
    """With many games the prior does not matter: the difference of strengths is the log odds, its variance 1 / (n p (1 - p))."""
    version_0, version_1 = ratings({(1, 0): (75_000, 100_000)})
    assert (version_0.elo, version_0.interval, version_0.games, version_1.games) == (0.0, (0.0, 0.0), 100_000, 100_000)
    assert version_1.elo == pytest.approx(ELO * math.log(3), rel=1e-3)
    half = 1.96 * ELO / math.sqrt(100_000 * 0.75 * 0.25)
    assert version_1.interval == pytest.approx((version_1.elo - half, version_1.elo + half), rel=1e-2)


def test_ratings_recover_known_strengths_and_their_intervals_cover_them() -> None:
    strengths, covered, total = [0.0, 0.5, -0.4, 1.2, 0.9], 0, 0
    for seed in range(60):
        draw, results = random.Random(seed), {}
        for i in range(5):
            for j in range(i):
                p = 1 / (1 + math.exp(strengths[j] - strengths[i]))
                results[i, j] = (float(sum(draw.random() < p for _ in range(60))), 60)
        for rating in ratings(results)[1:]:
            low, high = rating.interval
            covered += low <= ELO * strengths[rating.version] <= high
            total += 1
    assert 0.9 <= covered / total <= 0.99


def test_a_version_that_won_all_games_has_a_finite_rating() -> None:
    rated = ratings({(1, 0): (500.0, 500), (2, 1): (0.0, 10)})
    assert all(math.isfinite(bound) for rating in rated for bound in (rating.elo, *rating.interval))
    assert rated[1].elo > rated[2].elo
    assert ratings({})[0].elo == 0.0
