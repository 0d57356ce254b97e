"""What running groups have so far, in the run folder: the newest state of each episode, or the scored episode once it ended.

One file an episode (zstd-compressed JSON with a checksum), replaced whole after every turn. Losing one costs the episode's turns
and nothing else, so a file that cannot be written or read never stops a run: it is said, and the episode starts afresh.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from pathlib import Path
from typing import TypeVar

import zstandard

from agentrl.base import files, untrusted_files
from agentrl.base.database import decompress
from agentrl.records import MAX_SNAPSHOT_BYTES, EpisodeState, ScoredEpisode, codec

log = logging.getLogger(__name__)

T = TypeVar("T", EpisodeState, ScoredEpisode)

MAX_BYTES = 2 * MAX_SNAPSHOT_BYTES
"""Largest content of a file: a snapshot as base64, and the turns."""


class FolderCheckpoints:
    """An `EpisodeKeeper` in one folder: `000012/3.state` and `000012/3.scored` are of member 3 of group 12."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._forgotten: set[int] = set()

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        await asyncio.to_thread(self._write, group, self._path(group, member, "state"), state)

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        await asyncio.to_thread(self._write, group, self._path(group, member, "scored"), scored)
        self._path(group, member, "state").unlink(missing_ok=True)

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        return await asyncio.to_thread(self._find, group, member)

    def remove_group(self, group: int) -> None:
        """Removes what there is of a group: it is stored, or will never be. A write of a cancelled attempt may still be under way."""
        self._forgotten.add(group)
        shutil.rmtree(self._folder / f"{group:06d}", ignore_errors=True)

    def groups(self) -> tuple[int, ...]:
        """Indices of the groups of which there is something."""
        folders = self._folder.iterdir() if self._folder.is_dir() else ()
        return tuple(sorted(int(path.name) for path in folders if path.is_dir() and path.name.isdecimal()))

    def _path(self, group: int, member: int, kind: str) -> Path:
        return self._folder / f"{group:06d}" / f"{member}.{kind}"

    def _find(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        scored = self._read(self._path(group, member, "scored"), ScoredEpisode)
        return self._read(self._path(group, member, "state"), EpisodeState) if scored is None else scored

    def _write(self, group: int, path: Path, record: EpisodeState | ScoredEpisode) -> None:
        try:
            data = codec.to_json(record)
            if len(data) > MAX_BYTES:
                raise OSError(f"{len(data) >> 20} MiB are more than may be kept")
            path.parent.mkdir(parents=True, exist_ok=True)
            body = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)
            files.write_atomically(path, body, tag=str(next(self._numbers)))  # of its own: a write may outlive the turn that began it
            if group in self._forgotten:
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError as error:
            if group in self._forgotten:  # and its folder with it
                return
            log.warning("%s could not be written: a crash would cost the turns since it was: %s", path, error)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            body = untrusted_files.read_bytes(path, most=MAX_BYTES, inside=self._folder)
            return codec.from_json(kind, decompress(body, most=MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            aside = self._folder / f"damaged-{path.parent.name}-{path.name}"
            log.warning("%s is damaged and put aside as %s; the episode starts afresh: %s", path, aside.name, str(error)[:200])
            path.replace(aside)
            return None
