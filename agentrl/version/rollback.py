"""How the driver asks the learner to go back: one file in the registry's folder, looked at before every step.

The driver judges versions and the learner owns the weights; neither waits for the other. A request names the version that is refused
and the one to go back to, with the hashes of their weights. It stands until the learner has published a successor and refused the
version, and it is void once a version of that number has other weights, or is none any more, or a later version is promoted: the last
one of a run, when the request came too late. So it may be asked and looked at any number of times, and whoever dies in between finds it
as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.protocols import VersionRegistry
from agentrl.records import VersionState, codec
from agentrl.records.fields import Record, Text

_LARGEST = 1 << 20  # bytes
ROLLBACK_FILE = "rollback.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest(Record):
    """Go back from `version` to the weights of `to`."""

    version: int
    sha256: str
    to: int
    to_sha256: str
    reason: Text

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.to < self.version:
            raise ValueError(f"Request: from version {self.version} to {self.to} is not back")


def request_rollback(versions: Path, request: RollbackRequest) -> None:
    """Leaves the request in a registry's folder, durably, in place of an earlier one. Raises `StoreError`."""
    try:
        write_atomically(versions / ROLLBACK_FILE, codec.to_json(request) + b"\n", durable=True)
    except OSError as error:
        raise StoreError(f"{versions / ROLLBACK_FILE}: {error.strerror or error}") from error


def read_request(versions: Path) -> RollbackRequest | None:
    """The last request, answered or not; None where there was none. Raises `StoreError` where it cannot be read."""
    path = versions / ROLLBACK_FILE
    try:
        return codec.from_json(RollbackRequest, read_bytes(path, most=_LARGEST, inside=versions))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def pending_request(versions: Path, registry: VersionRegistry) -> RollbackRequest | None:
    """The request that has not been answered yet, if there is one. Raises `StoreError` where it cannot be read."""
    request = read_request(versions)
    if request is None:
        return None
    found = registry.get(request.version)
    if found is None or found.sha256 != request.sha256 or found.state is VersionState.ROLLED_BACK:
        return None
    promoted = registry.latest(VersionState.PROMOTED)
    return None if promoted is not None and promoted.number > request.version else request
