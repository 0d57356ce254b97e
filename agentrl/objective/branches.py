"""Decides which episode trains the turns that several episodes share, and with what advantage.

Episodes that branched from one state start with the same turns, which were sampled once. If each episode trained these turns, a shared turn
would be counted once per episode. Therefore, only the first counted episode trains a shared turn, with the mean advantage of the episodes
that share it. In the other episodes, the turn is context.

Why the mean: let s be the shared turns and b = 1..B the counted continuations, with advantages A_b. Given s, continuations are
exchangeable, so for a surrogate that is linear in the advantage

    E[A_1 grad log pi(s)] = E[(1/B) sum_b A_b grad log pi(s)].

Both estimators are unbiased, but A_1 has the variance of one continuation, while the mean averages out what happened after s. The
difference matters with a group baseline: if all N episodes come from one state, no comparison shows whether s was good. In that case, the
mean is 0, as it should be, but A_1 is noise. If there are several stems, the mean is the stem's mean score minus the group's mean score, as
in a GRPO group whose attempts are the stems. In GRPO, a stem is part of its own baseline, which multiplies its advantage by 1 - 1/stems
(with RLOO by (N - B)/(N - 1)).

The tokens after the branch point are unaffected: given s, the siblings' scores do not depend on them, so a baseline may include siblings.

In a sequence mean (`aggregation=sequence_mean`, `loss=gspo`, or an `off_policy` preset that works per sequence), the shared turns belong to
the first episode's sequence. With a critic (`advantage=gae`), the shared turns keep the first episode's rewards, and the critic's values
replace the mean. A penalty on scores (`kl=k1_reward`) covers all of an episode's tokens, including the tokens of shared turns, because the
score depends on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from agentrl.records import Group, Trajectory, TurnKey, sampled_tokens, turn_key


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedTrajectory:
    """A counted trajectory with the credit of each of its turns."""

    episode_id: str
    index: int  # index of the trajectory in its episode
    trajectory: Trajectory
    credit: Sequence[float]  # [turn] advantage, or reward
    trains: Sequence[bool] = ()  # [turn] whether its tokens are trained here; empty means all


def assign_shared_turns(trajectories: Sequence[CreditedTrajectory], *, mean: bool) -> list[CreditedTrajectory]:
    """Returns the trajectories with `trains` set: the first trajectory with a sampled turn trains that turn.

    Trajectories that train no turn are dropped. If no trajectory inherits turns, returns all of them unchanged.

    Args:
        trajectories: all counted trajectories of one group, in the group's order.
        mean: whether a shared turn receives the mean credit of its trajectories instead of the credit of the first.
    """
    if not any(each.trajectory.inherited for each in trajectories):
        return list(trajectories)
    keys_of = [
        [turn_key(each.episode_id, each.index, each.trajectory, number) for number in range(len(each.credit))] for each in trajectories
    ]
    credits: defaultdict[TurnKey, list[float]] = defaultdict(list)
    for each, keys in zip(trajectories, keys_of, strict=True):
        for key, value in zip(keys, each.credit, strict=True):
            credits[key].append(value)
    trained: set[TurnKey] = set()
    training = []
    for each, keys in zip(trajectories, keys_of, strict=True):
        trains = [key not in trained for key in keys]
        trained.update(keys)
        credit = [fmean(credits[key]) for key in keys] if mean else each.credit
        if any(trained_here and turn.completion_ids for trained_here, turn in zip(trains, each.trajectory.turns, strict=True)):
            training.append(replace(each, trains=trains, credit=credit))
    return training


def captured_tokens(groups: Sequence[Group], dropped: Collection[int]) -> int:
    """Returns the number of sampled tokens in the counted episodes of all groups whose index is not in `dropped`.

    A turn that several episodes share counts once.

    The learner counts the tokens that it packed (`tokens_delivered`); the two numbers are equal if every sampled token is trained once.
    """
    return sum(sampled_tokens(group.scored) for group in groups if group.index not in dropped)
