"""Which replica gets a request: invariants for requests in any order, and examples of each rule."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentrl.serving.server_pool import EpisodeRouter

ALL = [0, 1, 2]


def begin(routing: EpisodeRouter, episode: str, tokens: int, *, able: list[int] | None = None, full: tuple[int, ...] = ()) -> int:
    routing.begin(episode, episode.partition("-")[0])
    return routing.choose(episode, tokens, able=ALL if able is None else able, full=full)


@pytest.mark.parametrize("seed", range(20))
def test_an_episode_stays_on_its_replica_and_loads_add_up(seed: int) -> None:
    rng = random.Random(seed)
    routing = EpisodeRouter(3, apart=rng.choice([1, 4, 16]))
    episodes: dict[str, tuple[int, int]] = {}  # the replica and the longest context
    moves = 0
    for number in range(600):
        able = sorted(rng.sample(ALL, rng.choice([1, 2, 3, 3])))
        if rng.random() < 0.3 or not episodes:
            episode = f"g{rng.randrange(8)}-{number}"
            routing.begin(episode, episode.partition("-")[0])
            episodes[episode] = (-1, 0)
        episode = rng.choice(list(episodes))
        previous, longest = episodes[episode]
        if rng.random() < 0.2:
            routing.end(episode)
            del episodes[episode]
            continue
        tokens = rng.randrange(1, 500)
        chosen = routing.choose(episode, tokens, able=able, full=rng.sample(ALL, rng.randrange(4)))
        assert chosen in able
        assert chosen == previous or previous not in able, "the episode left a replica that could serve it"
        moves += previous not in (chosen, -1)
        episodes[episode] = (chosen, max(longest, tokens))
        assert routing.loads == [sum(context for home, context in episodes.values() if home == replica) for replica in ALL]
    assert routing.moved == moves > 0
    for episode in [*episodes, *episodes]:  # twice: ending is idempotent
        routing.end(episode)
    assert routing.loads == [0, 0, 0] and not routing._tasks and not routing._episodes


def test_groups_stay_together_and_replicas_fill_evenly() -> None:
    routing = EpisodeRouter(3, apart=8)
    homes = {group: {begin(routing, f"g{group}-{member}", 100) for member in range(8)} for group in range(12)}
    assert all(len(home) == 1 for home in homes.values())
    assert Counter(replica for (replica,) in homes.values()) == {0: 4, 1: 4, 2: 4}


def test_a_group_is_split_if_a_replica_would_be_too_far_ahead() -> None:
    routing = EpisodeRouter(3, apart=8)
    counts = Counter(begin(routing, f"g0-{member}", 100) for member in range(90))
    assert max(counts.values()) - min(counts.values()) <= 8 + 1 and set(counts) == {0, 1, 2}


def test_a_full_replica_gets_no_new_episode_and_keeps_its_own() -> None:
    routing = EpisodeRouter(3, apart=8)
    first = begin(routing, "g0-0", 100)
    assert begin(routing, "g0-1", 100, full=(first,)) != first
    assert routing.choose("g0-0", 200, able=ALL, full=(first,)) == first
    assert begin(routing, "g0-2", 100, able=[first], full=(first,)) == first, "liveness takes precedence over free memory"


def test_a_moved_episode_joins_its_group_and_stays() -> None:
    routing = EpisodeRouter(3, apart=8)
    assert [begin(routing, f"g{group}-{member}", 100) for group in range(3) for member in range(4)] == [0] * 4 + [1] * 4 + [2] * 4
    assert {routing.choose(f"g0-{member}", 150, able=[1, 2]) for member in range(4)} == {1}
    assert {routing.choose(f"g0-{member}", 160, able=ALL) for member in range(4)} == {1} and routing.moved == 4
    assert begin(routing, "g9-0", 100) == 0, "replica 0 gets new episodes again"
    assert routing.choose("of no episode", 5, able=ALL) == 0 and "of no episode" not in routing._episodes
