"""Files of exported episodes (Parquet or JSON Lines) with one row per episode (`COLUMNS`), and the function that loads them.

datasets.load_dataset("parquet", data_files="episodes.parquet")     # for analysis
for exported in load_export(Path("episodes.parquet")): ...          # the same records as in the store
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.base.files import replace_file
from agentrl.base.installation import import_optional
from agentrl.base.untrusted_files import check_file, open_file
from agentrl.errors import StoreError, UserError
from agentrl.experience.episode_index import EpisodeRecord, EpisodeRow
from agentrl.records import Message, ScoredEpisode, codec

COLUMNS = {
    "number": "int64",  # ascending in the order in which episodes were stored
    "id": "string",
    "group": "int64",  # null for an episode of an evaluation
    "attempt": "int64",  # index in its group
    "step": "int64",  # learner step of its group or of the evaluated version, counted from 1; null if there is none yet
    "state": "string",  # state of its group: parked, ready, assigned, trained, excluded; or "evaluated"
    "unused": "string",  # why its group was not trained
    "phase": "string",  # train, before, step8, after, gate000008
    "task_id": "string",
    "kind": "string",  # kind of task
    "split": "string",
    "outcome": "string",  # solved, partial, failed, pending or excluded
    "stop_reason": "string",
    "score": "double",  # null if it has no score
    "parts": "string",  # parts of the score: JSON object
    "exclusion": "string",  # kind of the failure that excludes it
    "blame": "string",
    "oldest_version": "int64",
    "newest_version": "int64",
    "tokens": "int64",  # sampled tokens
    "turns": "int64",
    "tools": "string",  # tool names in the order of their first calls: JSON list
    "seconds": "double",
    "sampled_at": "double",  # Unix time at which its last turn ended
    "task_key": "string",
    "prompt": "string",  # the task's prompt: JSON list of messages
    "episode": "string",  # JSON of `ScoredEpisode`: trajectories, turns, token ids, logprobs, version spans, results, score
}
"""Column -> Arrow type. The columns up to `sampled_at` are the fields of `EpisodeRow`."""
_JSON = ("parts", "tools", "prompt", "episode")
_BATCH_CHARS = 32 << 20  # characters of encoded episodes after which a batch is written
_MAX_LINE = 1 << 30
_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedEpisode:
    """A row in a file of exported episodes."""

    row: EpisodeRow
    task_key: str
    prompt: tuple[Message, ...]  # prompt of the task
    scored: ScoredEpisode

    @classmethod
    def of(cls, record: EpisodeRecord) -> ExportedEpisode:
        """Returns the row for a stored episode."""
        return cls(row=record.row, task_key=record.group.task_key, prompt=record.group.prompt, scored=record.scored)

    def as_columns(self) -> dict[str, Any]:
        """Returns the values of the row by column, with JSON encoded as strings."""
        columns = {field.name: getattr(self.row, field.name) for field in fields(self.row)}
        columns |= {"parts": json.dumps(dict(self.row.parts)), "tools": json.dumps(self.row.tools), "task_key": self.task_key}
        return columns | {"prompt": codec.to_json(self.prompt).decode(), "episode": codec.to_json(self.scored).decode()}

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> ExportedEpisode:
        """Returns the row that the columns contain. Raises `ValueError` if a column is missing or has the wrong form."""
        if missing := sorted(COLUMNS.keys() - columns.keys()):
            raise ValueError(f"it has no column {', '.join(missing)}")
        texts = {name: columns[name] for name in _JSON}
        if not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"{', '.join(_JSON)} must contain JSON text")
        values = {field.name: columns[field.name] for field in fields(EpisodeRow)}
        row = codec.from_json(EpisodeRow, codec.to_json(values | {name: json.loads(texts[name]) for name in ("parts", "tools")}))
        scored, prompt = codec.from_json(ScoredEpisode, texts["episode"]), codec.from_json(tuple[Message, ...], texts["prompt"])
        return cls(row=row, task_key=str(columns["task_key"]), prompt=prompt, scored=scored)


def write_parquet(episodes: Iterable[ExportedEpisode], path: Path) -> int:
    """Writes a Parquet file and returns the number of rows. Replaces an existing file only when the new file is complete. Raises
    `UserError` if pyarrow is not installed."""
    import_optional("pyarrow", "cpu", needed_for="export --to parquet")
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    written = 0
    with replace_file(path) as part, parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        for batch in _batches(episodes):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            written += len(batch)
    return written


def write_lines(episodes: Iterable[ExportedEpisode], path: Path) -> int:
    """Writes a JSON Lines file and returns the number of lines.

    Columns that contain JSON are written as nested values. Replaces an existing file only when the new file is complete.
    """
    written = 0
    with replace_file(path) as part, part.open("w", encoding="utf-8") as file:
        for episode in episodes:
            columns = episode.as_columns()
            plain = json.dumps({name: columns[name] for name in COLUMNS if name not in _JSON})
            nested = "".join(f', "{name}": {columns[name]}' for name in _JSON)  # unchanged: parsing and encoding them would lose Infinity
            file.write(f"{plain[:-1]}{nested}}}\n")
            written += 1
    return written


def load_export(path: Path) -> Iterator[ExportedEpisode]:
    """Yields the episodes in an exported file (`.parquet` or `.jsonl`).

    Raises `UserError` if the file has a different suffix or needs pyarrow, which is not installed, `OSError` if it cannot be read, and
    `StoreError` if it is damaged or a row was not written by an export.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"{path} is not an exported file", fix="give a .parquet or .jsonl file from `agentrl export`")
    number = 0
    try:
        for columns in _parquet_rows(path) if path.suffix == ".parquet" else _line_rows(path):
            number += 1
            yield ExportedEpisode.from_columns(columns)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"row {number} of {path} is not an exported episode: {str(error)[:500]}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import_optional("pyarrow", "cpu", needed_for="reading a Parquet file")
    from pyarrow import parquet

    check_file(path, inside=path.parent)
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from batch.to_pylist()


def _line_rows(path: Path) -> Iterator[dict[str, Any]]:
    with open_file(path) as file:
        while line := file.readline(_MAX_LINE):
            columns = json.loads(line)
            if not isinstance(columns, dict):
                raise ValueError("it is not a JSON object")
            yield columns | {name: json.dumps(columns[name]) for name in _JSON if name in columns}


def _batches(episodes: Iterable[ExportedEpisode]) -> Iterator[list[dict[str, Any]]]:
    batch, size = list[dict[str, Any]](), 0
    for episode in episodes:
        batch.append(episode.as_columns())
        size += len(batch[-1]["episode"])
        if size > _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
