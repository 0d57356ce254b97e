"""The task family `pages`: find an entry that is on one of many pages, with a context that does not hold them all.

`Pages(seed=0)` is the family, `read` its tool; `scripted` holds three ways to go about it, as words of a scripted policy.
"""

from __future__ import annotations

from sandboxes.pages.family import Pages
from sandboxes.pages.reading import read

__all__ = ["Pages", "read"]
