"""The durable store of scored groups between rollouts and learner, what running ones have so far, and how far episodes lag behind.

Rollout and learner processes share nothing but this: either may die at any moment and find the store as it was.
"""

from agentrl.experience.running import RunningEpisodes
from agentrl.experience.staleness import Staleness, staleness, summarize
from agentrl.experience.store import SqliteStore

__all__ = ["RunningEpisodes", "SqliteStore", "Staleness", "staleness", "summarize"]
