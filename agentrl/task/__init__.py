"""Tasks: opening a family, which may be a folder of task folders, and saying which task each group of a run gets."""

from agentrl.task.folders import TaskFolders
from agentrl.task.schedule import GroupSchedule, make_task, open_family, sandbox_specs

__all__ = ["GroupSchedule", "TaskFolders", "make_task", "open_family", "sandbox_specs"]
