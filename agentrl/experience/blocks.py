"""When groups start, and from which policy version each block of them starts.

A group starts if at most `depth` blocks of groups would then be in flight:

    started - consumed - parked <= per_step * depth

A parked group waits for late scores. It does not count, so another group is sampled in its place, and nothing waits for it. When its
scores arrive it is in flight again, and no group starts until a step has consumed as many. At most `MAX_PARKED_BLOCKS` blocks of parked
groups free their slots, so that a run whose scores never arrive does not sample forever.
"""

from __future__ import annotations

from agentrl.experience.ledger import GroupOrder
from agentrl.protocols import ExperienceStore

MAX_PARKED_BLOCKS = 64
"""Largest number of blocks of parked groups that others are sampled for. Beyond them, groups keep their slots while they are parked."""


class BlockStarts:
    """Admits the groups of a run one after the other. Groups of block `b` read the notes and task weights of version `version_of(b)`.

    If no group is parked, block `b` starts from version `b + 1 - depth`. An earlier start is recorded in the store, so that a resumed run
    uses the same notes and weights.
    """

    def __init__(self, order: GroupOrder, store: ExperienceStore) -> None:
        self._order = order
        self._store = store
        self._versions = dict(store.block_versions())  # of blocks that started earlier than without parked groups
        self._newest = -1  # newest block that this process has started

    def version_of(self, block: int) -> int:
        """The version that a started block starts from."""
        return self._versions.get(block, self._usual(block))

    def oldest_version(self, block: int) -> int:
        """The oldest version that a block starts from, or may start from if it has not started."""
        return self.version_of(min(block, self._newest)) if self._newest >= 0 else 0

    def needed_version(self, slot: int, *, parked: int) -> int:
        """The version that must serve before the group in a slot starts. Slots count the groups of all blocks, without extra groups.

        Args:
            parked: number of parked groups.
        """
        per_step = self._order.per_step
        freed = min(parked, MAX_PARKED_BLOCKS * per_step)
        return max(0, -(-(slot + 1 - freed) // per_step) - self._order.depth)

    def admit(self, slot: int, *, version: int, parked: int) -> bool:
        """Whether the group in a slot may start now. Starts its block with the first slot. Call it for the slots in order.

        Args:
            version: the serving version.
            parked: number of parked groups.
        """
        block, needed = slot // self._order.per_step, self.needed_version(slot, parked=parked)
        if block > self._newest:
            if block not in self._versions and version < self._usual(block):
                needed = max(needed, self.version_of(block - 1) if block else 0)  # the versions of later blocks are not older
                if version >= needed:
                    self._store.start_block(block, needed)
                    self._versions[block] = needed
            needed = max(needed, self.version_of(block))
            self._newest = block if version >= needed else self._newest
        return version >= needed

    def _usual(self, block: int) -> int:
        return max(0, block + 1 - self._order.depth)
