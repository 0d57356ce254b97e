"""The task family `tables`: questions about small CSV, JSON and text files that only running code on them answers.

`Tables(seed=0)` is the family. `kinds` holds the questions and their programs, `names` and `generated` make tables, `real`
loads real ones, `demonstrations` writes what a base policy is trained on.
"""

from __future__ import annotations

from sandboxes.tables.family import REAL_TASKS, Tables

__all__ = ["REAL_TASKS", "Tables"]
