"""The task family `archive`: records in drawers. The kind of record in each drawer depends on the project, which many tasks share.

`Archive(seed=0)` is the family and `look` its tool. `scripted` has two strategies for scripted policies.
"""

from __future__ import annotations

from sandboxes.archive.drawers import look
from sandboxes.archive.family import Archive

__all__ = ["Archive", "look"]
