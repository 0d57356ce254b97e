"""The number of tokens that a step should train, to compare with the learner's count of its micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentrl.objective.branches import TurnKey, turn_key
from agentrl.records import Group


def captured_tokens(groups: Sequence[Group], dropped: Collection[int]) -> int:
    """Returns the sampled tokens of the counted episodes of groups that are not `dropped` (indices). A shared turn counts once.

    The learner counts the tokens that it packed (`tokens_delivered`); the two are equal if every sampled token is trained once.
    """
    sampled: dict[tuple[int, TurnKey], int] = {}
    for group in groups:
        for scored in group.scored if group.index not in dropped else ():
            for index, trajectory in enumerate(scored.episode.trajectories):
                for number, turn in enumerate(trajectory.turns):
                    sampled[group.index, turn_key(scored.episode.id, index, trajectory, number)] = turn.sampled
    return sum(sampled.values())
