"""Rewards: running a task's verifiers and combining their scores. A verifier that fails leaves the episode unscored.

`agentrl.reward.cleanroom` is the verifier of task folders; `inside/` holds the programs that it runs in sandboxes.
`agentrl.reward.judges` are verifiers that ask a model.
"""

from agentrl.reward.scorer import TaskScorer

__all__ = ["TaskScorer"]
