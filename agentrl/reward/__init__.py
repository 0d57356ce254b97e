"""Rewards: running a task's verifiers and combining their scores. A verifier that fails leaves the episode unscored.

`agentrl.reward.rubric` combines several with weights, gates and caps; `agentrl.reward.worker` is a process for judging with code that may
hang. `agentrl.reward.cleanroom` is the verifier of task folders; `inside/` holds the programs that it runs in sandboxes.
`agentrl.judge` are verifiers that ask a model.
"""

from agentrl.reward.configured import ConfiguredVerifier
from agentrl.reward.rubric import Rubric
from agentrl.reward.scorer import TaskScorer

__all__ = ["ConfiguredVerifier", "Rubric", "TaskScorer"]
