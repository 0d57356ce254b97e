from __future__ import annotations

from agentrl.records import Cancelled, Episode, Group, Score, ScoredEpisode, Trajectory
from agentrl.run.measure import done_without


def group(index: int, *wall_s: float, cancelled: tuple[Cancelled, ...] = ()) -> Group:
    line = (Trajectory(agent="main", turns=()),)
    episodes = [Episode(id=f"{index}-{n}", task_id="t", task_key="k", trajectories=line, wall_s=s) for n, s in enumerate(wall_s)]
    scored = tuple(ScoredEpisode(episode=one, score=Score(value=1.0)) for one in episodes)
    return Group(index=index, task_id="t", task_key="k", episodes=scored, cancelled=cancelled)


def test_what_groups_went_on_without_is_counted_beside_what_they_have() -> None:
    assert done_without([group(0, 1.0), group(1, 1.0)]) == {}, "a run without further attempts has no such figures"
    slow = Cancelled(episode_id="a", reason="spare", turns=2, tokens=300, wall_s=9.0)
    lazy = Cancelled(episode_id="b", reason="spare", turns=0, tokens=0, wall_s=5.0)
    idle = Cancelled(episode_id="c", reason="equal", begun=False)
    assert done_without([group(0, 1.0, 3.0, cancelled=(slow, idle)), group(1, 2.0, cancelled=(lazy,))]) == {
        "attempts_cancelled": 2,
        "attempts_not_begun": 1,
        "tokens_cancelled": 300,
        "groups_stopped": 1,
        "cancelled_tokens_mean": 150,
        "cancelled_wall_s_mean": 7,
        "counted_wall_s_mean": 2,
    }
