"""The file in the registry's folder with which the gate or a user requests a rollback from the learner.

The learner reads the file before every step, including the first step of a resumed run. The learner owns the weights, and the writer of a
request does not wait for the learner. A request contains the rejected version and the target of the rollback, with the hashes of their
weights. A request is valid until the learner has published a successor and rolled the version back. A request becomes void if the rejected
version is retracted or replaced by different weights. A request from the gate also becomes void if a later version is promoted. Therefore,
a request can be written and read any number of times, even after a crash. A user's request replaces any other request, and while a user's
request is pending, the gate does not replace it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import fsync_path, write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.protocols import VersionRegistry
from agentrl.records import VersionState, codec
from agentrl.records.fields import Record, Text

_LARGEST = 1 << 20  # bytes
ROLLBACK_FILE = "rollback.json"
BUDGET_STEPS = 256
"""Number of steps after which a setback no longer counts against a budget, so that rare setbacks do not stop an endless run."""


def recent_steps(steps: Iterable[int], now: int) -> tuple[int, ...]:
    """Returns the steps with setbacks that still count in step `now`, that is, the steps among the last `BUDGET_STEPS`."""
    return tuple(step for step in steps if step > now - BUDGET_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest(Record):
    """A request to roll back from `version` to the weights of `to`. Raises `ValueError` if `to` is not older than
    `version`."""

    version: int
    sha256: str
    to: int
    to_sha256: str
    reason: Text
    by_user: bool = False  # requested with `agentrl versions rollback`, not by the gate

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.to < self.version:
            raise ValueError(f"rollback request: version {self.to} is not older than version {self.version}")


def request_rollback(versions: Path, request: RollbackRequest) -> None:
    """Writes the request durably and replaces an earlier request. Raises `StoreError` if the file cannot be written."""
    try:
        write_atomically(versions / ROLLBACK_FILE, codec.to_json(request) + b"\n", durable=True)
    except OSError as error:
        raise StoreError(f"{versions / ROLLBACK_FILE}: {error.strerror or error}") from error


def withdraw_request(versions: Path) -> None:
    """Removes the request. Idempotent. Raises `StoreError` if the file cannot be deleted."""
    try:
        (versions / ROLLBACK_FILE).unlink(missing_ok=True)
        fsync_path(versions)
    except OSError as error:
        raise StoreError(f"{versions / ROLLBACK_FILE}: {error.strerror or error}") from error


def read_request(versions: Path) -> RollbackRequest | None:
    """Returns the last request, whether it is pending or not; None if there is none. Raises `StoreError` if the request cannot be read."""
    path = versions / ROLLBACK_FILE
    try:
        return codec.from_json(RollbackRequest, read_bytes(path, most=_LARGEST, inside=versions))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def pending_request(versions: Path, registry: VersionRegistry) -> RollbackRequest | None:
    """Returns the pending request; None if there is none. Raises `StoreError` if the request cannot be read."""
    request = read_request(versions)
    if request is None:
        return None
    version = registry.get(request.version)
    if version is None or version.sha256 != request.sha256 or version.state is VersionState.ROLLED_BACK:
        return None
    if request.by_user:
        return request
    promoted = registry.latest(VersionState.PROMOTED)
    return None if promoted is not None and promoted.number > request.version else request
