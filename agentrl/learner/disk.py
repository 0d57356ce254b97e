"""Turns disk errors of the learner into its own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.base.error_text import disk_full_error
from agentrl.errors import DiskFull, LearnerError


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
