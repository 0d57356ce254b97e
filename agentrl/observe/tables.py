"""A table of the report: a name in each row, and figures beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    """Head of the column of names."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Name -> a cell a column."""
    more: str = ""
    """What is not shown; empty where all is."""
