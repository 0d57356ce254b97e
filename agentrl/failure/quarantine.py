"""Tasks that are wrong in themselves: set aside, never tried again in the run, and listed for the person who can repair them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError
from agentrl.records import Blame, Failure, Group

log = logging.getLogger(__name__)

FILE = "quarantine.jsonl"
_NAMED = 20  # tasks named in the error


class Quarantine:
    """The broken tasks of one run, in `quarantine.jsonl`: a line for each with task, group and what is wrong.

    Args:
        run_dir: the run folder.
        limit: how many tasks may be added after opening; one more and `add` raises.
    """

    def __init__(self, run_dir: Path, *, limit: int) -> None:
        self._path = run_dir / FILE
        self._limit = limit
        _drop_torn_line(self._path)
        self._faults = {line["task_key"]: line["message"] for line in _lines(self._path)}
        self._added: list[str] = []

    def __len__(self) -> int:
        return len(self._faults)

    def known(self, task_key: str) -> Failure | None:
        """What is wrong with a task that was set aside before. The key is a hash of the content: a repaired task is another one."""
        message = self._faults.get(task_key)
        return None if message is None else Failure(stage="task", blame=Blame.TASK, kind="quarantined", message=message)

    def add(self, group: Group) -> None:
        """Sets the task of a group with a fault aside, once; nothing for other groups.

        Raises:
            TaskError: it is one more than the limit. The list is in the message, and the file.
        """
        fault = group.fault
        if fault is None or group.task_key in self._faults:
            return
        self._faults[group.task_key] = fault.message
        line = {"task_id": group.task_id, "task_key": group.task_key, "group": group.index, "message": fault.message}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        log.warning("task %s is set aside, with its group %d: %s", group.task_id, group.index, fault.message)
        self._added.append(f"{group.task_id}: {fault.message.partition(chr(10))[0]}")
        if len(self._added) > self._limit:
            more = f"\n  and {len(self._added) - _NAMED} more" if len(self._added) > _NAMED else ""
            raise TaskError(
                f"{len(self._added)} tasks are wrong in themselves, {self._limit} are allowed; all are in {self._path}\n  "
                + "\n  ".join(self._added[:_NAMED])
                + more,
                fix="repair them (`agentrl check` finds more), or raise rollout.max_quarantined; then go on with --resume",
            )


def count(run_dir: Path) -> int:
    """How many tasks of a run are in quarantine."""
    return len({line["task_key"] for line in _lines(run_dir / FILE)})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1])


def _drop_torn_line(path: Path) -> None:
    """Cuts off a last line without its end, which a killed process may have left."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
