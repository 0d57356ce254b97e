"""Quarantine of broken tasks: the run does not attempt them again, and lists them for repair."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.base.files import append_lines, json_line, read_json_lines
from agentrl.errors import TaskError
from agentrl.records import Blame, Failure, Group

log = logging.getLogger(__name__)

FILE = "quarantine.jsonl"
MAX_QUARANTINED = 8
"""Tasks that may be quarantined per start of a run. More mean a broken family or verifier, on which more steps are wasted."""
_MAX_NAMED = 20  # tasks in the error message


class Quarantine:
    """The broken tasks of one run, in `quarantine.jsonl`: one line each with task, group and message.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._faults = {line["task_key"]: line["message"] for line in read_json_lines(self._path)}
        self._added: list[str] = []

    def __len__(self) -> int:
        return len(self._faults)

    def known_fault(self, task_key: str) -> Failure | None:
        """The fault of a quarantined task, else None. Keys are content hashes, so a repaired task has a new key."""
        message = self._faults.get(task_key)
        return None if message is None else Failure(stage="task", blame=Blame.TASK, kind="quarantined", message=message)

    def add(self, group: Group) -> None:
        """Quarantines the task of a group with a fault, once; does nothing for other groups.

        Raises:
            TaskError: more than `MAX_QUARANTINED` were added since the start. The message lists the tasks.
        """
        fault = group.fault
        if fault is None or group.task_key in self._faults:
            return
        self._faults[group.task_key] = fault.message
        line = {"task_id": group.task_id, "task_key": group.task_key, "group": group.index, "message": fault.message}
        append_lines(self._path, [json_line(line)])
        log.warning("task %s is quarantined and its group %d excluded: %s", group.task_id, group.index, fault.message)
        self._added.append(f"{group.task_id}: {fault.message.partition(chr(10))[0]}")
        if len(self._added) > MAX_QUARANTINED:
            more = f"\n  and {len(self._added) - _MAX_NAMED} more" if len(self._added) > _MAX_NAMED else ""
            raise TaskError(
                f"{len(self._added)} tasks are broken, {MAX_QUARANTINED} are allowed; all are in {self._path}\n  "
                + "\n  ".join(self._added[:_MAX_NAMED])
                + more,
                fix="repair them (`agentrl check` finds more), then continue with --resume, which allows as many again",
            )


def count_quarantined(run_dir: Path) -> int:
    """The number of quarantined tasks of a run."""
    return len({line["task_key"] for line in read_json_lines(run_dir / FILE)})
