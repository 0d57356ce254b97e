"""Supervised training on a run's episodes: imitation, preferences and reward models, with TRL."""

from agentrl.supervised.select import select_demonstrations, select_preferences

__all__ = ["select_demonstrations", "select_preferences"]
