"""The task family `tables`: questions about small CSV, JSON and text files that can only be answered by running code.

`Tables(seed=0)` is the family. `kinds` contains the questions and their programs, `names` and `generated` create tables, `real` loads real
tables, and `demonstrations` writes the training data for a base policy.
"""

from __future__ import annotations

from sandboxes.tables.family import REAL_TASKS, Tables

__all__ = ["REAL_TASKS", "Tables"]
