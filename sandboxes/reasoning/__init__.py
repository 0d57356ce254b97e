"""The task family `reasoning`: problems of the package reasoning-gym, scored by its scorers.

`Reasoning(seed=0, datasets="chain_sum,gcd")` is the family. `mixture` parses the recipe's options, `problems` generates the problems,
`catalogue` says which of the package's datasets are excluded and why, and `worked` has the examples of a prompt.
"""

from __future__ import annotations

from sandboxes.reasoning.family import Reasoning

__all__ = ["Reasoning"]
