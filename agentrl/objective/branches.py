"""Which episode trains the turns that several episodes share, and with what advantage.

Episodes that branched from one state begin with the same turns, sampled once. Trained in each of them they would count as often as
there are branches, and a turn would weigh the more the earlier the branching. So they are trained in the first episode that counts
and are context in the others, and there they get the mean of the advantages that their episodes give them.

Why the mean. Let s be the shared turns and b = 1..B the continuations that count, with advantages A_b. Given s, continuations are
exchangeable, so E[A_b | s] is the same for all b, and for a surrogate that is linear in the advantage

    E[A_1 grad log pi(s)] = E[(1/B) sum_b A_b grad log pi(s)].

Both are unbiased, and so would be weights of 1/B in every episode, which is the same sum; but the first alone has the variance of one
continuation, while the mean averages out what happened after the branching, which s did not cause. Under a group baseline this
decides what is learned: if all N episodes of a group come from one state, the advantages over their mean add up to 0, which is
right, since nothing says whether s itself was good; A_1 would be pure noise. With several stems the mean is the stem's mean score
minus the group's, the advantage of a GRPO group whose attempts are stems. Being part of its own baseline shrinks it, as everywhere
in GRPO, by 1 - 1/stems (with RLOO, whose baseline leaves out one branch and not its siblings, by (N - B)/(N - 1)); no sign changes.
Where stems may end before they branch, their share in their own baseline depends on how they end, an effect of order 1/stems too.

For the tokens after the branching nothing changes: given s, their siblings' scores do not depend on them, so a baseline that has
siblings in it is as good for them as any.

What each choice of settings makes of it: a sampled token counts once in a token mean. A sequence (`aggregation=sequence_mean`,
`loss=gspo`, `is_level=sequence`) is what one sample trains, so the shared turns belong to the first episode's. With a critic
(`advantage=gae`) there are rewards instead of advantages and the shared turns keep those of the first episode: unbiased, and the
critic's values do what the mean does here. A penalty on scores (`kl=k1_reward`) is computed over all of an episode's tokens, its
inherited ones included, because they are part of what is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from agentrl.records import Trajectory

_Key = tuple[str, int, int, tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One trajectory that counts, and what each of its turns is given."""

    episode_id: str
    number: int  # of the trajectory in its episode
    trajectory: Trajectory
    credit: Sequence[float]  # [turn] advantage, or reward
    trains: Sequence[bool] = ()  # [turn] whether its tokens are trained here; empty: all are


def trained_once(lines: Sequence[Line], *, mean: bool) -> list[Line]:
    """The lines with `trains` set so that every sampled turn is trained in the first line that has it; lines without any are dropped.

    Args:
        lines: of one group; all those that count, in the order of the group.
        mean: a shared turn gets the mean of what its lines give it, instead of the first one's.
    """
    if not any(line.trajectory.inherited for line in lines):
        return list(lines)
    given: dict[_Key, list[float]] = {}
    for line in lines:
        for place, value in enumerate(line.credit):
            given.setdefault(_key(line, place), []).append(value)
    trained: set[_Key] = set()
    made = []
    for line in lines:
        keys = [_key(line, place) for place in range(len(line.credit))]
        trains = [key not in trained for key in keys]
        trained.update(keys)
        credit = [fmean(given[key]) for key in keys] if mean else line.credit
        if any(here and turn.completion_ids for here, turn in zip(trains, line.trajectory.turns, strict=True)):
            made.append(replace(line, trains=trains, credit=credit))
    return made


def _key(line: Line, place: int) -> _Key:
    """Which sampled turn this is: by who sampled it, and by its tokens, since an attempt may have been begun twice under one id.

    By its tokens alone would not do: attempts of a policy that is sure of itself agree in them without sharing them.
    """
    inherited, turn = line.trajectory.inherited, line.trajectory.turns[place]
    sampled_by = inherited[place] if place < len(inherited) else line.episode_id
    return sampled_by, line.number, place, turn.completion_ids, turn.logprobs
