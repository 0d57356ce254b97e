"""`failures/updates.jsonl` in the run folder: what was left out of training, and why. Written by the learner, read by the driver."""

from __future__ import annotations

from pathlib import Path

from agentrl.base.files import append_lines, complete_lines, write_atomically
from agentrl.learner.disk import disk_errors_raised
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import codec

FILE = "failures/updates.jsonl"


class UpdateFailureLog:
    """The setbacks of a run, one line each, in the order of the steps."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE

    def append(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Durable on return. Raises `DiskFull` or `LearnerError` when the disk refuses."""
        if setbacks:
            with disk_errors_raised(str(self.path)):
                append_lines(self.path, map(_line, setbacks), durable=True)

    def remove_from(self, step: int) -> None:
        """After a crash or a halt: the steps from `step` on will be made again, and written down again."""
        found = self.read()
        if any(setback.step >= step for setback in found):
            with disk_errors_raised(str(self.path)):
                write_atomically(self.path, b"".join(_line(setback) for setback in found if setback.step < step), durable=True)

    def read(self, step: int | None = None) -> tuple[UpdateFailure, ...]:
        """All of them, or those of one step. A torn last line, which a killed process may have left, is not one."""
        found = [codec.from_json(UpdateFailure, line) for line in complete_lines(self.path)]
        return tuple(setback for setback in found if step is None or setback.step == step)


def _line(setback: UpdateFailure) -> bytes:
    return codec.to_json(setback) + b"\n"
