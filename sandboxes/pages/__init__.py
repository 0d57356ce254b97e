"""The task families `pages` and `questions`, whose pages do not fit in one context.

`Pages(seed=0)` asks for an entry on one of many pages. `Questions(seed=0)` asks for the answers to the questions on all pages. `read` is
their tool. `scripted` and `strategies` have strategies for scripted policies. `demonstrations` writes the training data of a base policy.
"""

from __future__ import annotations

from sandboxes.pages.family import Pages
from sandboxes.pages.questions import Questions
from sandboxes.pages.reading import read

__all__ = ["Pages", "Questions", "read"]
