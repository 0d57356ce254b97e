"""Supervised training on the experience of a run, through TRL: imitation of good episodes, preferences, reward models."""

from agentrl.supervised.select import demonstrations, preferences

__all__ = ["demonstrations", "preferences"]
