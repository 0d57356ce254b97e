"""Advantages and losses as pure functions. No other package knows an algorithm's name.

Import the modules that use torch directly; this package is light.
"""

from agentrl.objective.advantages import GroupAdvantages, batch_advantages
from agentrl.objective.samples import AssembledBatch, assemble, counted_samples, scale_beside_residuals

__all__ = ["AssembledBatch", "GroupAdvantages", "assemble", "batch_advantages", "counted_samples", "scale_beside_residuals"]
