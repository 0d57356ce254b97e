"""Which training tasks a run withheld, because a suite that it is measured with has them, or near twins: `withheld.jsonl`, a line each."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.base.files import append_lines, json_line, read_json_lines
from agentrl.failure.overlap import WithheldTasks
from agentrl.records import Task

log = logging.getLogger(__name__)

FILE = "withheld.jsonl"


class WithholdingLog:
    """A container of tasks, as `WithheldTasks` is, that writes down each that is asked about and in it, once."""

    def __init__(self, run_dir: Path, withheld: WithheldTasks) -> None:
        self._path, self._withheld = run_dir / FILE, withheld
        self._told = {line["task_key"] for line in read_json_lines(self._path)}

    def __contains__(self, task: object) -> bool:
        found = self._withheld.match(task) if isinstance(task, Task) else None
        if found is None or not isinstance(task, Task):
            return False
        if task.key not in self._told:
            self._told.add(task.key)
            case, likeness = found
            line = {"task_id": task.id, "task_key": task.key, "case": case.id, "likeness": str(likeness)}
            append_lines(self._path, [json_line(line)])
            log.info("task %s is withheld from training: the %s of case %s", task.id, likeness, case.id)
        return True


def count_withheld(run_dir: Path) -> int:
    """How many training tasks a run withheld."""
    return len({line["task_key"] for line in read_json_lines(run_dir / FILE)})
