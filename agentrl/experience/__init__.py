"""The ledger of a run's groups, the durable store between rollouts and learner, and the checkpoints of running episodes.

Rollout and learner processes share only this store, so either may die at any moment.
"""

from agentrl.experience.checkpoints import FolderCheckpoints
from agentrl.experience.ledger import GroupOrder, new_entry
from agentrl.experience.store import SqliteStore, open_store

__all__ = ["FolderCheckpoints", "GroupOrder", "SqliteStore", "new_entry", "open_store"]
