"""Checkpoints of running groups in the run folder: the newest state of each episode, or the scored episode after it finished.

Each episode has one file (zstd-compressed JSON with a checksum), which is replaced after every turn. If a file is lost, only the turns of
its episode are lost, so a file that cannot be written or read never stops a run. The error is logged, and the episode restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import zstandard

from agentrl.base import files, untrusted_files
from agentrl.base.database import decompress
from agentrl.base.media import MediaFolder
from agentrl.protocols import ExperienceStore
from agentrl.records import MAX_SNAPSHOT_BYTES, EpisodeState, ScoredEpisode, codec
from agentrl.records.images import images_of

log = logging.getLogger(__name__)

T = TypeVar("T", EpisodeState, ScoredEpisode)

MAX_BYTES = 2 * MAX_SNAPSHOT_BYTES
"""Maximum bytes of a file's uncompressed content, which is a base64-encoded snapshot and the turns."""


def encode_checkpoint(record: EpisodeState | ScoredEpisode) -> bytes:
    """Returns the file content that encodes a record. Raises `OSError` if the record is too large."""
    data = codec.to_json(record)
    if len(data) > MAX_BYTES:
        raise OSError(f"the record has {len(data) >> 20} MiB; the limit is {MAX_BYTES >> 20} MiB")
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)


def decode_checkpoint(kind: type[T], body: bytes) -> T:
    """Returns the record that a file content encodes. Raises `ValueError` if the content is damaged."""
    return codec.from_json(kind, decompress(body, most=MAX_BYTES))


class FolderCheckpoints:
    """An `EpisodeCheckpoints` that stores its files in one folder. `000012/3.state` and `000012/3.scored` belong to attempt 3 of group
    12."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._forgotten: set[int] = set()

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        """Stores the newest state of an attempt."""
        await asyncio.to_thread(self._store, group, member, "state", partial(encode_checkpoint, state))

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Stores the scored episode of an attempt in place of the attempt's state."""
        await asyncio.to_thread(self._store, group, member, "scored", partial(encode_checkpoint, scored))

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """Returns the scored episode of an attempt or, if it has not finished, its newest state; None if neither is stored and intact."""
        return await asyncio.to_thread(self._find, group, member)

    def receive(self, group: int, member: int, kind: str, body: bytes) -> None:
        """Stores a record that a different host encoded with `encode_checkpoint`.

        `kind` is `state` or `scored`. A scored episode replaces the state.
        """
        self._store(group, member, kind, lambda: body)

    def content(self, group: int, member: int, kind: str) -> bytes | None:
        """Returns the bytes of a file, to be sent to a different host; None if there is no file, or if it cannot be read."""
        try:
            return untrusted_files.read_bytes(self._path(group, member, kind), most=MAX_BYTES, inside=self._folder)
        except (OSError, ValueError):
            return None

    def remove_group(self, group: int) -> None:
        """Removes the checkpoints of a group that is stored or was abandoned. Later writes for the group are discarded."""
        self._forgotten.add(group)
        shutil.rmtree(self._folder / f"{group:06d}", ignore_errors=True)

    def groups(self) -> tuple[int, ...]:
        """Returns the indices of the groups that have checkpoints, in ascending order."""
        return tuple(int(path.name) for path in files.numbered_folders(self._folder))

    def images(self) -> set[str]:
        """Returns the names of the images that the saved episodes contain. Raises `OSError` if a file cannot be read."""
        names: set[str] = set()
        for path in self._folder.glob("[0-9]*/[0-9]*"):
            if not path.parent.name.isdecimal() or not path.stem.isdecimal():  # a copy that a user made
                continue
            saved = self._find(int(path.parent.name), int(path.stem), must_read=True)
            if isinstance(saved, EpisodeState):
                names |= images_of(saved.trajectories, saved.prompt_ids)
            elif saved is not None:
                names |= images_of(saved.episode.trajectories)
        return names

    def _path(self, group: int, member: int, kind: str) -> Path:
        return self._folder / f"{group:06d}" / f"{member}.{kind}"

    def _find(self, group: int, member: int, *, must_read: bool = False) -> EpisodeState | ScoredEpisode | None:
        scored = self._read(self._path(group, member, "scored"), ScoredEpisode, must_read)
        return self._read(self._path(group, member, "state"), EpisodeState, must_read) if scored is None else scored

    def _store(self, group: int, member: int, kind: str, encode: Callable[[], bytes]) -> None:
        path = self._path(group, member, kind)
        try:
            body = encode()
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(path, body, tag=str(next(self._numbers)))  # unique, because a write may outlive the turn that started it
            if kind == "scored":
                self._path(group, member, "state").unlink(missing_ok=True)
            if group in self._forgotten:
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError as error:
            if group not in self._forgotten:  # otherwise the group's folder was removed
                log.warning("%s could not be written, so a crash would lose the turns since the last write: %s", path, error)

    def _read(self, path: Path, kind: type[T], must_read: bool) -> T | None:
        try:
            return decode_checkpoint(kind, untrusted_files.read_bytes(path, most=MAX_BYTES, inside=self._folder))
        except FileNotFoundError:
            pass
        except OSError as error:  # the file may be intact
            if must_read:
                raise
            log.warning("%s cannot be read; the episode restarts: %s", path, error)
        except ValueError as error:
            aside = self._folder / f"damaged-{path.parent.name}-{path.name}"
            log.warning("%s is damaged and is renamed to %s; the episode restarts: %s", path, aside.name, str(error)[:200])
            with contextlib.suppress(OSError):
                path.replace(aside)
        return None


def drop_unused_images(run_dir: Path, store: ExperienceStore, checkpoints: FolderCheckpoints) -> int:
    """Deletes the images that no stored or saved episode contains, such as those of repeated attempts. Returns the number of images.

    Call it while no episode is running. Deletes nothing if a saved episode cannot be read.
    """
    media = MediaFolder(run_dir)
    if not media.folder.is_dir():
        return 0
    try:
        used = checkpoints.images()
    except OSError as error:
        log.warning("no image is deleted, because a saved episode that may contain it cannot be read: %s", error)
        return 0
    for entry in store.entries():
        if entry.has_episodes:
            (group,) = store.groups((entry.index,))
            used |= images_of(trajectory for scored in group.episodes for trajectory in scored.episode.trajectories)
    return media.keep_only(used)
