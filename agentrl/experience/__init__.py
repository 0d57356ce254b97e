"""The durable store of scored groups between rollouts and learner, the groups of each step, and the checkpoints of running episodes.

Rollout and learner processes share only this store, so either may die at any moment.
"""

from agentrl.experience.checkpoints import FolderCheckpoints
from agentrl.experience.steps import StepGroups
from agentrl.experience.store import SqliteStore, open_store

__all__ = ["FolderCheckpoints", "SqliteStore", "StepGroups", "open_store"]
