"""How the driver requests a rollback from the learner: one file in the registry's folder, which the learner reads before every step.

The gate runs in the driver and the learner owns the weights; neither waits for the other. A request names the rejected version and its
target, with the hashes of their weights. It is valid until the learner has published a successor and rolled the version back. It becomes
void if the version is retracted or gets other weights, or if a later version is promoted. So it can be written and read any number of
times, also after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl import codec
from agentrl.errors import StoreError
from agentrl.fields import Record, Text
from agentrl.files import write
from agentrl.foreign import content
from agentrl.protocols import VersionRegistry
from agentrl.records import VersionState

_LARGEST = 1 << 20  # bytes
FILE = "rollback.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Record):
    """Roll back from `version` to the weights of `to`."""

    version: int
    sha256: str
    to: int
    to_sha256: str
    reason: Text

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.to < self.version:
            raise ValueError(f"rollback request: version {self.to} is not older than version {self.version}")


def ask(versions: Path, request: Request) -> None:
    """Writes the request durably and replaces an earlier one. Raises `StoreError`."""
    try:
        write(versions / FILE, codec.to_json(request) + b"\n", durable=True)
    except OSError as error:
        raise StoreError(f"{versions / FILE}: {error.strerror or error}") from error


def read(versions: Path) -> Request | None:
    """Returns the last request, answered or not; None if there was none. Raises `StoreError` if it cannot be read."""
    path = versions / FILE
    try:
        return codec.from_json(Request, content(path, most=_LARGEST, inside=versions))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def pending(versions: Path, registry: VersionRegistry) -> Request | None:
    """Returns the request that is not answered yet, if any. Raises `StoreError` if it cannot be read."""
    request = read(versions)
    if request is None:
        return None
    found = registry.get(request.version)
    if found is None or found.sha256 != request.sha256 or found.state is VersionState.ROLLED_BACK:
        return None
    promoted = registry.latest(VersionState.PROMOTED)
    return None if promoted is not None and promoted.number > request.version else request
