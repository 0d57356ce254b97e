"""Quarantine of broken tasks: not tried again in the run, and listed for the person who can repair them."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.base.files import append_lines, json_line, read_json_lines
from agentrl.errors import TaskError
from agentrl.records import Blame, Failure, Group

log = logging.getLogger(__name__)

FILE = "quarantine.jsonl"
_NAMED = 20  # tasks named in the error


class Quarantine:
    """The broken tasks of one run, in `quarantine.jsonl`: a line for each with task, group and what is wrong.

    Args:
        run_dir: the run folder.
        limit: how many tasks may be added after opening; at one more `add` raises.
    """

    def __init__(self, run_dir: Path, *, limit: int) -> None:
        self._path = run_dir / FILE
        self._limit = limit
        self._faults = {line["task_key"]: line["message"] for line in read_json_lines(self._path)}
        self._added: list[str] = []

    def __len__(self) -> int:
        return len(self._faults)

    def known_fault(self, task_key: str) -> Failure | None:
        """The fault of a task already in quarantine, else None. Keys are content hashes, so a repaired task has a new one."""
        message = self._faults.get(task_key)
        return None if message is None else Failure(stage="task", blame=Blame.TASK, kind="quarantined", message=message)

    def add(self, group: Group) -> None:
        """Quarantines the task of a group with a fault, once; does nothing for other groups.

        Raises:
            TaskError: the limit is exceeded. The message lists the tasks.
        """
        fault = group.fault
        if fault is None or group.task_key in self._faults:
            return
        self._faults[group.task_key] = fault.message
        line = {"task_id": group.task_id, "task_key": group.task_key, "group": group.index, "message": fault.message}
        append_lines(self._path, [json_line(line)])
        log.warning("task %s is quarantined, and its group %d left out: %s", group.task_id, group.index, fault.message)
        self._added.append(f"{group.task_id}: {fault.message.partition(chr(10))[0]}")
        if len(self._added) > self._limit:
            more = f"\n  and {len(self._added) - _NAMED} more" if len(self._added) > _NAMED else ""
            raise TaskError(
                f"{len(self._added)} tasks are broken, {self._limit} are allowed; all are in {self._path}\n  "
                + "\n  ".join(self._added[:_NAMED])
                + more,
                fix="repair them (`agentrl check` finds more), or raise rollout.max_quarantined; then continue with --resume",
            )


def count_quarantined(run_dir: Path) -> int:
    """How many tasks of a run are in quarantine."""
    return len({line["task_key"] for line in read_json_lines(run_dir / FILE)})
