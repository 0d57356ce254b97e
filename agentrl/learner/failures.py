"""`failures/updates.jsonl` in the run folder: what was not trained on, and why. Written by the learner, read by the driver."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl import codec
from agentrl.learner.durable import writing
from agentrl.learner.guard import Setback

FILE = "failures/updates.jsonl"


class FailureLog:
    """The setbacks of a run, one line each, in the order of the steps."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE

    def append(self, setbacks: tuple[Setback, ...]) -> None:
        """Durable when it returns. Raises `DiskFull` or `LearnerError` when the disk refuses."""
        if setbacks:
            self._write("ab", setbacks)

    def forget_from(self, step: int) -> None:
        """After a crash or a halt: the steps from `step` on will be made again, and written down again."""
        found = self.read()
        if any(setback.step >= step for setback in found):
            self._write("wb", tuple(setback for setback in found if setback.step < step))

    def read(self, step: int | None = None) -> tuple[Setback, ...]:
        """All of them, or those of one step. A torn last line, which a killed process may have left, is not one."""
        data = self.path.read_bytes() if self.path.exists() else b""
        found = [codec.from_json(Setback, line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return tuple(setback for setback in found if step is None or setback.step == step)

    def _write(self, mode: str, setbacks: tuple[Setback, ...]) -> None:
        target = self.path if mode == "ab" else self.path.with_name(f".{self.path.name}.part")
        with writing(str(self.path)):
            self.path.parent.mkdir(exist_ok=True)
            with target.open(mode) as file:
                file.writelines(codec.to_json(setback) + b"\n" for setback in setbacks)
                file.flush()
                os.fsync(file.fileno())
            target.replace(self.path)
