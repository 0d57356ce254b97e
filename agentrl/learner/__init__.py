"""The DeepSpeed learner: turns batches into new policy versions.

Importing this package does not import torch. Import the modules that need torch by their full names.
"""

from agentrl.learner.process import LearnerProcess

__all__ = ["LearnerProcess"]
