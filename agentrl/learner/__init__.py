"""From batches of experience to new policy versions: the DeepSpeed engine, its process, checkpoints and published weights.

The modules that hold tensors import torch and deepspeed, so import them directly; this package itself imports nothing heavy.
"""

from agentrl.learner.process import LearnerProcess

__all__ = ["LearnerProcess"]
