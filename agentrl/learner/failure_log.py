"""`failures/updates.jsonl` in the run folder: groups and optimizer steps that were excluded from training, with the reason."""

from __future__ import annotations

from pathlib import Path

from agentrl.base.files import append_lines, complete_lines, write_atomically
from agentrl.learner.disk import disk_errors_raised
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import codec

FILE = "failures/updates.jsonl"


class UpdateFailureLog:
    """The setbacks of a run, one JSON line each, in the order of the steps. The learner writes it, the driver reads it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE

    def append(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks durably. Raises `DiskFull` or `LearnerError` on a write error."""
        if setbacks:
            with disk_errors_raised(str(self.path)):
                append_lines(self.path, map(_line, setbacks), durable=True)

    def remove_from(self, step: int) -> None:
        """Removes the entries from `step` on: after a crash or halt these steps run and are logged again."""
        setbacks = self.read()
        if any(setback.step >= step for setback in setbacks):
            with disk_errors_raised(str(self.path)):
                write_atomically(self.path, b"".join(_line(setback) for setback in setbacks if setback.step < step), durable=True)

    def read(self, step: int | None = None) -> tuple[UpdateFailure, ...]:
        """Returns all setbacks, or those of one step. An incomplete last line, which a killed process may leave, is ignored."""
        setbacks = (codec.from_json(UpdateFailure, line) for line in complete_lines(self.path))
        return tuple(setback for setback in setbacks if step is None or setback.step == step)


def _line(setback: UpdateFailure) -> bytes:
    return codec.to_json(setback) + b"\n"
