"""Which groups a learner step consumes: so many, and one more for each that has no preference (dynamic sampling, DAPO, arXiv 2503.14476).

A step's indices are a block of fixed size, of which the first `per_step` are always made. Driver and learner read from the stored
groups alone how many of the others belong to the step, so they agree without talking, also after either of them has died.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.base.scores import all_equal
from agentrl.config.recipe import RolloutConfig
from agentrl.protocols import ExperienceStore
from agentrl.records import Group

_FAR = 1 << 30  # a schedule's position that no group of a run reaches: where the tasks of extra groups begin


def has_preference(group: Group, *, min_group_size: int) -> bool:
    """Whether some of a group's attempts were scored higher than others, so that it can teach anything."""
    return len(group.scored) >= min_group_size and not all_equal(scored.score.value or 0.0 for scored in group.scored)


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of each learner step of a run. What was read of a stored group is kept: groups never change."""

    per_step: int
    extra: int = 0
    min_group_size: int = 2
    _known: dict[int, bool] = field(default_factory=dict, repr=False)  # index -> whether it has a preference

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> StepGroups:
        return cls(rollout.groups_per_step, rollout.extra_groups, rollout.min_group_size)

    @classmethod
    def single_step(cls, rollout: RolloutConfig) -> StepGroups:
        """One step that every group belongs to, as far as a run can go: for a policy that does not learn. Each is of the next task."""
        return cls(_FAR, 0, rollout.min_group_size)

    def step_of(self, index: int) -> int:
        """The learner step that a group belongs to."""
        return index // (self.per_step + self.extra)

    def indices(self, step: int) -> range:
        """All groups that a step may have, in the order in which they are begun."""
        size = self.per_step + self.extra
        return range(step * size, (step + 1) * size)

    def position(self, index: int) -> int:
        """Where a group stands in the schedule of tasks: where it stood without extra groups, and the extra ones from far on."""
        step, place = divmod(index, self.per_step + self.extra)
        return step * self.per_step + place if place < self.per_step else _FAR + step * self.extra + place - self.per_step

    def preference(self, group: Group) -> bool:
        """Whether a group counts towards the `per_step` of its step."""
        return self._known.setdefault(group.index, has_preference(group, min_group_size=self.min_group_size))

    def set_preference(self, index: int, preference: bool) -> None:
        """Saves reading a stored group of which this is known."""
        self._known[index] = preference

    def consumed_indices(self, step: int, store: ExperienceStore) -> range | None:
        """The groups that a step consumes: the fewest of its block, from the first on, of which `per_step` have a preference, or all of it.

        None while one of them is not stored yet.
        """
        return self._taken(step, lambda index: self._stored(index, store))

    def _taken(self, step: int, preference: Callable[[int], bool | None]) -> range | None:
        block, wanted, made = self.indices(step), self.per_step, 0
        while made < wanted:
            found = preference(block[made])
            if found is None:
                return None
            made += 1
            wanted += not found and wanted < len(block)
        return block[:made]

    def _stored(self, index: int, store: ExperienceStore) -> bool | None:
        if index not in self._known:
            if not store.has(index):
                return None
            if not self.extra:
                return True  # how many there are does not depend on what they hold
            self.preference(store.groups([index])[0])
        return self._known[index]
