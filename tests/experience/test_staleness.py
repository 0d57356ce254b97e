from __future__ import annotations

from agentrl.experience import Staleness, staleness, summarize
from agentrl.records import Blame, Episode, Failure, Group, Message, Score, ScoredEpisode, Trajectory, Turn, VersionSpan


def episode(*versions: int, failures: tuple[Failure, ...] = ()) -> Episode:
    """One token for each version, all in one turn."""
    n = len(versions)
    turns = ()
    if n:
        turn = Turn(
            prompt_ids=(1,),
            completion_ids=(2,) * n,
            logprobs=(0.0,) * n,
            versions=tuple(VersionSpan(version=version, start=at, end=at + 1) for at, version in enumerate(versions)),
            message=Message(role="assistant", content=""),
            finish_reason="stop",
        )
        turns = (turn,)
    return Episode(id="e", task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=turns),), failures=failures)


def test_the_oldest_token_decides_also_when_the_weights_changed_in_mid_episode() -> None:
    assert staleness(episode(4, 5, 5), learner_version=6) == 2
    assert staleness(episode(6), learner_version=6) == 0
    assert staleness(episode(), learner_version=6) is None


def test_only_episodes_that_count_are_summarized() -> None:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="died", message="")
    scored = Score(value=0.0)
    items = (
        ScoredEpisode(episode=episode(5), score=scored),
        ScoredEpisode(episode=episode(2, 3), score=scored),
        ScoredEpisode(episode=episode(0, failures=(fault,)), score=scored),
        ScoredEpisode(episode=episode(0), score=Score(value=None, reason="verifier failed")),
    )
    group = Group(index=0, task_id="t", task_key="k", episodes=items)
    assert summarize([group], learner_version=5) == Staleness(mean=1.5, max=3, episodes=2)
    assert summarize([], learner_version=5) == Staleness(mean=0.0, max=0, episodes=0)
