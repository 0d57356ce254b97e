"""Helpers that read a ledger, and a learner that takes groups without training on them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from agentrl.experience import GroupOrder, SqliteStore
from agentrl.experience.audit import count, verify
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


def assert_every_group_taken_once(run: Path, *, steps: int, per_step: int) -> None:
    """Every group of a finished run was used by one step, every step used as many, and the ledger agrees with checkpoint and metrics."""
    store = SqliteStore(run / "experience.sqlite")
    try:
        assert sorted(consumed(store)) == list(range(steps * per_step))
        assert Counter(consumed(store).values()) == dict.fromkeys(range(steps), per_step)
        assert list(verify(run, store)) == []
        tokens = count(store.entries()).tokens
        assert tokens["open"] == 0 and tokens["sampled"] == tokens["trained"] + tokens["excluded"] > 0
        assert json.loads((run / "summary.json").read_text())["tokens"] == tokens
    finally:
        store.close()
