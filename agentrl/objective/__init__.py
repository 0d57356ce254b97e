"""Advantages and losses as pure functions. The only room that knows an algorithm's name.

The modules that hold tensors (`combined`, `losses`, `corrections`, `kl`, `aggregate`, `gae`, `metrics`) need torch and are imported
by themselves; this face needs nothing heavy.
"""

from agentrl.objective.advantages import GroupAdvantages, batch_advantages
from agentrl.objective.samples import Assembled, assemble, build_batch, counted_samples

__all__ = ["Assembled", "GroupAdvantages", "assemble", "batch_advantages", "build_batch", "counted_samples"]
