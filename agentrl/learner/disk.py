"""What the learner says when the disk refuses what it writes to the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.base.error_text import disk_full_error
from agentrl.errors import DiskFull, LearnerError


@contextmanager
def disk_errors_raised(what: str) -> Iterator[None]:
    """Around what writes to the run folder: raises `DiskFull` when there is no room, `LearnerError` when the disk refuses otherwise.

    Only some of the libraries that write here say it with an `OSError`.
    """
    try:
        yield
    except Exception as error:
        if disk_full_error(error) is not None:
            raise DiskFull(f"no room to write {what}") from error
        if isinstance(error, OSError):
            raise LearnerError(f"cannot write {what}: {error.strerror or error}") from error
        raise
