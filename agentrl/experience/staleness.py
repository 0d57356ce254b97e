"""How many updates old the experience is that the learner trains on.

Staleness is the learner's version minus the oldest version that sampled any token of the episode. Measuring it when the learner
takes the batch, not when the episode ended, makes time spent in the queue count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.records import Episode, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Staleness over the counted episodes of a batch, in versions; `episodes` is how many were measured."""

    mean: float
    max: int
    episodes: int


def staleness(episode: Episode, learner_version: int) -> int | None:
    """Versions the episode lags behind the learner; None when it has no sampled token.

    Negative only after the learner went back to an older checkpoint than the one that sampled the episode.
    """
    oldest = episode.oldest_version
    return None if oldest is None else learner_version - oldest


def summarize(groups: Iterable[Group], learner_version: int) -> Staleness:
    """Staleness of the episodes that count (scored, not left out) in `groups`; all zero when there is none."""
    values = [value for group in groups for item in group.scored if (value := staleness(item.episode, learner_version)) is not None]
    if not values:
        return Staleness(mean=0.0, max=0, episodes=0)
    return Staleness(mean=sum(values) / len(values), max=max(values), episodes=len(values))
