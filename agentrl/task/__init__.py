"""Tasks: opening a family and saying which task each group of a run gets."""

from agentrl.task.schedule import GroupSchedule, open_family

__all__ = ["GroupSchedule", "open_family"]
