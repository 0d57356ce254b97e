"""The DeepSpeed learner: turns batches into new policy versions. Import the modules that use torch directly; this package is light."""

from agentrl.learner.process import LearnerProcess

__all__ = ["LearnerProcess"]
