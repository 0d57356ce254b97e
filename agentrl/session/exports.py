"""Exports the episodes of a run: `.eval` logs for inspect_ai, Parquet, JSON lines, or ATIF documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from agentrl.errors import UserError
from agentrl.experience.audit import Progress
from agentrl.experience.episode_files import ExportedEpisode, write_lines, write_parquet
from agentrl.experience.episode_index import EpisodeIndex, EpisodeRecord
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.failure.formats import atif
from agentrl.failure.formats import write as write_traces
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.records import Message, SandboxSpec, Split, Task
from agentrl.session.inspect_log import safe_name, write_log

Format = Literal["eval", "parquet", "atif", "jsonl"]
FOLDER = "exports"
"""Name of the default folder for exports in a run folder."""
_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    folder: Path
    files: int
    episodes: int
    is_complete: bool = True  # False if episodes of older steps were deleted from the store


def export_episodes(
    run_dir: Path, to: Format, out: Path | None = None, *, query: EpisodeQuery, progress: Progress = lambda done, total: None
) -> Exported:
    """Writes the matching episodes of a run to a folder, by default `exports/FORMAT` in the run folder. Replaces files with the same
    names.

    Raises `UserError` if no episode matches, the run has no index, or the default folder is outside the run folder, and `StoreError` if an
    episode is damaged.
    """
    folder = out or _default_folder(run_dir, to)
    with EpisodeIndex(run_dir, timeout_s=300.0) as index:
        numbers = index.numbers(query)
        if not numbers:
            deleted = index.has_deleted()
            why = "; those of older steps were deleted, because of store.options.keep_steps" if deleted else ""
            raise UserError(f"no episode of {run_dir} matches the filters{why}", fix="remove filters")
        is_complete = not index.has_deleted()
        folder.mkdir(parents=True, exist_ok=True)
        records = _counted(index.records(numbers), len(numbers), progress)
        if to == "eval":
            files = _write_logs(index, numbers, folder, run_dir.name, progress)
        elif to == "atif":
            files = write_traces(map(_trace, records), folder, atif.NAME)
        else:
            write: Callable[[Iterable[ExportedEpisode], Path], int] = write_parquet if to == "parquet" else write_lines
            write(map(ExportedEpisode.of, records), folder / f"episodes.{to}")
            files = 1
    return Exported(folder=folder, files=files, episodes=len(numbers), is_complete=is_complete)


def _default_folder(run_dir: Path, to: str) -> Path:
    """Returns the default folder for exports in a run folder.

    Raises `UserError` if a link leads outside the run folder, which may come from a third party.
    """
    folder = run_dir / FOLDER / to
    if not folder.resolve().is_relative_to(run_dir.resolve()):
        raise UserError(f"{run_dir / FOLDER} is a link to a folder outside the run folder", fix="choose a folder with --out")
    return folder


def _counted(records: Iterable[EpisodeRecord], total: int, progress: Progress) -> Iterator[EpisodeRecord]:
    for done, record in enumerate(records):
        progress(done, total)
        yield record


def _write_logs(index: EpisodeIndex, numbers: list[int], folder: Path, run: str, progress: Progress) -> int:
    """Writes a log for each training step and each evaluation. Returns the number of logs."""
    parts: list[tuple[str, int]] = []
    for start in range(0, len(numbers), _ROWS):
        parts += [(_part(row.phase, row.step), row.number) for row in index.rows(numbers[start : start + _ROWS])]
    parts.sort()
    written = files = 0
    for part, members in groupby(parts, key=lambda one: one[0]):
        records = index.records([number for _, number in members])
        written += write_log(records, folder / f"{part}.eval", run=run, part=part)
        files += 1
        progress(written, len(parts))
    return files


def _part(phase: str, step: int | None) -> str:
    """Returns the name of a log. In a run from a third party, the phase may be any string."""
    if phase != "train":
        return f"evaluation-{safe_name(phase)}"
    return "train-open" if step is None else f"train-{step:06d}"


def _trace(record: EpisodeRecord) -> Trace:
    row, group = record.row, record.group
    split = Split(row.split) if row.split in list(Split) else Split.TRAIN
    return Trace(
        id=row.id if row.phase == "train" else f"{row.phase}-{row.id}",
        why=CaptureReason.EXPORTED,
        task=Task(
            id=group.task_id,
            family=group.kind or "unknown",
            prompt=group.prompt or (Message(role="user", content=""),),
            tools=(),
            sandbox=SandboxSpec(image="unknown"),
            verifiers=(),
            data={},
            split=split,
        ),
        episode=record.scored.episode,
        score=record.scored.score,
        phase=row.phase,
        step=row.step or 0,
    )
