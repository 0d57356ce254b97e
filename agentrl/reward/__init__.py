"""Rewards: running the verifiers a task names and combining their scores. A verifier that fails leaves the episode unscored."""

from agentrl.reward.scorer import TaskScorer

__all__ = ["TaskScorer"]
