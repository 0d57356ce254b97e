"""The task family `reasoning`: problems that the generators of the package reasoning-gym make, judged by their own scorers.

`Reasoning(seed=0, datasets="chain_sum,gcd")` is the family. `mixture` reads what a recipe names, `problems` makes the problems,
`catalogue` says which of the package's datasets are in and why the others are not, `worked` holds the examples of a prompt.
"""

from __future__ import annotations

from sandboxes.reasoning.family import Reasoning

__all__ = ["Reasoning"]
