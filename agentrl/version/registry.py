"""Policy versions as folders: `versions/000012/version.json` next to that version's weights.

States:

    candidate    published; it has neither served nor been evaluated
    serving      the servers use it, and the gate has not decided yet; at most one version at a time
    served       another version replaced it before the gate decided
    promoted     accepted by the gate; it may serve, and the run can fall back to it
    rolled_back  rejected; never serves again

    candidate -> serving | promoted | rolled_back
    serving   -> served | promoted | rolled_back
    served    -> serving | promoted | rolled_back
    promoted  -> rolled_back

A promoted version keeps its state while it serves and afterwards. The servers should always serve `latest(SERVING, PROMOTED)`, so after a
rollback they serve the newest version that was not rolled back.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.base.files import fsync_path, sha256_file, wait_for_lock, write_atomically
from agentrl.base.liveness import LOCK_WAIT_S
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.records import ADAPTER, PolicyVersion, VersionState, codec
from agentrl.version import deltas, rollback

MAX_RECORDS = 10_000
"""Number of records that a run keeps in addition to those of versions with weights. A limit is needed because a run may be endless."""
_RECORD = "version.json"
_HELD, _LEAGUE, _PINNED = "held", "league", "pinned"
_LARGEST = 1 << 20  # bytes of a record
_RECENT = 16  # newest versions, which each `prune` reads because another process may have published them again
_LEGAL = {
    VersionState.CANDIDATE: {VersionState.SERVING, VersionState.PROMOTED, VersionState.ROLLED_BACK},
    VersionState.SERVING: {VersionState.SERVED, VersionState.PROMOTED, VersionState.ROLLED_BACK},
    VersionState.SERVED: {VersionState.SERVING, VersionState.PROMOTED, VersionState.ROLLED_BACK},
    VersionState.PROMOTED: {VersionState.ROLLED_BACK},
    VersionState.ROLLED_BACK: set(),
}


class FolderRegistry:
    """A `VersionRegistry` stored as files in `folder` (`versions/` in a run folder).

    Writes hold an exclusive file lock, and reads of several records hold a shared lock, so no process sees an incomplete change of SERVING.
    The kernel releases the lock when a process dies. Each record is replaced atomically, so `get` needs no lock. Methods block, so call
    them in a thread if there is an event loop.

    Raises `StoreError` if a file is damaged or cannot be read or written, a change is illegal, a version to change is not registered, the
    registry is closed, or the lock cannot be acquired within `lock_timeout_s`.
    """

    def __init__(self, folder: Path, *, lock_timeout_s: float = LOCK_WAIT_S) -> None:
        self.folder = folder
        self._lock_timeout_s = lock_timeout_s
        self._closed = False
        self._kept: set[int] | None = None  # versions whose weights the last `prune` kept; None before the first, which reads all
        with _translated(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, version: PolicyVersion) -> None:
        """Registers a published version. Adding a registered version again does nothing. Raises `StoreError` if it is registered with
        different weights, or if its folder is not `versions/NUMBER`."""
        self._check_folder(version)
        with self._locked(fcntl.LOCK_EX):
            known = self._read(version.number)
            if known is None:
                self._write(version)
            elif known.sha256 != version.sha256:
                raise StoreError(f"version {version.number} is already registered with different weights in {self.folder}")

    def get(self, number: int) -> PolicyVersion | None:
        """Returns a version; None if it is not registered. Never waits for other processes."""
        self._check_open()
        return self._read(number)

    def versions(self) -> tuple[PolicyVersion, ...]:
        """Returns all registered versions, the oldest first."""
        with self._locked(fcntl.LOCK_SH):
            return self._scan()

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Returns the newest version in one of these states, or in any state if no states are given; None if there is none."""
        with self._locked(fcntl.LOCK_SH):
            newest_first = (self._read(number) for number in reversed(self._numbers()))
            return next((version for version in newest_first if version is not None and (not states or version.state in states)), None)

    def set_state(self, number: int, state: VersionState, *, sha256: str | None = None) -> None:
        """Changes a version's state as the table above allows. Setting the current state again does nothing.

        Raises `StoreError` if the version's weights do not have the hash `sha256`, which means that the version was retracted and published
        again.
        """
        with self._locked(fcntl.LOCK_EX):
            version = self._must_read(number)
            if sha256 not in (None, version.sha256):
                raise StoreError(f"version {number} was published again with weights that differ from sha256 {sha256[:12]}...")
            if state is VersionState.SERVING:
                self._serve(version)
            elif state is not version.state:
                self._move(version, state)

    def set_evals(self, number: int, evals: Mapping[str, float]) -> None:
        """Adds evaluation results to a version. A new value replaces an existing value with the same name."""
        with self._locked(fcntl.LOCK_EX):
            version = self._must_read(number)
            self._write(replace(version, evals={**version.evals, **evals}))

    def path(self, version: PolicyVersion) -> Path:
        """Returns the folder that contains the version's weights."""
        return self.folder.parent / version.folder

    def verify(self, version: PolicyVersion) -> None:
        """Raises `StoreError` unless the weights on disk (complete, delta or adapter) are the registered weights."""
        home = self.path(version)
        weights = home / version.weights
        with _translated(weights):
            if not weights.exists() and (version.weights == ADAPTER or not (home / deltas.DELTA_RECORD).exists()):
                raise StoreError(f"{weights}: No such file or directory")
            if version.weights == ADAPTER:
                actual = sha256_file(weights)
                if actual != version.sha256:
                    raise StoreError(
                        f"{weights} differs from the registered file: sha256 {actual[:12]}..., expected {version.sha256[:12]}..."
                    )
                return
            try:
                deltas.verify_weights(home, version.sha256)
            except ValueError as error:
                raise StoreError(str(error)) from error

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """Deletes every version newer than the learner's checkpoint, with its weights, and returns their numbers. Call this method after a
        crash.

        The learner will publish different weights under these numbers. If the serving version is among the deleted versions, the newest
        remaining version that was not rolled back becomes the serving version (a promoted version keeps its state), so `latest(SERVING,
        PROMOTED)` never returns a deleted version.
        """
        with self._locked(fcntl.LOCK_EX):
            lost = [number for number in self._numbers() if number > newest]
            if (pins := self._read_numbers(_PINNED)) & set(lost):  # different weights will have these numbers
                self._write_numbers(_PINNED, pins - set(lost))
            for number in lost:
                self._remove(number)
            left = [version for version in self._scan() if version.state is not VersionState.ROLLED_BACK]
            if lost and left and not any(version.state is VersionState.SERVING for version in left):
                self._serve(left[-1])
            return tuple(lost)

    def hold(self, number: int) -> None:
        """Makes `prune`, in any process, keep the weights of this version until a different version is held."""
        with self._locked(fcntl.LOCK_EX):
            self._write_numbers(_HELD, {number})

    def keep_for_league(self, members: Collection[int]) -> None:
        """Makes `prune`, in any process, keep the weights of these versions until the next call. Does not change pins."""
        with self._locked(fcntl.LOCK_EX):
            self._write_numbers(_LEAGUE, {*members})

    def pin(self, number: int, *, pinned: bool = True) -> None:
        """Pins or unpins a version. `prune` keeps the weights of a pinned version, and the learner keeps its checkpoint. Idempotent.

        Raises `StoreError` if the version is not registered.
        """
        with self._locked(fcntl.LOCK_EX):
            self._must_read(number)
            pins = self._read_numbers(_PINNED)
            self._write_numbers(_PINNED, pins | {number} if pinned else pins - {number})

    def pinned(self) -> frozenset[int]:
        """Returns the pinned versions."""
        with self._locked(fcntl.LOCK_SH):
            return frozenset(self._read_numbers(_PINNED))

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes the weights of old versions and returns the numbers of these versions. The newest `MAX_RECORDS` records stay as history.

        `prune` keeps the `keep` newest versions, the `keep` newest promoted versions, version 0, the serving version, the held version, the
        league's members, the pinned versions, the target of a rollback request, and the versions from which a kept delta is built. `prune`
        never changes folders outside `versions/`.
        """
        with self._locked(fcntl.LOCK_EX):
            numbers = self._numbers()
            first = 0 if self._kept is None else max(numbers, default=0) - _RECENT
            versions = [version for number in numbers if number >= first or number in (self._kept or ()) if (version := self._read(number))]
            newest = {version.number for version in versions[max(0, len(versions) - keep) :]}
            promoted = [version.number for version in versions if version.state is VersionState.PROMOTED]
            serving = {version.number for version in versions if version.state is VersionState.SERVING}
            spared = {0, *newest, *promoted[max(0, len(promoted) - keep) :], *serving, *self._rollback_target()}
            spared |= self._read_numbers(_HELD) | self._read_numbers(_LEAGUE) | self._read_numbers(_PINNED)
            remaining = [version.number for version in versions if version.number in spared]
            needed = {link for number in remaining for link in deltas.base_folders(self._home(number))}
            old = [version.number for version in versions if version.number not in spared and self._home(version.number) not in needed]
            self._kept = {version.number for version in versions} - {*old}
            dropped = tuple(number for number in old if self._drop_weights(number))
            for number in numbers[: max(0, len(numbers) - MAX_RECORDS)]:
                if number not in self._kept:
                    self._remove(number)
            return dropped

    def close(self) -> None:
        """Prevents further use. No file is open between calls."""
        self._closed = True

    def _serve(self, version: PolicyVersion) -> None:
        if version.state is VersionState.ROLLED_BACK:
            raise StoreError(f"version {version.number} was rolled back and cannot serve again")
        serving = False
        for number in reversed(self._numbers()):
            if serving and number < version.number:
                break  # older versions need not be read, because at most one version was serving
            if (other := self._read(number)) is None:
                continue
            serving = serving or other.state is VersionState.SERVING
            if other.state is VersionState.PROMOTED and other.number > version.number:
                raise StoreError(
                    f"version {version.number} cannot serve while the newer version {other.number} is promoted; roll it back first"
                )
            if other.state is VersionState.SERVING and other.number != version.number:
                # Written first, so that a crash in between leaves no serving version instead of two.
                self._write(replace(other, state=VersionState.SERVED))
        if version.state in (VersionState.CANDIDATE, VersionState.SERVED):
            self._write(replace(version, state=VersionState.SERVING))

    def _move(self, version: PolicyVersion, state: VersionState) -> None:
        if state not in _LEGAL[version.state]:
            allowed = ", ".join(sorted(_LEGAL[version.state])) or "nothing"
            raise StoreError(f"version {version.number} is {version.state} and cannot become {state}; allowed: {allowed}")
        self._write(replace(version, state=state))

    def _read_numbers(self, name: str) -> set[int]:
        """Returns the version numbers in a file in the registry, which contains one number per line; empty if there is no such file."""
        path = self.folder / name
        try:
            return {int(line) for line in read_bytes(path, most=_LARGEST, inside=self.folder).split()}
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {str(error)[:200]}") from error

    def _write_numbers(self, name: str, numbers: set[int]) -> None:
        with _translated(self.folder / name):
            write_atomically(self.folder / name, "".join(f"{number}\n" for number in sorted(numbers)), durable=True)

    def _rollback_target(self) -> set[int]:
        """Returns the target of the last rollback request (`agentrl.version.rollback`), whether it is pending or not; empty if there is
        none."""
        request = rollback.read_request(self.folder)
        return set() if request is None else {request.to}

    def _home(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    def _numbers(self) -> list[int]:
        with _translated(self.folder):
            return sorted(int(entry.name) for entry in os.scandir(self.folder) if entry.name.isdecimal() and entry.is_dir())

    def _scan(self) -> tuple[PolicyVersion, ...]:
        read = (self._read(number) for number in self._numbers())
        return tuple(version for version in read if version is not None)

    def _read(self, number: int) -> PolicyVersion | None:
        """Returns the record of a version; None if the folder is missing or is still being written."""
        path = self._home(number) / _RECORD
        try:
            data = read_bytes(path, most=_LARGEST, inside=self.folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: {error}") from error
        try:
            version = codec.from_json(PolicyVersion, data)
        except ValueError as error:
            raise StoreError(f"{path} is not a policy version: {error}") from error
        if version.number != number:
            raise StoreError(f"{path} is the record of version {version.number}")
        self._check_folder(version)
        return version

    def _check_folder(self, version: PolicyVersion) -> None:
        """Raises `StoreError` if a version's folder is not the folder of its record. A third party's record could refer to any folder."""
        if self.path(version) != self._home(version.number):
            name = f"{version.folder[:200]!a}"
            raise StoreError(f"version {version.number} has the folder {name}, but its folder must be {self._home(version.number)}")

    def _must_read(self, number: int) -> PolicyVersion:
        version = self._read(number)
        if version is None:
            raise StoreError(f"version {number} is not registered in {self.folder}")
        return version

    def _write(self, version: PolicyVersion) -> None:
        home = self._home(version.number)
        with _translated(home):
            home.mkdir(exist_ok=True)
            write_atomically(home / _RECORD, codec.to_json(version), durable=True)
            fsync_path(self.folder)

    def _remove(self, number: int) -> None:
        home = self._home(number)
        with _translated(home):
            if home.is_symlink():  # its target may be a folder outside the run
                home.unlink()
                return
            (home / _RECORD).unlink(missing_ok=True)  # deleted first, because a folder without it is not a version
            shutil.rmtree(home)

    def _drop_weights(self, number: int) -> bool:
        home = self._home(number)
        with _translated(home):
            extra = [entry for entry in home.iterdir() if entry.name != _RECORD]
            for entry in extra:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        return bool(extra)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the registry of {self.folder} is closed")

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self._check_open()
        path = self.folder / ".lock"
        with _translated(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not wait_for_lock(handle, how, within_s=self._lock_timeout_s):
                raise StoreError(
                    f"{self.folder} was locked by another process for {self._lock_timeout_s:g} s\n  fix: stop that process (see"
                    f" lsof {path}), then continue with --resume"
                )
            yield
        finally:
            os.close(handle)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
