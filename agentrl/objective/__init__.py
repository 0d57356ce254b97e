"""Advantages and losses as pure functions. The only room that knows an algorithm's name.

The modules that use tensors (`combined`, `losses`, `corrections`, `kl`, `aggregate`, `gae`, `metrics`) need torch, so import them
directly; this package itself imports nothing heavy.
"""

from agentrl.objective.advantages import GroupAdvantages, batch_advantages
from agentrl.objective.samples import AssembledBatch, assemble, counted_samples

__all__ = ["AssembledBatch", "GroupAdvantages", "assemble", "batch_advantages", "counted_samples"]
