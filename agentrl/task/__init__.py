"""Opens task families, each of which is a Python class or a folder of task folders, and schedules tasks for the groups of a run."""

from agentrl.task.folders import TaskFolders
from agentrl.task.schedule import GroupSchedule, gold_of, make_task, open_family, sandbox_specs
from agentrl.task.weighting import GroupOutcome, TaskHistory, Weights

__all__ = ["GroupOutcome", "GroupSchedule", "TaskFolders", "TaskHistory", "Weights", "gold_of", "make_task", "open_family", "sandbox_specs"]
