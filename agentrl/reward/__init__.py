"""Runs the verifiers of a task and combines their scores. If a verifier fails, the episode is unscored. If the agent's text caused the
failure, the verifier's score is its lowest value instead.

`rubric` combines verifiers with weights, required criteria and caps. `worker` uses a subprocess to run scoring code that may hang.
`cleanroom` is the verifier for task folders, and `inside/` contains the programs that `cleanroom` runs in sandboxes.
"""

from agentrl.reward.configured import ConfiguredVerifier
from agentrl.reward.rubric import Rubric
from agentrl.reward.scorer import TaskScorer

__all__ = ["ConfiguredVerifier", "Rubric", "TaskScorer"]
