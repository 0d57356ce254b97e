"""The benchmark of reading episodes: a generated store is like that of a run, and storing is timed with and without an index."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from agentrl.experience import SqliteStore
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from benchmarks.view import _stored_pair, generate, read, realistic_group


def test_a_generated_store_has_the_rows_of_a_real_one_and_every_query_is_timed(tmp_path: Path) -> None:
    generate(tmp_path, 400)
    with closing(SqliteStore(tmp_path / "experience.sqlite")) as store:
        assert len(store.entries()) == 50 and store.groups([0, 49])[1].index == 49
    with EpisodeIndex(tmp_path) as index:
        numbers = index.numbers(EpisodeQuery())
        assert numbers == list(range(1, 401)) and {row.turns for row in index.rows(numbers[-8:])} == {12}
        assert all(len(record.group.episodes) == 8 for record in index.records(numbers[:16]))
        assert index.facets().tools.keys() >= {"python", "submit"} and index.search(EpisodeQuery(text="word0")).total > 10
    result = read(tmp_path, 3, seed=0)
    assert {name: len(times) for name, times in result["times"].items()} == {
        **{"first page": 1, "facets": 1, "next page": 1, "long episode": 1},
        **{"filter": 3, "search": 3, "episode": 3},
    }
    assert result["total"] == 400 and result["cpu"].keys() == result["times"].keys() and result["peak_mib"] > 10


def test_storing_with_an_index_takes_longer_than_without() -> None:
    groups = [realistic_group(number, random.Random(0)) for number in range(4)]
    for number in range(2):
        without, indexed = _stored_pair(number, groups)
        assert 0.0 < without < indexed
