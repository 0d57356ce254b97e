from __future__ import annotations

import numpy as np
import pytest

from agentrl.objective import group_advantages
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode


def _episode(number: int, score: float | None, blame: Blame | None = None) -> ScoredEpisode:
    failures = () if blame is None else (Failure(stage="sandbox", blame=blame, kind="x", message=""),)
    episode = Episode(id=str(number), task_id="t", task_key="k", trajectories=(), failures=failures)
    return ScoredEpisode(episode=episode, score=Score(value=score, reason="" if score is not None else "no verdict"))


def _group(*episodes: ScoredEpisode) -> Group:
    return Group(index=0, task_id="t", task_key="k", episodes=episodes)


def test_closed_form() -> None:
    scores = [0.0, 1.0, 0.25, 0.5]
    group = _group(*(_episode(n, score) for n, score in enumerate(scores)))
    found = group_advantages(group, normalize_std=True, min_group_size=2)
    assert found.useful
    assert found.values == pytest.approx((np.array(scores) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-4), abs=1e-15)
    plain = group_advantages(group, normalize_std=False, min_group_size=2)
    assert plain.values == pytest.approx(np.array(scores) - np.mean(scores), abs=1e-15)


def test_episodes_that_do_not_count_leave_the_baseline_alone() -> None:
    counted = [_episode(0, 0.0), _episode(1, 1.0)]
    alone = group_advantages(_group(*counted), normalize_std=True, min_group_size=2)
    extra = [_episode(2, 1.0, Blame.INFRASTRUCTURE), _episode(3, None), _episode(4, 0.0, Blame.TASK)]
    mixed = group_advantages(_group(*counted, *extra), normalize_std=True, min_group_size=2)
    assert mixed.values == (*alone.values, None, None, None)


def test_a_policy_failure_counts() -> None:
    group = _group(_episode(0, 0.0, Blame.POLICY), _episode(1, 1.0))
    assert None not in group_advantages(group, normalize_std=True, min_group_size=2).values


@pytest.mark.parametrize(
    ("episodes", "minimum", "reason"),
    [
        ([_episode(0, 1.0)], 1, "all_equal"),
        ([_episode(0, 1.0)], 2, "too_few"),
        ([], 1, "too_few"),
        ([_episode(0, 0.5), _episode(1, 0.5)], 2, "all_equal"),
        ([_episode(0, 0.5), _episode(1, 1.0, Blame.INFRASTRUCTURE)], 2, "too_few"),
        ([_episode(0, float("inf")), _episode(1, 1.0)], 2, "non_finite_score"),
    ],
)
def test_groups_that_teach_nothing_are_dropped_with_a_reason(episodes: list[ScoredEpisode], minimum: int, reason: str) -> None:
    found = group_advantages(_group(*episodes), normalize_std=True, min_group_size=minimum)
    assert not found.useful
    assert found.dropped.startswith(reason)
    assert set(found.values) <= {None}
