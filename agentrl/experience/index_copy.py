"""Copies the episodes of a run whose store has no table of episodes to `episodes.sqlite`, which `EpisodeIndex` reads.

The store is only read, so a different process may drive the run at the same time, even with a different version of agentrl.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from agentrl.base.database import connect_read_only, read_pragma
from agentrl.base.files import fsync_path
from agentrl.errors import StoreError
from agentrl.experience.audit import Progress
from agentrl.experience.episode_index import COPY_FILE
from agentrl.experience.store import APPLICATION_ID, SCHEMA, SqliteStore, translated_errors
from agentrl.protocols import ExperienceStore
from agentrl.records import LedgerEntry

OLDEST_SCHEMA = 4
"""Oldest schema version of a store whose groups can be read."""
_BATCH = 32  # groups per commit
_QUERY_S = 300.0


class OlderStore(SqliteStore):
    """An SQLite store that this or an older version of agentrl wrote, opened for reading `entries` and `groups`. Raises `StoreError`."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        with translated_errors(path):
            self._connection = connect_read_only(path, SCHEMA, timeout_s=_QUERY_S)
            try:
                schema = read_pragma(self._connection, "user_version")
                if read_pragma(self._connection, "application_id") != APPLICATION_ID or schema < OLDEST_SCHEMA:
                    raise StoreError(f"{path} is not an experience store of schema {OLDEST_SCHEMA} or newer")
            except BaseException:
                self._connection.close()
                raise

    @property
    def has_index(self) -> bool:
        """Whether the store already has a table of episodes."""
        with self._reading() as db:
            return db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'episodes'").fetchone() is not None


def copy_episodes(run_dir: Path, source: ExperienceStore, *, progress: Progress = lambda done, total: None) -> int:
    """Writes the groups whose episodes a store contains, with the steps that consumed them, to `episodes.sqlite`. Returns their number.

    An existing file is replaced only when the new file is complete. Groups that are stored later are not in the file. To include such
    groups, repeat the copy.
    """
    final, part = run_dir / COPY_FILE, run_dir / f".{COPY_FILE}.part"
    entries = [entry for entry in source.entries() if entry.has_episodes and not entry.is_residual]
    _remove(part)
    copy = SqliteStore(part)
    try:
        for start in range(0, len(entries), _BATCH):
            progress(start, len(entries))
            copy.put_all(source.groups(entry.index for entry in entries[start : start + _BATCH]))
        _take(copy, entries)
    except BaseException:
        copy.close()
        _remove(part)
        raise
    copy.close()  # moves the write-ahead log into the file
    fsync_path(part)
    _remove(final, keep=True)
    part.replace(final)
    return len(entries)


def _take(copy: SqliteStore, entries: Sequence[LedgerEntry]) -> None:
    """Records in the copy which steps consumed the groups, and how the steps used them."""
    steps: dict[int, list[LedgerEntry]] = {}
    for entry in entries:
        if entry.step is not None:
            steps.setdefault(entry.step, []).append(entry)
    for step, taken in sorted(steps.items()):
        if used := {entry.index: entry.use for entry in taken if entry.use is not None}:
            copy.commit(step, used, "copied")
        else:
            copy.assign(step, [entry.index for entry in taken])


def _remove(path: Path, *, keep: bool = False) -> None:
    """Removes a database and SQLite's auxiliary files next to it. If `keep` is true, removes only the auxiliary files."""
    for end in (*([] if keep else [""]), "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)
