"""Which episode trains the turns that several episodes share, and with what advantage.

Episodes that branched from one state begin with the same turns, sampled once. Trained in each episode they would count once a
branch, so a turn would weigh more the earlier the branching. So they are trained in the first episode that counts, with the mean
of the advantages that their episodes give them, and are context in the others.

Why the mean. Let s be the shared turns and b = 1..B the continuations that count, with advantages A_b. Given s, continuations are
exchangeable, so E[A_b | s] is the same for all b, and for a surrogate that is linear in the advantage

    E[A_1 grad log pi(s)] = E[(1/B) sum_b A_b grad log pi(s)].

Both are unbiased (and so are weights of 1/B in every episode, which is the same sum), but the first alone has the variance of one
continuation, while the mean averages out what happened after the branching, which s did not cause. With a group baseline this
decides what is learned: if all N episodes of a group come from one state, the advantages over their mean add up to 0, which is
right, since nothing tells whether s itself was good; A_1 would be pure noise. With several stems the mean is the stem's mean score
minus the group's, the advantage in a GRPO group whose attempts are stems. As everywhere in GRPO, being part of its own baseline
shrinks it, by 1 - 1/stems (with RLOO, whose baseline leaves out one branch but not its siblings, by (N - B)/(N - 1)); no sign
changes. Where stems may end before they branch, their share in their own baseline depends on how they end, also of order 1/stems.

Nothing changes for the tokens after the branching: given s, the siblings' scores do not depend on them, so a baseline that includes
siblings is as good as any.

The effect by setting: in a token mean a sampled token counts once. A sequence (`aggregation=sequence_mean`, `loss=gspo`,
`is_level=sequence`) is what one sample trains, so the shared turns belong to the first episode's sequence. With a critic
(`advantage=gae`) there are rewards instead of advantages, and the shared turns keep the first episode's: unbiased, and the critic's
values replace the mean. A penalty on scores (`kl=k1_reward`) is computed over all of an episode's tokens, including inherited ones,
because they are part of what is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from agentrl.records import Trajectory

TurnKey = tuple[str, int, int, tuple[int, ...], tuple[float, ...]]
"""What identifies a sampled turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedTrajectory:
    """One trajectory that counts, with the credit of each of its turns."""

    episode_id: str
    index: int  # of the trajectory in its episode
    trajectory: Trajectory
    credit: Sequence[float]  # [turn] advantage, or reward
    trains: Sequence[bool] = ()  # [turn] whether its tokens are trained here; empty: all are


def assign_shared_turns(lines: Sequence[CreditedTrajectory], *, mean: bool) -> list[CreditedTrajectory]:
    """The lines with `trains` set so that every sampled turn is trained in the first line with it; lines that train none are dropped.

    Args:
        lines: all lines of one group that count, in the group's order.
        mean: a shared turn gets the mean of its lines' credit instead of the first line's.
    """
    if not any(line.trajectory.inherited for line in lines):
        return list(lines)
    credits: dict[TurnKey, list[float]] = {}
    for line in lines:
        for number, value in enumerate(line.credit):
            credits.setdefault(turn_key(line.episode_id, line.index, line.trajectory, number), []).append(value)
    trained: set[TurnKey] = set()
    kept = []
    for line in lines:
        keys = [turn_key(line.episode_id, line.index, line.trajectory, number) for number in range(len(line.credit))]
        trains = [key not in trained for key in keys]
        trained.update(keys)
        credit = [fmean(credits[key]) for key in keys] if mean else line.credit
        if any(here and turn.completion_ids for here, turn in zip(trains, line.trajectory.turns, strict=True)):
            kept.append(replace(line, trains=trains, credit=credit))
    return kept


def turn_key(episode_id: str, place: int, trajectory: Trajectory, number: int) -> TurnKey:
    """Identifies turn `number` of the trajectory at `place` by the episode that sampled it and by its tokens, since an id may have been
    started twice.

    Tokens alone do not suffice: attempts of a confident policy agree without sharing turns.
    """
    inherited, turn = trajectory.inherited, trajectory.turns[number]
    sampled_by = inherited[number] if number < len(inherited) else episode_id
    return sampled_by, place, number, turn.completion_ids, turn.logprobs
