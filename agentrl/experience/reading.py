"""Opens the experience store in a run folder without changing it, even while the run writes. The pages of `agentrl view` use this
module."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from agentrl.base.database import connect_read_only, decompress
from agentrl.errors import StoreError
from agentrl.experience.audit import STATES, LedgerCounts
from agentrl.experience.store import _ENTRIES, SCHEMA, SqliteStore, _entry, check_schema, translated_errors
from agentrl.records import Group, LedgerEntry, codec

MAX_GROUP_BYTES = 24 << 20
"""Maximum size of a group as JSON, in bytes, that a reader decodes. The objects need about four times as much memory."""
_MAX_ROW = 64 << 20  # maximum bytes of a value in a row
_BUSY_S = 2.0
_FRAME = b"\x28\xb5\x2f\xfd"  # starts a zstd frame (RFC 8878, 3.1.1)
# One row per state, reason without details, and kind of group. `agentrl.experience.audit.count` computes the same counts from entries.
_COUNTS = """
SELECT CASE
    WHEN taken.idx IS NULL
        THEN iif(EXISTS (SELECT 1 FROM late_parts WHERE late_parts.idx = groups.idx AND closed_at IS NULL), 'parked', 'ready')
    WHEN checkpoint IS NULL THEN 'assigned' WHEN tokens_trained THEN 'trained' ELSE 'excluded' END AS state,
  iif(checkpoint IS NULL, '', substr(reason, 1, min(instr(reason || ':', ':'), instr(reason || ' ', ' ')) - 1)) AS cause,
  groups.idx < 0 AS residual, count(*), sum(tokens_sampled), sum(iif(checkpoint IS NULL, 0, tokens_trained))
FROM groups LEFT JOIN taken ON groups.idx = taken.idx GROUP BY state, cause, residual
"""


class StoreReader(SqliteStore):
    """A run's SQLite store, opened for reading. It creates no file, acquires no write lock, and decodes no group larger than 24 MiB.

    Raises `StoreError` if the file is missing, damaged or not a store, or if it has a different schema version.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        if not path.exists():
            raise StoreError(f"{path} does not exist: no group has been stored yet")
        with translated_errors(path):
            self._connection = connect_read_only(path, SCHEMA, timeout_s=_BUSY_S, longest=_MAX_ROW)
            try:
                check_schema(self._connection, path, fix="read it with the agentrl version that wrote this run")
            except BaseException:
                self._connection.close()
                raise

    def entry(self, index: int) -> LedgerEntry | None:
        """Returns the ledger entry of one group; None if the group is not stored."""
        return next(iter(self._select("WHERE groups.idx = ?", index)), None)

    def newest_entries(self, *, before: int | None, limit: int) -> tuple[LedgerEntry, ...]:
        """Returns the entries of up to `limit` groups with the largest indices below `before`, in descending order."""
        return self._select("WHERE groups.idx < ? ORDER BY groups.idx DESC LIMIT ?", 1 << 62 if before is None else before, limit)

    def counts(self) -> LedgerCounts:
        """Returns the counts of the ledger, without reading its entries one by one."""
        groups, tokens, unused = dict.fromkeys(STATES, 0), Counter[str](), Counter[str]()
        with self._reading() as db:
            rows = db.execute(_COUNTS).fetchall()
            pending = db.execute("SELECT count(*) FROM late_parts WHERE closed_at IS NULL").fetchone()[0]
        for state, cause, residual, number, sampled, trained in rows:
            if residual:
                tokens.update(residuals=number if state == "trained" else 0, residual=trained)
                continue
            groups[state] += number
            done = state in ("trained", "excluded")
            tokens.update(sampled=sampled, trained=trained, excluded=sampled - trained if done else 0, open=0 if done else sampled)
            unused.update({cause: number} if cause else {})
        return LedgerCounts(
            groups=groups,
            parts_pending=pending,
            tokens_sampled=tokens["sampled"],
            tokens_trained=tokens["trained"],
            tokens_excluded=tokens["excluded"],
            tokens_open=tokens["open"],
            residuals=tokens["residuals"],
            tokens_residual=tokens["residual"],
            unused=dict(unused.most_common()),
        )

    def change_mark(self) -> tuple[int, ...]:
        """Returns numbers of which at least one changes when another connection changes the store. The last number alone is enough, but it
        belongs to this reader; the others also differ between readers if groups or steps were added in between."""
        queries = (
            "SELECT max(idx) FROM groups",
            "SELECT count(*) FROM taken",
            "SELECT max(step) FROM taken WHERE checkpoint IS NOT NULL",
            "SELECT count(*) FROM late_parts WHERE closed_at IS NOT NULL",
            "PRAGMA data_version",
        )
        with self._reading() as db:
            return tuple(int(db.execute(query).fetchone()[0] or 0) for query in queries)

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """Returns the groups in the given order. Raises `StoreError` if a group is absent, damaged or too large to be shown."""
        return tuple(group for index in indices for group in super(StoreReader, self).groups((index,)))

    def _select(self, tail: str, *values: int) -> tuple[LedgerEntry, ...]:
        try:
            with self._reading() as db:
                return tuple(map(_entry, db.execute(f"{_ENTRIES} {tail}", values)))
        except ValueError as error:
            raise StoreError(f"a row of the ledger in {self.path} is damaged: {error}") from error

    def _decode(self, index: int, body: object) -> Group:
        if not isinstance(body, bytes) or body[:4] != _FRAME:  # the store decodes the other forms
            return super()._decode(index, body)
        try:
            return codec.from_json(Group, decompress(body, most=MAX_GROUP_BYTES))
        except ValueError as error:
            raise StoreError(f"group {index} in {self.path.name} cannot be shown: {str(error)[:300]}") from error
