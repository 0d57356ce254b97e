"""Sorting networks: an environment in which the agent searches for a network with few comparators.

`SortingNetwork` is the environment, `archive` stores the states that earlier searches reached, and `checker` verifies a network. The
checker shares no code with the environment.
"""

from __future__ import annotations

from sandboxes.networks.environment import SortingNetwork

__all__ = ["SortingNetwork"]
