"""The task family `reasoning`: problems of the package reasoning-gym, scored by its scorers.

`Reasoning(seed=0, datasets="chain_sum,gcd")` is the family. `mixture` parses the recipe's options, `problems` generates the problems,
`catalogue` lists the excluded datasets of the package with the reasons, and `worked` contains the examples for prompts.
"""

from __future__ import annotations

from sandboxes.reasoning.family import Reasoning

__all__ = ["Reasoning"]
