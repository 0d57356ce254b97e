"""The default verifier of environments: the sum of the rewards of an episode."""

from __future__ import annotations

from collections import Counter

from agentrl.records import Episode, Score, Task


async def episode_return(task: Task, episode: Episode) -> Score:
    """Returns the sum of all rewards, the sums of their named parts, and the reward of each turn for `objective.turn_coef`.

    An episode that its limits ended has the rewards that it collected until then.
    """
    rewards = tuple(
        tuple(sum(result.reward or 0.0 for result in turn.tool_results) for turn in trajectory.turns) for trajectory in episode.trajectories
    )
    results = [result for line in episode.trajectories for turn in line.turns for result in turn.tool_results if result.reward is not None]
    parts = Counter[str]()
    for result in results:
        for name, value in result.parts.items():
            parts[name] += value  # type: ignore[assignment]
    evidence = f"{len(results)} steps, {episode.stop_reason}"
    return Score(value=float(sum(result.reward or 0.0 for result in results)), parts=dict(parts), evidence=evidence, turn_rewards=rewards)
