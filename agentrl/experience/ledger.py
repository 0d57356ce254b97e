"""The ledger: which groups a run samples, which of them a learner step takes, and how a group's tokens are counted.

Groups start in blocks, one block for each learner step. Block `b` may start when version `b - max_staleness` serves. A block has
`per_step` groups, and up to `extra` further ones that replace groups without a preference (dynamic sampling, DAPO, arXiv 2503.14476). The
task of a group is a pure function of its index and the seed.

The learner decides which groups a step takes, and the store records it:

    in_order        step `s` takes the groups of block `s`, so it waits for the slowest of them
    oldest_first    step `s` takes the ready groups that the oldest weights sampled, as soon as there are enough. A group that takes longer
                    than `max_staleness` steps is trained later. No finished group is discarded. A group without sampled tokens, such as
                    one of a quarantined task, waits for the step of its block, so that it delays no others

Both take the same number of groups: after `s` steps, as many as `s` blocks need. So a run of `steps` blocks ends with every group taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.base.scores import all_equal
from agentrl.config.recipe import Recipe, RolloutConfig
from agentrl.records import Group, LedgerEntry, TurnKey, turn_key

_FAR = 1 << 30  # schedule position of the first extra group, beyond all other groups of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The blocks of groups that a run samples, and the order in which the learner takes them."""

    per_step: int
    extra: int = 0
    min_group_size: int = 2
    oldest_first: bool = True

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> GroupOrder:
        """The order that a recipe configures."""
        rollout = recipe.rollout
        return cls(
            per_step=rollout.groups_per_step,
            extra=rollout.extra_groups,
            min_group_size=rollout.group.min_size,
            oldest_first=recipe.order == "oldest_first",
        )

    @classmethod
    def single_block(cls, rollout: RolloutConfig) -> GroupOrder:
        """One block with all groups, for a policy that does not learn. Each group has the next task."""
        return cls(per_step=_FAR, min_group_size=rollout.group.min_size)

    def block_of(self, index: int) -> int:
        """The block of a group: the first learner step that can take it."""
        return index // (self.per_step + self.extra)

    def block(self, number: int) -> range:
        """All groups that a block may have, in the order in which they start."""
        size = self.per_step + self.extra
        return range(number * size, (number + 1) * size)

    def position(self, index: int) -> int:
        """A group's position in the task schedule. Extra groups have separate positions, so they do not shift the others."""
        number, place = divmod(index, self.per_step + self.extra)
        return number * self.per_step + place if place < self.per_step else _FAR + number * self.extra + place - self.per_step

    def has_preference(self, entry: LedgerEntry) -> bool:
        """Whether some attempts of a group scored higher than others, so that it can teach anything."""
        return entry.counted >= self.min_group_size and entry.has_spread

    def first_incomplete_block(self, entries: Iterable[LedgerEntry], *, start: int = 0) -> int:
        """Returns the first block, from `start` on, of which some groups are not among the entries."""
        filled = Counter[int]()
        fills = _Slots(self)
        for entry in entries:
            filled[self.block_of(entry.index)] += fills(entry)
        while filled[start] == self.per_step:
            start += 1
        return start

    def select(self, step: int, entries: Sequence[LedgerEntry]) -> tuple[int, ...] | None:
        """Returns the groups that a step takes, in ascending order; None if too few are stored.

        A step that has groups already, because the learner died or fell back to an older checkpoint, takes the same ones, so that the
        notes and task weights that depend on them stay valid.

        Args:
            entries: those of all blocks from the first one that earlier steps have not taken completely.
        """
        taken = [entry for entry in entries if entry.step is not None and entry.step < step]
        assigned = [entry for entry in entries if entry.step == step]
        free = [entry for entry in entries if entry.step is None or entry.step >= step]
        return self._choose(step, taken, assigned) or self._choose(step, taken, free)

    def _choose(self, step: int, taken: Sequence[LedgerEntry], free: list[LedgerEntry]) -> tuple[int, ...] | None:
        fills = _Slots(self)
        for entry in taken:
            fills(entry)
        if self.oldest_first:
            free.sort(key=lambda entry: (-1 if entry.oldest_version is None else entry.oldest_version, entry.index))
        else:
            free = [entry for entry in free if self.block_of(entry.index) == step]
        missing, chosen = self.per_step, []
        for entry in free:
            fills_slot = fills(entry)
            early = entry.oldest_version is None and self.block_of(entry.index) > step  # ready at once; would displace sampled groups
            if (missing and not early) or not fills_slot:  # replaced groups are taken too: they have nothing to wait for
                chosen.append(entry.index)
                missing -= fills_slot
        return None if missing else tuple(sorted(chosen))


class _Slots:
    """Decides which groups fill a slot of their block. The first `extra` groups without a preference do not:
    further groups replace them."""

    def __init__(self, order: GroupOrder) -> None:
        self._order = order
        self._replaced = Counter[int]()  # by block

    def __call__(self, entry: LedgerEntry) -> bool:
        if not self._order.extra or self._order.has_preference(entry):
            return True
        block = self._order.block_of(entry.index)
        self._replaced[block] += 1
        return self._replaced[block] > self._order.extra


def new_entry(group: Group) -> LedgerEntry:
    """Returns the ledger's entry of a group that no step has taken yet."""
    versions = [scored.episode.oldest_version for scored in group.episodes]
    return LedgerEntry(
        index=group.index,
        task_id=group.task_id,
        attempts=len(group.episodes),
        counted=len(group.scored),
        has_spread=not all_equal(scored.score.value or 0.0 for scored in group.scored),
        oldest_version=min((version for version in versions if version is not None), default=None),
        tokens_sampled=sampled_tokens(group),
    )


def sampled_tokens(group: Group) -> int:
    """Returns the tokens that the policy sampled for a group. A turn that several attempts share counts once."""
    sampled: dict[TurnKey, int] = {}
    for scored in group.episodes:
        for index, trajectory in enumerate(scored.episode.trajectories):
            for number, turn in enumerate(trajectory.turns):
                sampled[turn_key(scored.episode.id, index, trajectory, number)] = turn.sampled
    return sum(sampled.values()) + sum(attempt.tokens for attempt in group.cancelled)
