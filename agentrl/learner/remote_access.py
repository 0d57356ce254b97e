"""Access to a run for a learner that does not share the driver's disk: a mirror of the run folder, and calls to the driver.

The driver has the ledger, the registry, and the newest checkpoints and versions. The learner writes into its mirror and sends what is
complete, in the same order in which a learner on the driver's disk writes: checkpoint, commit, version, registration. A local checkpoint
that the driver does not have is deleted at the next start. The step of a deleted checkpoint is repeated, with the same result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.files import has_intact_files
from agentrl.base.media import MediaFolder
from agentrl.cluster.chunks import FileChunks, FolderListing
from agentrl.cluster.file_service import BASE_PROBE
from agentrl.cluster.link import Link, NotFound
from agentrl.cluster.mirror import Mirror, mirrored_media
from agentrl.errors import AgentRLError, DiskFull
from agentrl.experience import token_records
from agentrl.experience.step_uses import StepUses
from agentrl.learner.access import FolderAccess, Spare
from agentrl.learner.update_guard import UpdateFailure
from agentrl.records import Group, GroupUse, LedgerEntry, PolicyVersion, VersionState, codec
from agentrl.records.images import images_of
from agentrl.serving.access import ServerAddress
from agentrl.version.rollback import RollbackRequest

if TYPE_CHECKING:
    from agentrl.learner.ranks import Ranks

log = logging.getLogger("agentrl.learner")

CALL_S = 300.0
"""Deadline for a call, in seconds. Until then, the call is repeated if the driver does not respond."""
_GROUPS = 4  # groups read concurrently
_TOKENS_S = 20.0  # seconds to send the recorded tokens of a step


class Calls:
    """Calls from a learner to its driver. A call that is repeated after a lost response keeps its id, so the driver executes it once."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Returns the response as JSON data. Raises the same errors as `Link.call`."""
        data = {"id": secrets.token_hex(12), **arguments}
        return self.link.json("POST", f"/learner/{method}", data, timeout_s=CALL_S)


class RemoteStore:
    """The driver's ledger: the methods of an `ExperienceStore` that a learner calls."""

    def __init__(self, calls: Calls, media: MediaFolder) -> None:
        self._calls, self._media = calls, media

    def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """Returns the ledger's entries; see `ExperienceStore.entries`."""
        return tuple(codec.from_json(LedgerEntry, json.dumps(entry)) for entry in self._calls("entries", first=first, step=step))

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """Returns the groups in the given order. Reads a few groups at a time."""
        with ThreadPoolExecutor(_GROUPS, thread_name_prefix="groups") as pool:
            return tuple(pool.map(self._group, indices))

    def assign(self, step: int, indices: Sequence[int]) -> None:
        """Assigns groups to a step."""
        self._calls("assign", step=step, indices=list(indices))

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        """Marks the groups of a step as consumed."""
        self._calls("commit", step=step, uses=_uses(uses), checkpoint=checkpoint)

    def close(self) -> None:
        """Closes nothing, because the connections belong to the link."""

    def _group(self, index: int) -> Group:
        body = json.dumps({"index": index}).encode()
        group = codec.from_json(Group, self._calls.link.call("POST", "/learner/group", body, timeout_s=CALL_S))
        for name in images_of(trajectory for scored in group.episodes for trajectory in scored.episode.trajectories):
            self._media.read(name)  # stores a copy in the mirror
        return group


