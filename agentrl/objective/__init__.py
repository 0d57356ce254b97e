"""Advantages and losses as pure functions. The only room that knows an algorithm's name.

`agentrl.objective.losses` needs torch and is imported by itself; this face needs nothing heavy.
"""

from agentrl.objective.advantages import GroupAdvantages, group_advantages
from agentrl.objective.samples import Assembled, assemble, build_batch

__all__ = ["Assembled", "GroupAdvantages", "assemble", "build_batch", "group_advantages"]
