"""Advantages and losses as pure functions. No other package contains an algorithm's name.

Importing this package does not import torch. Import the modules that need torch by their full names.
"""

from agentrl.objective.advantages import GroupAdvantages, batch_advantages
from agentrl.objective.samples import AssembledBatch, assemble, counted_samples, scale_for_residuals

__all__ = ["AssembledBatch", "GroupAdvantages", "assemble", "batch_advantages", "counted_samples", "scale_for_residuals"]
