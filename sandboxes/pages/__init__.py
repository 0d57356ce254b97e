"""The task families `pages` and `questions`, in which the pages of a task do not fit into one context.

`Pages(seed=0)` asks for an entry on one of many pages. `Questions(seed=0)` asks for the answers to the questions on all pages. `read` is
the tool of both families. `scripted` and `strategies` contain strategies for scripted policies. `demonstrations` writes the training data
of a base policy.
"""

from __future__ import annotations

from sandboxes.pages.family import Pages
from sandboxes.pages.questions import Questions
from sandboxes.pages.reading import read

__all__ = ["Pages", "Questions", "read"]
