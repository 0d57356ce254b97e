"""The groups of each learner step: a fixed number, plus one for each group without a preference (dynamic sampling, DAPO, arXiv 2503.14476).

A step's indices are a block of fixed size. The first `per_step` always run. Driver and learner derive from the stored groups how many of
the others belong to the step, so they agree without communication, even after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.base.scores import all_equal
from agentrl.config.recipe import RolloutConfig
from agentrl.protocols import ExperienceStore
from agentrl.records import Group

_FAR = 1 << 30  # schedule position of the first extra group, beyond all other groups of a run


def has_preference(group: Group, *, min_group_size: int) -> bool:
    """Whether some attempts of a group scored higher than others, so that it can teach anything."""
    return len(group.scored) >= min_group_size and not all_equal(scored.score.value or 0.0 for scored in group.scored)


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of each learner step of a run. Preferences of stored groups are cached, because stored groups never change."""

    per_step: int
    extra: int = 0
    min_group_size: int = 2
    _known: dict[int, bool] = field(default_factory=dict, repr=False)  # index -> whether it has a preference

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> StepGroups:
        """The groups that a recipe's `rollout` section configures."""
        return cls(rollout.groups_per_step, rollout.extra_groups, rollout.group.min_size)

    @classmethod
    def single_step(cls, rollout: RolloutConfig) -> StepGroups:
        """One step with all groups, for a policy that does not learn. Each group has the next task."""
        return cls(_FAR, 0, rollout.group.min_size)

    def step_of(self, index: int) -> int:
        """The learner step that a group belongs to."""
        return index // (self.per_step + self.extra)

    def indices(self, step: int) -> range:
        """All groups that a step may have, in the order in which they start."""
        size = self.per_step + self.extra
        return range(step * size, (step + 1) * size)

    def position(self, index: int) -> int:
        """A group's position in the task schedule. Extra groups have separate positions, so they do not shift the others."""
        step, place = divmod(index, self.per_step + self.extra)
        return step * self.per_step + place if place < self.per_step else _FAR + step * self.extra + place - self.per_step

    def preference(self, group: Group) -> bool:
        """Whether a group counts towards the `per_step` of its step."""
        return self._known.setdefault(group.index, has_preference(group, min_group_size=self.min_group_size))

    def set_preference(self, index: int, preference: bool) -> None:
        """Records the preference of a stored group, so that the group need not be read."""
        self._known[index] = preference

    def consumed_indices(self, step: int, store: ExperienceStore) -> range | None:
        """The groups that a step consumes: the shortest prefix of its block with `per_step` preferences, or the whole block.

        None if one of them is not stored yet.
        """
        return self._taken(step, lambda index: self._stored(index, store))

    def _taken(self, step: int, preference: Callable[[int], bool | None]) -> range | None:
        block, wanted, taken = self.indices(step), self.per_step, 0
        while taken < wanted:
            has_preference = preference(block[taken])
            if has_preference is None:
                return None
            taken += 1
            wanted += not has_preference and wanted < len(block)
        return block[:taken]

    def _stored(self, index: int, store: ExperienceStore) -> bool | None:
        if index not in self._known:
            if not store.has(index):
                return None
            if not self.extra:
                return True  # without extra groups, their number is fixed
            self.preference(store.groups([index])[0])
        return self._known[index]
