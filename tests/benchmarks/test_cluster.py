from __future__ import annotations

import pytest

from benchmarks.cluster import GROUP_SIZE, Load, driver_part, make_turn


def test_a_turn_has_the_size_of_a_real_one() -> None:
    turn = make_turn(3)
    assert len(turn.completion_ids) == len(turn.logprobs) == 150 and len(set(turn.completion_ids)) == 150


@pytest.mark.slow
def test_the_driver_receives_all_episodes_of_remote_workers_over_either_transport() -> None:
    load = Load(episodes=32, concurrent=16, turns=2, delay_s=(0.0, 0.1))
    results = driver_part(load, ["http", "redis"])
    for result in results.values():
        assert result.episodes == 32 and GROUP_SIZE <= result.most_in_flight <= 16 + GROUP_SIZE and result.driver_cpu_s > 0
    assert results["redis"].redis_cpu_s is not None
