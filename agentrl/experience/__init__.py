"""The durable store of scored groups between rollouts and learner, which of them make a step, and what running ones have so far.

Rollout and learner processes share nothing but this: either may die at any moment and find the store as it was.
"""

from agentrl.experience.checkpoints import FolderCheckpoints
from agentrl.experience.steps import StepGroups
from agentrl.experience.store import SqliteStore, open_store

__all__ = ["FolderCheckpoints", "SqliteStore", "StepGroups", "open_store"]
