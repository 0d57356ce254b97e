"""The values that a learner step computed for each trained token. `updates/000014.0.tokens` in the run folder contains the values of step
14 on rank 0.

The store contains the sampled data. Ratios, clipping and entropies depend on the learner's weights and exist only during the step. Records
are for inspection and are never part of the run's state. If their total size exceeds `MAX_TOTAL_BYTES`, the oldest files are removed. A
step is trained even if its record cannot be written.

A file is one zstd frame. It contains the length of a JSON header (uint32, little-endian), the header, and the values of the N tokens: three
float32 columns (logprobs, entropies and importance weights), followed by one byte per token, which is 1 if the token was clipped. The
tokens of a sample are adjacent and in order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.database import compress, decompress
from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.records.sampling import packed, unpacked

FOLDER = "updates"
MAX_TOTAL_BYTES = 256 << 20
"""Maximum total bytes of the records of a run."""
MAX_FILE = 32 << 20
"""Maximum bytes of one file."""
_MAX_CONTENT = 64 << 20
_MAX_RANKS = 512
_LAST_STEP = 10**9
_COLUMNS = 3  # number of float32 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """The N trained tokens of one sample, with the values that the loss of its step used. Logarithms are natural."""

    group: int
    episode_id: str
    part: int  # index of the sample among the episode's samples in the step
    logprobs: Sequence[float]  # [N] under the learner's weights before the optimizer step
    entropies: Sequence[float]  # [N] nats
    weights: Sequence[float]  # [N] importance weights from the off-policy correction
    clipped: Sequence[bool]  # [N] whether the surrogate's bound removed the gradient


def write_records(run_dir: Path, step: int, rank: int, records: Sequence[TokenRecord]) -> None:
    """Writes the records of a rank, and removes the oldest files if the total exceeds `MAX_TOTAL_BYTES`. Raises the errors of `save_file`.

    Args:
        step: number of the version that the step produces, counted from 1.
    """
    header = json.dumps(
        [[record.group, record.episode_id, record.part, len(record.logprobs)] for record in records], separators=(",", ":")
    ).encode()
    columns = b"".join(
        packed("f", (value for record in records for value in getattr(record, name))) for name in ("logprobs", "entropies", "weights")
    )
    flags = bytes(bool(value) for record in records for value in record.clipped)
    save_file(run_dir, step, rank, compress(struct.pack("<I", len(header)) + header + columns + flags))


def load_file(run_dir: Path, step: int, rank: int) -> bytes:
    """Returns the content of a rank's file. Raises `OSError` if it cannot be read, and `ValueError` if it is larger than `MAX_FILE`
    bytes."""
    return read_bytes(_path(run_dir, step, rank), most=MAX_FILE, inside=run_dir)


def save_file(run_dir: Path, step: int, rank: int, content: bytes) -> None:
    """Writes the file of a rank, and removes the oldest files if the total exceeds `MAX_TOTAL_BYTES`.

    Raises `OSError` if the file cannot be written, and `ValueError` if the step or the rank is out of range.
    """
    if not 0 < step < _LAST_STEP or not 0 <= rank < _MAX_RANKS:
        raise ValueError(f"rank {rank} or step {step} is out of range")
    path = _path(run_dir, step, rank)
    folder = path.parent
    folder.mkdir(exist_ok=True)
    write_atomically(path, content)
    sizes = [(path, path.stat().st_size) for path in sorted(folder.glob("*.tokens"), key=_sort_key)]
    total = sum(size for _, size in sizes)
    for path, size in sizes[:-1]:
        if total <= MAX_TOTAL_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def read_records(run_dir: Path, step: int, group: int) -> list[TokenRecord]:
    """Returns the records of one group in a step; empty if there are none. Steps are counted from 1.

    Raises `OSError` if a file cannot be read, and `ValueError` if a file is damaged.
    """
    records: list[TokenRecord] = []
    for rank in range(_MAX_RANKS):
        try:
            data = decompress(load_file(run_dir, step, rank), most=_MAX_CONTENT)
        except FileNotFoundError:
            break
        records += _records(data, group)
    return records


def _path(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / FOLDER / f"{step:06d}.{rank}.tokens"


def _sort_key(path: Path) -> tuple[int, str]:
    """Returns a key that sorts files by step. From step 1,000,000 on, names are longer, so sorting by name would be wrong."""
    return path.name.index("."), path.name


def _records(data: bytes, group: int) -> list[TokenRecord]:
    try:
        (length,) = struct.unpack_from("<I", data)
        header = json.loads(data[4 : 4 + length])
        sizes = [int(size) for *_, size in header]
        total = sum(sizes)
        if min(sizes, default=0) < 0 or len(data) != 4 + length + total * (4 * _COLUMNS + 1):
            raise ValueError("its length does not match its header")
        records, start, base = [], 0, 4 + length
        for index, episode_id, part, size in header:
            if index == group:
                starts = [base + 4 * (number * total + start) for number in range(_COLUMNS)]
                columns = [unpacked("f", data[column : column + 4 * size]) for column in starts]
                flags = data[base + 4 * _COLUMNS * total + start :][:size]
                records.append(
                    TokenRecord(
                        group=index,
                        episode_id=str(episode_id),
                        part=int(part),
                        logprobs=columns[0],
                        entropies=columns[1],
                        weights=columns[2],
                        clipped=[flag == 1 for flag in flags],
                    )
                )
            start += size
        return records
    except (struct.error, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not a record of trained tokens: {error}") from None
