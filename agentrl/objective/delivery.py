"""What a step should train of what was sampled: the other side of the count that the learner makes of its micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentrl.records import Group


def captured_tokens(groups: Sequence[Group], dropped: Collection[int]) -> int:
    """Tokens that were sampled for the episodes that count, in groups that are not `dropped` (indices); a turn that several episodes
    inherited counts once, however many of them count.

    The learner counts what it packed (`tokens_delivered`); the two are equal as long as every sampled token is trained once.
    """
    turns: set[tuple[int, str, int, int, tuple[int, ...], tuple[float, ...], int]] = set()
    for group in groups:
        if group.index in dropped:
            continue
        for scored in group.scored:
            for number, line in enumerate(scored.episode.trajectories):
                for place, turn in enumerate(line.turns):
                    sampler = line.inherited[place] if place < len(line.inherited) else scored.episode.id
                    turns.add((group.index, sampler, number, place, turn.completion_ids, turn.logprobs, turn.sampled))
    return sum(turn[-1] for turn in turns)
