"""Stores the episodes of evaluations next to those of training, with all of their tokens, so that the index lists both."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.experience import DriverStore
from agentrl.protocols import EvaluationStore, ExperienceStore
from agentrl.records import Group, ScoredEpisode, Task


@dataclass(frozen=True, slots=True)
class StoredEpisodes:
    """The stored episodes of evaluations of one run. A store without the ability `EvaluationStore` keeps none.

    An evaluation starts with `begin`, which deletes what an interrupted one has left.
    """

    store: DriverStore

    async def begin(self, phase: str) -> None:
        """Deletes the episodes of a phase."""
        await self.store.call(lambda store: store.delete_evaluated(phase) if isinstance(store, EvaluationStore) else None)

    async def add(self, phase: str, step: int, task: Task, scored: ScoredEpisode) -> None:
        """Stores an episode durably. Raises `StoreError`.

        Args:
            step: learner step that produced the evaluated version.
        """
        group = Group(index=0, task_id=task.id, task_key=task.key, episodes=(scored,)).with_task(task)

        def put(store: ExperienceStore) -> None:
            if isinstance(store, EvaluationStore):
                store.put_evaluated(phase, step, group)

        await self.store.call(put)
