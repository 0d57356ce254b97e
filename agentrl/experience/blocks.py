"""Decides when groups start, and from which policy version each block of groups starts.

A group starts only if at most `depth` blocks of groups are in flight after it has started:

    started - consumed - parked <= per_step * depth

A parked group waits for late scores. A parked group does not count as in flight, so another group is sampled instead, and no step waits for
the parked group. When its scores arrive, the group is in flight again, and no new group starts until steps have consumed enough groups. At
most `MAX_PARKED_BLOCKS` blocks of parked groups free their slots, so that a run whose scores never arrive does not sample forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentrl.experience.ledger import GroupOrder

MAX_PARKED_BLOCKS = 64
"""Maximum number of blocks of parked groups that free their slots. Additional parked groups keep their slots."""


class BlockStarts:
    """Admits the groups of a run one by one. The groups in block `b` read the notes and task weights of version `version_of(b)`.

    If no group is parked, block `b` starts from version `b + 1 - depth`. If a block starts from an older version, the caller records that
    version in the store, so that a resumed run uses the same notes and weights.

    Args:
        versions: block -> version, as recorded in the store (`ExperienceStore.block_versions`).
    """

    def __init__(self, order: GroupOrder, versions: Mapping[int, int] = MappingProxyType({})) -> None:
        self._order = order
        self._versions = dict(versions)
        self._unsaved = list[tuple[int, int]]()
        self._newest = -1  # newest block that this process has started

    def version_of(self, block: int) -> int:
        """Returns the version from which a started block starts."""
        return self._versions.get(block, self._usual(block))

    def oldest_version(self, block: int) -> int:
        """Returns the version from which a block starts or, if it has not started, the oldest version from which it may start."""
        return self.version_of(min(block, self._newest)) if self._newest >= 0 else 0

    def needed_version(self, slot: int, *, parked: int) -> int:
        """Returns the oldest version that may be serving when the group in a slot starts. Slots number all groups except extra groups.

        Args:
            parked: number of parked groups.
        """
        per_step = self._order.per_step
        freed = min(parked, MAX_PARKED_BLOCKS * per_step)
        return max(0, -(-(slot + 1 - freed) // per_step) - self._order.depth)

    def admit(self, slot: int, *, version: int, parked: int) -> bool:
        """Whether the group in a slot may start now. Admitting the first slot in a block starts the block. Call this method for the slots
        in ascending order.

        Args:
            version: the serving version.
            parked: number of parked groups.
        """
        block, needed = slot // self._order.per_step, self.needed_version(slot, parked=parked)
        if block > self._newest:
            if block not in self._versions and version < self._usual(block):
                needed = max(needed, self.version_of(block - 1) if block else 0)  # the versions of later blocks are not older
                if version >= needed:
                    self._unsaved.append((block, needed))
                    self._versions[block] = needed
            needed = max(needed, self.version_of(block))
            self._newest = block if version >= needed else self._newest
        return version >= needed

    def take_unsaved(self) -> list[tuple[int, int]]:
        """Returns (block, version) for each block that started from an older version since the last call.

        Record these versions before a group in the block starts.
        """
        unsaved, self._unsaved = self._unsaved, []
        return unsaved

    def _usual(self, block: int) -> int:
        return max(0, block + 1 - self._order.depth)
