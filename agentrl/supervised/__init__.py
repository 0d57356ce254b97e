"""Supervised training on the experience of a run, through TRL: imitation of good episodes, preferences, reward models."""

from agentrl.supervised.select import select_demonstrations, select_preferences

__all__ = ["select_demonstrations", "select_preferences"]
