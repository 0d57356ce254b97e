"""Rewards: running the verifiers a task names and combining their scores. A verifier that fails leaves the episode unscored.

`agentrl.reward.cleanroom` is the verifier of task folders; `inside/` holds the programs that it sends into sandboxes.
"""

from agentrl.reward.scorer import TaskScorer

__all__ = ["TaskScorer"]
