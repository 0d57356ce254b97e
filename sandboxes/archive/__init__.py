"""The task family `archive`: records in drawers, where which drawer holds what is a fact of the project that many tasks share.

`Archive(seed=0)` is the family, `look` its tool; `scripted` holds two ways to go about it, as words of a scripted policy.
"""

from __future__ import annotations

from sandboxes.archive.drawers import look
from sandboxes.archive.family import Archive

__all__ = ["Archive", "look"]
