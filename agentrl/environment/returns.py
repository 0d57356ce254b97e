"""The default verifier for environments: the sum of an episode's rewards."""

from __future__ import annotations

from collections import Counter

from agentrl.records import Episode, Score, Task


async def episode_return(task: Task, episode: Episode) -> Score:
    """Returns the sum of all rewards, the sums of their named parts, and the reward of each turn, which `objective.turn_coef` uses.

    If several roles received rewards, the value is the mean over those that the trained policy plays (0 if there are none), `parts`
    contains the sum for each role, and `branches` contains, for each trajectory, the sum for its role. `objective.credit=verifier` uses
    `branches`. If a limit ended the episode, the sum includes the rewards received before the limit.
    """
    rewards = tuple(
        tuple(sum(result.reward or 0.0 for result in turn.tool_results) for turn in trajectory.turns) for trajectory in episode.trajectories
    )
    results = [
        result
        for trajectory in episode.trajectories
        for turn in trajectory.turns
        for result in turn.tool_results
        if result.reward is not None
    ]
    evidence = f"{len(results)} steps, {episode.stop_reason}"
    gains = _returns_by_role(episode)
    if len(gains) > 1:
        trained = {trajectory.agent for trajectory in episode.trajectories if not trajectory.policy and trajectory.agent in gains}
        value = sum(gains[role] for role in trained) / len(trained) if trained else 0.0
        branches = tuple(gains.get(trajectory.agent) for trajectory in episode.trajectories)
        return Score(value=value, parts=gains, evidence=evidence, turn_rewards=rewards, branches=branches)
    parts = Counter[str]()
    for result in results:
        for name, number in result.parts.items():
            parts[name] += number  # type: ignore[assignment]
    return Score(value=float(sum(result.reward or 0.0 for result in results)), parts=dict(parts), evidence=evidence, turn_rewards=rewards)


def _returns_by_role(episode: Episode) -> dict[str, float]:
    """Returns agent -> sum of the agent's rewards, for the agents that received rewards."""
    gains: dict[str, float] = {}
    for trajectory in episode.trajectories:
        for result in (result for turn in trajectory.turns for result in turn.tool_results if result.reward is not None):
            gains[trajectory.agent] = gains.get(trajectory.agent, 0.0) + (result.reward or 0.0)
    return gains
