"""The task families `pages` and `questions`: more on the pages than one context holds.

`Pages(seed=0)` asks for an entry that is on one of many pages, `Questions(seed=0)` for the answers to all their questions; `read` is their
tool. `scripted` holds three ways to go about the first, as words of a scripted policy; `demonstrations` writes what a base policy of the
second is trained on.
"""

from __future__ import annotations

from sandboxes.pages.family import Pages
from sandboxes.pages.questions import Questions
from sandboxes.pages.reading import read

__all__ = ["Pages", "Questions", "read"]
