"""The task family `archive`: records in drawers. The kind of record in each drawer depends on the project. Many tasks share a project.

`Archive(seed=0)` is the family, and `look` is its tool. `scripted` contains two strategies for scripted policies.
"""

from __future__ import annotations

from sandboxes.archive.drawers import look
from sandboxes.archive.family import Archive

__all__ = ["Archive", "look"]
