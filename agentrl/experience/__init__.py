"""The durable store of scored groups between rollouts and learner, and how far an episode lags behind the learner.

Rollout and learner processes share nothing but this: either may die at any moment and find the store as it was.
"""

from agentrl.experience.staleness import Staleness, staleness, summarize
from agentrl.experience.store import SqliteStore

__all__ = ["SqliteStore", "Staleness", "staleness", "summarize"]
