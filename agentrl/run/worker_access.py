"""A rollout worker's access to its run: either the run folder on the driver's machine, or the driver and a mirror of the few files that the
worker needs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.base.error_text import reason_text
from agentrl.base.media import MediaFolder
from agentrl.base.scratch import ScratchFolder
from agentrl.base.untrusted_files import read_bytes
from agentrl.cluster.chunks import JUDGES
from agentrl.cluster.link import Link, NotFound
from agentrl.cluster.mirror import Mirror, mirrored_media
from agentrl.config.tools import MemoryConfig
from agentrl.errors import ServingError, UserError
from agentrl.experience import FolderCheckpoints
from agentrl.experience.checkpoints import decode_checkpoint, encode_checkpoint
from agentrl.memory import NoteStore
from agentrl.memory.episode import SearchableNotes
from agentrl.memory.run_memory import NOTES_FILE
from agentrl.memory.store import NoteMatch
from agentrl.protocols import EpisodeCheckpoints
from agentrl.records import EpisodeState, ScoredEpisode
from agentrl.run.worker_api import ADDRESS_FILE

if TYPE_CHECKING:
    from agentrl.run.worker import DriverConnection

log = logging.getLogger(__name__)

T = TypeVar("T", EpisodeState, ScoredEpisode)

_LOADS = 3  # maximum number of attempts to load a checkpoint
_NOTES_S = 30.0
_MAX_KEY_FILE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccess:
    """The address of a worker's driver, and the folders with the files that the worker needs.

    `link`: connection to the driver for a worker whose host does not share the driver's disk; None if the host shares it.
    """

    url: str
    key: str = field(repr=False)
    folder: Path  # the run folder, or the worker's own copy of some of its files
    root: Path | None = None  # the project on this host; None means the driver's project folder
    link: Link | None = None

    @classmethod
    def local(cls, folder: Path) -> WorkerAccess:
        """Returns the access for a worker that has the run folder. Raises `UserError` if the driver accepts no workers."""
        url, key = read_address(folder)
        return cls(url=url, key=key, folder=folder)

    @classmethod
    def remote(cls, url: str, key: str, *, stack: AsyncExitStack, root: Path, folder: Path | None = None) -> WorkerAccess:
        """Returns the access for a worker on a different host. If `folder` is None, the worker uses a temporary folder, which `stack`
        removes."""
        if folder is None:
            folder = stack.enter_context(ScratchFolder())
        return cls(url=url, key=key, folder=folder, root=root, link=Link(url, key))

    async def policy_folder(self) -> Path:
        """Returns a folder with the tokenizer and chat template of the policy. Raises the errors of `Mirror.fetch`."""
        if self.link is None:
            return self.folder / "versions" / "000000"
        return await asyncio.to_thread(self._fetch, self.link)

    async def judge_folders(self, names: Collection[str]) -> dict[str, Path]:
        """Returns copies of the judges' model folders by name, without weights, for a worker on a different host.

        Raises the errors of `Mirror.fetch`.
        """
        assert self.link is not None, "a worker that shares the run folder needs no copies"
        mirror = Mirror(self.folder, self.link)
        return {name: await asyncio.to_thread(mirror.fetch, f"{JUDGES}/{name}", weights=False) for name in names}

    @property
    def media(self) -> MediaFolder:
        """The folder with the images of the run."""
        return MediaFolder(self.folder) if self.link is None else mirrored_media(self.folder, self.link)

    def checkpoints(self, driver: DriverConnection, lease_of: Callable[[int], str | None]) -> EpisodeCheckpoints:
        """Returns the object that saves and loads episodes in progress. `lease_of`: returns the lease of a group."""
        return FolderCheckpoints(self.folder / "running") if self.link is None else DriverCheckpoints(driver, lease_of)

    def notes(self, config: MemoryConfig) -> SearchableNotes:
        """Opens the notes from earlier episodes."""
        return NoteStore(self.folder / NOTES_FILE, config) if self.link is None else DriverNotes(self.link, config)

    def _fetch(self, link: Link) -> Path:
        mirror = Mirror(self.folder, link)
        with suppress(NotFound):
            mirror.fetch("mcp.json")
        return mirror.fetch("versions/000000", into=self.folder / "policy", weights=False)


class DriverCheckpoints:
    """An `EpisodeCheckpoints` that stores its files in the driver's run folder, over HTTP."""

    def __init__(self, driver: DriverConnection, lease_of: Callable[[int], str | None]) -> None:
        self._driver, self._lease_of = driver, lease_of

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        """Saves the newest state of an attempt."""
        await self._save(group, member, "state", state)

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Saves the scored episode of an attempt, which replaces its state."""
        await self._save(group, member, "scored", scored)

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """Returns the saved state or scored episode of an attempt; None if neither is intact or the driver does not return it."""
        scored = await self._load(group, member, "scored", ScoredEpisode)
        return await self._load(group, member, "state", EpisodeState) if scored is None else scored

    async def _save(self, group: int, member: int, kind: str, record: EpisodeState | ScoredEpisode) -> None:
        try:
            body = await asyncio.to_thread(encode_checkpoint, record)
            await self._driver.call(self._path(group, member, kind), content=body)
        except (OSError, ServingError, UserError) as error:
            log.warning("attempt %d of group %d could not be saved, so a crash would lose its turns: %s", member, group, error)

    async def _load(self, group: int, member: int, kind: str, record: type[T]) -> T | None:
        for tries in range(_LOADS):
            try:
                body = await self._driver.call(self._path(group, member, kind))
                return await asyncio.to_thread(decode_checkpoint, record, body) if body else None
            except ServingError as error:
                if tries == _LOADS - 1:
                    log.warning("attempt %d of group %d restarts, because its turns cannot be read: %s", member, group, error)
            except (ValueError, OSError) as error:
                log.warning("attempt %d of group %d restarts, because its turns are damaged: %s", member, group, str(error)[:200])
                return None
        return None

    def _path(self, group: int, member: int, kind: str) -> str:
        return f"/running/{self._lease_of(group) or 'none'}/{member}/{kind}"


class DriverNotes:
    """The driver's notes from earlier episodes. The methods block, so call them in threads."""

    def __init__(self, link: Link, config: MemoryConfig) -> None:
        self._link, self.config = link, config

    def search(self, query: str, *, scope: str, version: int, task_key: str) -> tuple[NoteMatch, ...]:
        """See `NoteStore.search`. Raises `InfrastructureError` if the driver does not respond."""
        data = {"query": query, "scope": scope, "version": version, "task_key": task_key}
        return tuple(NoteMatch(**note) for note in self._link.json("POST", "/notes", data, timeout_s=_NOTES_S))


def read_address(folder: Path) -> tuple[str, str]:
    """Returns the URL and key of a run's driver. Raises `UserError` if the driver accepts no workers."""
    try:
        data = json.loads(read_bytes(folder / ADDRESS_FILE, most=_MAX_KEY_FILE, inside=folder))
        return str(data["url"]), str(data["key"])
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"no driver of {folder} accepts workers", fix="start the run with rollout.workers=1 or more, and wait until it samples"
        ) from None


def read_key(path: Path) -> str:
    """Returns the key from a file, which may be a copy of the driver's `ADDRESS_FILE` or contain only the key. Raises `UserError` if
    the file cannot be read or contains no key."""
    try:
        text = read_bytes(path, most=_MAX_KEY_FILE).decode().strip()
        return str(json.loads(text)["key"]) if text.startswith("{") else text
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} contains no key: {reason_text(error)}", fix=f"copy {ADDRESS_FILE} from the run folder of the driver"
        ) from None