class RemoteRegistry:
    """The driver's registry: the methods of a `VersionRegistry` that a learner calls."""

    def __init__(self, calls: Calls, mirror: Mirror) -> None:
        self._calls, self._mirror = calls, mirror

    def add(self, version: PolicyVersion) -> None:
        """Registers a version that the driver already has."""
        self._calls("add", version=codec.to_data(version))

    def get(self, number: int) -> PolicyVersion | None:
        """Returns a version, or None if it is not registered."""
        return _version(self._calls("get", number=number))

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Returns the newest version in one of `states`, or None if there is none."""
        return _version(self._calls("latest", states=[state.value for state in states]))

    def set_state(self, number: int, state: VersionState) -> None:
        """Sets the state of a version."""
        self._calls("set_state", number=number, state=state.value)

    def verify(self, version: PolicyVersion) -> None:
        """Raises `StoreError` if the driver's weights for a version differ from the registered weights or are missing."""
        self._calls("verify", version=codec.to_data(version))

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """Removes every version newer than `newest`, and returns the numbers of these versions."""
        return tuple(self._calls("reconcile_versions", newest=newest))

    def pinned(self) -> frozenset[int]:
        """Returns the pinned versions."""
        return frozenset(self._calls("pinned"))

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes the weights of old versions, on the driver and in the mirror. Returns the numbers of these versions; see
        `FolderRegistry.prune`."""
        numbers = tuple(self._calls("prune", keep=keep))
        self._mirror.drop_extra("versions")
        return numbers

    def close(self) -> None:
        """Closes nothing."""


class RemoteAccess:
    """The methods of `FolderAccess`, for a mirror of the run folder.

    Args:
        mirror: contains the recipe; `fetch_base` adds version 0.
    """

    poll_s, own_disk = 0.25, True

    def __init__(self, mirror: Mirror) -> None:
        self.folder, self._mirror = mirror.folder, mirror
        self._calls = Calls(mirror.link)
        self._tokens_failed = False
        self.store = RemoteStore(self._calls, mirrored_media(mirror.folder, mirror.link))
        self.registry = RemoteRegistry(self._calls, mirror)

    @classmethod
    def open(cls, folder: Path, url: str, key: str) -> RemoteAccess:
        """Returns the access for a learner whose mirror is `folder`. Fetches the recipe into the mirror."""
        mirror = Mirror(folder, Link(url, key))
        mirror.fetch("recipe.json")
        return cls(mirror)

    def fetch_base(self, ranks: Ranks) -> None:
        """Fetches version 0. Must be called on all ranks."""
        _once_per_host(ranks, lambda: self._mirror.fetch("versions/000000"))

    def prepare(self, alert: Callable[[str], None], ranks: Ranks) -> None:
        """Fetches the newest intact checkpoint, if there is one, and deletes local checkpoints that the driver does not have. Calls `alert`
        for each damaged checkpoint."""
        _once_per_host(ranks, lambda: self._fetch_newest(alert))

    def _fetch_newest(self, alert: Callable[[str], None]) -> None:
        self._mirror.drop_extra("checkpoints")
        for name in reversed(self._mirror.names("checkpoints")):
            path = self._mirror.fetch(f"checkpoints/{name}")
            if has_intact_files(path):
                return
            alert(f"checkpoint {name} is damaged at the driver, so the previous checkpoint is used\n  fix: check the driver's disk")

    def need_checkpoint(self, number: int, ranks: Ranks) -> None:
        """Fetches a checkpoint if the driver has it."""

        def fetch() -> None:
            with contextlib.suppress(NotFound):
                self._mirror.fetch(f"checkpoints/{number:06d}")

        _once_per_host(ranks, fetch)

    def checkpoint_written(self, folder: Path, spare: Spare, ranks: Ranks) -> None:
        """Sends a checkpoint. If the driver's disk is nearly full, older checkpoints are deleted there first. Each host sends its own
        files. Raises `DiskFull` if the room still does not suffice."""
        name = f"checkpoints/{folder.name}"
        if ranks.hosts > 1:
            self._send_parts(name, folder, spare, ranks)
            return
        try:
            self._mirror.push(name)
        except DiskFull:
            self.prune_checkpoints(1, spare)
            self._mirror.push(name)

    def _send_parts(self, name: str, folder: Path, spare: Spare, ranks: Ranks) -> None:
        own = self._mirror.index.list_folder(folder) if ranks.is_first_on_host else FolderListing(files=())
        by_name: dict[str, FileChunks] = {}
        for data in reversed(ranks.gather_bytes(codec.to_json(own))):  # if several hosts have the same file, the first host's is used
            by_name |= {file.name: file for file in codec.from_json(FolderListing, data).files}
        whole = FolderListing(files=tuple(by_name[file] for file in sorted(by_name)))
        missing: list[str] = []
        if ranks.is_first:
            try:
                missing = self._mirror.announce(name, whole)
            except DiskFull:
                self.prune_checkpoints(1, spare)
                missing = self._mirror.announce(name, whole)
        missing = json.loads(ranks.gather_bytes(json.dumps(missing).encode())[0])
        here = {sha256 for file in own.files if by_name[file.name] == file for sha256 in file.chunks}
        self._mirror.send(name, [sha256 for sha256 in missing if sha256 in here])
        ranks.barrier()
        if ranks.is_first:
            self._mirror.complete(name)
        ranks.barrier()

    def prune_checkpoints(self, keep: int, spare: Spare) -> None:
        """Deletes old checkpoints on the driver."""
        self._calls("prune_checkpoints", keep=keep, spare=sorted(spare()))

    def version_written(self, folder: Path) -> None:
        """Sends a version."""
        self._mirror.push(f"versions/{folder.name}")

    def base_probe_written(self) -> None:
        """Sends the probe of version 0."""
        self._mirror.link.call("PUT", "/base_probe", (self.folder / BASE_PROBE).read_bytes())

    def tokens_recorded(self, step: int, rank: int) -> None:
        """Sends the tokens that a rank recorded, within `_TOKENS_S` seconds. Only the first error is logged."""
        try:
            content = token_records.load_file(self.folder, step, rank)
            self._mirror.link.call("PUT", f"/updates/{step}/{rank}", content, timeout_s=_TOKENS_S)
        except FileNotFoundError:
            return
        except (AgentRLError, LookupError, OSError, ValueError) as error:
            if not self._tokens_failed:
                log.warning("the driver did not receive the tokens of step %d, so agentrl view shows no ratios: %s", step, error)
            self._tokens_failed = True

    def record_uses(self, uses: StepUses) -> None:
        """Records how the step after the last recorded one used its groups."""
        self._calls("record_uses", uses=_uses(uses))

    def reconcile(self, steps: int, sha256: str) -> None:
        """Restores the driver's ledger and recorded uses to those of a checkpoint."""
        self._calls("reconcile", steps=steps, sha256=sha256)

    def record_setbacks(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks to the driver's log."""
        if setbacks:
            self._calls("record_setbacks", setbacks=[codec.to_data(setback) for setback in setbacks])

    def forget_setbacks(self, step: int) -> None:
        """Removes the setbacks of `step` and of all later steps."""
        self._calls("forget_setbacks", step=step)

    def pending_rollback(self) -> RollbackRequest | None:
        """Returns the rollback that the gate or a user requested, or None if there is no request."""
        data = self._calls("pending_rollback")
        return None if data is None else codec.from_json(RollbackRequest, json.dumps(data))

    def find_server(self) -> ServerAddress | None:
        """Returns the server that the driver announced, or None if no server is running."""
        data = self._calls("find_server")
        return None if data is None else ServerAddress(url=str(data["url"]), key=str(data["key"]), start=int(data["start"]))

    def close(self) -> None:
        """Closes this thread's connection to the driver."""
        self._mirror.link.close()


LearnerAccess = FolderAccess | RemoteAccess


def _once_per_host(ranks: Ranks, work: Callable[[], object]) -> None:
    """Calls `work` on the first rank of each host, and returns on all ranks when every host is done. `work` runs only
    once per host, because it hashes gigabytes."""
    if ranks.is_first_on_host:
        work()
    ranks.barrier()


def _uses(uses: Mapping[int, GroupUse]) -> dict[str, Any]:
    return {str(index): codec.to_data(use) for index, use in uses.items()}


def _version(data: Any) -> PolicyVersion | None:
    return None if data is None else codec.from_json(PolicyVersion, json.dumps(data))
