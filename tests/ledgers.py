"""What a test reads from a ledger, and a learner that takes groups without training them."""

from __future__ import annotations

from agentrl.experience import GroupOrder
from agentrl.protocols import ExperienceStore
from agentrl.records import GroupUse


def consumed(store: ExperienceStore) -> dict[int, int]:
    """Group index -> step, for the groups that completed steps have used."""
    return {entry.index: entry.step for entry in store.entries() if entry.use is not None and entry.step is not None}


def indices(store: ExperienceStore) -> tuple[int, ...]:
    """The indices of all stored groups."""
    return tuple(entry.index for entry in store.entries())


def take_step(order: GroupOrder, store: ExperienceStore, step: int) -> tuple[int, ...] | None:
    """Completes a learner step with the groups that it would take; None if too few are stored, or if it is complete."""
    if store.entries(step=step):
        return None
    taken = order.select(step, store.entries())
    if taken is not None:
        store.commit(step, dict.fromkeys(taken, GroupUse()), f"checkpoints/{step + 1:06d}")
    return taken
