"""Decides which groups a run samples and which of them a learner step selects, and creates the first ledger entry of a group.

Groups start in the order of their indices, in blocks, one block for each learner step. At most `depth` blocks of groups are in flight, that
is, started but neither consumed by a step nor parked for late scores (`agentrl.experience.blocks`). A block has `per_step` groups, and up
to `extra` additional groups, which replace groups without a preference (dynamic sampling, DAPO, arXiv 2503.14476). The task of a group is a
pure function of the group's index and the seed.

The learner selects the groups of a step, and the store records them as assigned:

    in_order        step `s` selects the groups in block `s`, so it waits for the slowest of them.
    oldest_first    step `s` selects the ready groups that the oldest weights sampled, as soon as there are enough. A group that takes
                    longer than `max_staleness` steps to sample or to score is trained later. No finished group is discarded. A group
                    without sampled tokens, such as that of a quarantined task, waits for the step of its block, so that it delays no
                    other groups.
    replay          as oldest_first, but step `s` also trains the groups that step `s - 1` trained for the first time, from the same ids and
                    logprobs. These groups stay consumed by step `s - 1`, and their tokens are counted separately.

Residuals (`agentrl.experience.residuals`) fill no slots. A step also selects up to `per_step` residuals whose scores have arrived and whose
first groups were consumed by earlier steps. It prefers residuals that the oldest weights sampled.

After `s` steps, every order has selected as many groups as `s` blocks need. If no score is late, a run of `steps` blocks consumes every
group. Otherwise the run samples one additional group for each parked group, and that many groups stay open when it finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.base.numbers import all_equal
from agentrl.config.recipe import Recipe, RolloutConfig
from agentrl.experience.residuals import why_no_residuals
from agentrl.records import Group, LedgerEntry, sampled_index, sampled_tokens

_FAR = 1 << 30  # schedule position of the first extra group, beyond all other groups of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The blocks of groups that a run samples, and the order in which the learner selects them.

    Args:
        per_step: number of groups per learner step.
        extra: maximum number of additional groups per block, which replace groups without a preference.
        min_group_size: minimum number of counted attempts in a group with a preference.
        oldest_first: whether the order is `oldest_first` or `replay`; False means `in_order`.
        replay: whether a step also trains the groups of the previous step.
        depth: maximum number of blocks of groups in flight at once.
        accepts_late: whether scores may arrive late; requires `oldest_first` and a staleness above 0.
        no_residuals: the reason why late parts cannot be applied as residuals; empty if they can be.
    """

    per_step: int
    extra: int = 0
    min_group_size: int = 2
    oldest_first: bool = True
    replay: bool = False
    depth: int = 2
    accepts_late: bool = True
    no_residuals: str = ""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> GroupOrder:
        """Returns the order that a recipe configures."""
        rollout = recipe.rollout
        return cls(
            per_step=rollout.groups_per_step,
            extra=rollout.extra_groups,
            min_group_size=rollout.group.min_size,
            oldest_first=recipe.order != "in_order",
            replay=recipe.order == "replay",
            depth=recipe.depth,
            accepts_late=recipe.order != "in_order" and recipe.max_staleness > 0,
            no_residuals=why_no_residuals(recipe),
        )

    @classmethod
    def single_block(cls, rollout: RolloutConfig) -> GroupOrder:
        """Returns an order in which one block contains all groups, for a policy that does not learn. Each group uses the next task."""
        return cls(per_step=_FAR, min_group_size=rollout.group.min_size)

    def block_of(self, index: int) -> int:
        """Returns the number of a group's block. If the order is `in_order`, this number is also the group's learner step."""
        return index // (self.per_step + self.extra)

    def block(self, number: int) -> range:
        """Returns the indices of all groups that a block may have, in the order in which the groups start."""
        size = self.per_step + self.extra
        return range(number * size, (number + 1) * size)

    def position(self, index: int) -> int:
        """Returns a group's position in the task schedule. Extra groups have separate positions, so they do not shift the others."""
        number, place = divmod(index, self.per_step + self.extra)
        return number * self.per_step + place if place < self.per_step else _FAR + number * self.extra + place - self.per_step

    def slot(self, index: int) -> int:
        """Returns the number of a group in the order of starts, not counting extra groups.

        For an extra group, returns the number of the first group in its block.
        """
        number, place = divmod(index, self.per_step + self.extra)
        return number * self.per_step + (place if place < self.per_step else 0)

    def has_preference(self, entry: LedgerEntry) -> bool:
        """Whether a group has at least `min_group_size` counted attempts whose scores are not all equal.

        Other groups have no advantages.
        """
        return entry.counted >= self.min_group_size and entry.has_spread

    def is_replaceable(self, entry: LedgerEntry) -> bool:
        """Whether an extra group may replace a group. A group with late scores is not replaced, because it freed its slot when parked."""
        return not entry.late_parts and not self.has_preference(entry)

    def first_incomplete_block(self, entries: Iterable[LedgerEntry], *, start: int = 0) -> int:
        """Returns the first block, from `start` on, with a slot that none of the entries fills."""
        filled = Counter[int]()
        fills = _Slots(self)
        for entry in entries:
            filled[self.block_of(entry.index)] += fills(entry)
        while filled[start] == self.per_step:
            start += 1
        return start

    def first_open_block(self, entries: Sequence[LedgerEntry], *, before: int, start: int = 0) -> int:
        """Returns the first block, from `start` on, with a group that no step before step `before` has consumed.

        Groups with late scores do not hold a block open: the store returns their entries until a step has consumed them.

        Args:
            entries: the entries of all blocks from `start` on.
        """
        closed = [bool(entry.late_parts) or (entry.step is not None and entry.step < before) for entry in entries]
        incomplete = self.first_incomplete_block((entry for entry, done in zip(entries, closed, strict=True) if done), start=start)
        waiting = (self.block_of(entry.index) for entry, done in zip(entries, closed, strict=True) if not done)
        return min([incomplete, *waiting])

    def select(self, step: int, entries: Sequence[LedgerEntry]) -> tuple[int, ...] | None:
        """Returns the indices of the groups that a step selects, in ascending order; None if too few groups are stored.

        If groups are already assigned to the step, because the learner died or fell back to an older checkpoint, the step selects the same
        groups again, so that the notes and task weights that depend on these groups stay valid.

        Args:
            entries: the entries of all blocks from `first_open_block` on, and of earlier groups with late scores.
        """
        sampled = [entry for entry in entries if not entry.is_residual]
        taken = [entry for entry in sampled if entry.step is not None and entry.step < step]
        assigned = [entry for entry in sampled if entry.step == step]
        free = [entry for entry in sampled if not entry.pending and (entry.step is None or entry.step >= step)]
        parked = sum(1 for entry in sampled if entry.pending)
        newest = step + -(-parked // self.per_step)  # the block of the step, counted after the blocks that only replace parked groups
        if chosen := self._choose(step, taken, assigned, newest):
            return tuple(sorted([*chosen, *(entry.index for entry in entries if entry.is_residual and entry.step == step)]))
        if chosen := self._choose(step, taken, free, newest):
            return (*self._residuals(step, entries), *chosen)
        return None

    def _residuals(self, step: int, entries: Sequence[LedgerEntry]) -> list[int]:
        """Returns the indices of the residuals that a step selects, in ascending order.

        A first group that has no entry in `entries` was consumed by an earlier step.
        """
        untrained = {entry.index for entry in entries if entry.step is None or entry.step >= step}
        ready = [entry for entry in entries if entry.is_residual and entry.index in untrained and not entry.pending]
        ready = [entry for entry in ready if sampled_index(entry.index) not in untrained]
        ready.sort(key=lambda entry: (entry.oldest_version or 0, -entry.index))
        return sorted(entry.index for entry in ready[: self.per_step])

    def replayed(self, entries: Sequence[LedgerEntry]) -> tuple[int, ...]:
        """Returns the indices of the groups that a step trains again: at most `per_step` groups with trained tokens, and residuals.

        The result is in ascending order and depends only on the ledger, so a repeated step replays the same groups. At least half of the
        sampled groups in a step are new. Residuals are trained as often as their first groups, so that both parts of a score have the same
        weight. A step trains at most `per_step` residuals.

        Args:
            entries: the entries of the previous step.
        """
        trained = [entry.index for entry in entries if self.replay and entry.state == "trained"]
        residuals = sum(index < 0 for index in trained)
        return tuple(trained[: residuals + self.per_step])

    def _choose(self, step: int, taken: Sequence[LedgerEntry], free: list[LedgerEntry], newest: int) -> tuple[int, ...] | None:
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
            early = entry.oldest_version is None and self.block_of(entry.index) > newest  # ready at once; it would displace sampled groups
            if (missing and not early) or not fills_slot:  # a replaced group is also consumed, because no later step needs it
                chosen.append(entry.index)
                missing -= fills_slot
        return None if missing else tuple(sorted(chosen))


class _Slots:
    """Decides whether a group fills one of its block's `per_step` slots.

    The first `extra` replaceable groups in a block fill no slots, because extra groups replace them. Stateful: call it once per entry.
    """

    def __init__(self, order: GroupOrder) -> None:
        self._order = order
        self._replaced = Counter[int]()  # block -> number of replaced groups

    def __call__(self, entry: LedgerEntry) -> bool:
        if not self._order.extra or not self._order.is_replaceable(entry):
            return True
        block = self._order.block_of(entry.index)
        self._replaced[block] += 1
        return self._replaced[block] > self._order.extra


def new_entry(group: Group) -> LedgerEntry:
    """Returns the ledger entry of a new group. The group is ready or, if parts of its scores have not arrived yet, parked."""
    versions = [scored.episode.oldest_version for scored in group.episodes]
    pending = len({(scored.episode.id, part.name) for _, scored, part in group.pending})
    return LedgerEntry(
        index=group.index,
        task_id=group.task_id,
        attempts=len(group.episodes),
        counted=len(group.scored),
        has_spread=not all_equal(scored.score.value or 0.0 for scored in group.scored),
        oldest_version=min((version for version in versions if version is not None), default=None),
        tokens_sampled=sampled_tokens(group.episodes) + sum(attempt.tokens for attempt in group.cancelled),
        late_parts=pending,
        pending=pending,
    )
