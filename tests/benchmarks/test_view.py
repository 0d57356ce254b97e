"""The benchmark of reading episodes reads a store like that of a run, and its cost is measured with and without an index."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from agentrl.experience import SqliteStore
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from benchmarks.view import _stored_pair, generate, read, realistic_group


def test_a_generated_store_has_the_rows_of_a_stored_one_and_every_query_is_timed(tmp_path: Path) -> None:
    generate(tmp_path, 400)
    with closing(SqliteStore(tmp_path / "experience.sqlite")) as store:
        assert len(store.entries()) == 50 and store.groups([0, 49])[1].index == 49
    with EpisodeIndex(tmp_path) as index:
        numbers = index.numbers(EpisodeQuery())
        assert numbers == list(range(1, 401)) and {row.turns for row in index.rows(numbers[-8:])} == {12}
        assert all(len(record.group.episodes) == 8 for record in index.records(numbers[:16]))
        assert index.facets().tools.keys() >= {"python", "submit"} and index.search(EpisodeQuery(text="word0")).total > 10
    done = read(tmp_path, 3, seed=0)
    assert {name: len(times) for name, times in done["times"].items()} == {
        **{"first page": 1, "facets": 1, "next page": 1, "long episode": 1},
        **{"filter": 3, "search": 3, "episode": 3},
    }
    assert done["total"] == 400 and done["cpu"].keys() == done["times"].keys() and done["peak_mib"] > 10


def test_the_cost_of_the_index_is_that_of_its_rows() -> None:
    groups = [realistic_group(number, random.Random(0)) for number in range(4)]
    for number in range(2):
        without, indexed = _stored_pair(number, groups)
        assert 0.0 < without < indexed
