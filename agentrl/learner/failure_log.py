"""`failures/updates.jsonl` in the run folder (groups and optimizer steps excluded from training), and the learner's disk errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.base.error_text import disk_full_error
from agentrl.base.files import append_lines, complete_lines, write_atomically
from agentrl.errors import DiskFull, LearnerError
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import codec


@contextmanager
def disk_errors_raised(what: str) -> Iterator[None]:
    """Raises `DiskFull` if the block runs out of disk space, and `LearnerError` for any other write error.

    `what` names the file in the message. Some libraries report a full disk with an error other than `OSError`.
    """
    try:
        yield
    except Exception as error:
        if disk_full_error(error) is not None:
            raise DiskFull(f"no room to write {what}") from error
        if isinstance(error, OSError):
            raise LearnerError(f"cannot write {what}: {error.strerror or error}") from error
        raise


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
