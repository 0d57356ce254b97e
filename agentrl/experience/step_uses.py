"""Records how each completed learner step used its groups: `checkpoints/consumed.jsonl` contains one line per step, and each checkpoint
contains a hash of the lines.

A checkpoint therefore has the same size after any number of steps. The learner appends the line for a step before it writes the checkpoint.
When it resumes, it drops the lines after its newest checkpoint. The hash in a checkpoint chains the lines of all steps up to the
checkpoint, so it does not match the file of a different run or state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.base.files import append_lines, write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.records import GroupUse, LedgerEntry, codec

StepUses = Mapping[int, GroupUse]
"""Group index -> how a step used the group."""

CONSUMED_FILE = "consumed.jsonl"
NO_STEPS = hashlib.sha256().hexdigest()
"""The hash of an empty sequence of steps."""
_MAX_BYTES = 8 << 30  # maximum bytes of the file: more than 10^8 groups


def extend_hash(before: str, uses: StepUses) -> str:
    """Returns the hash of a sequence of steps that ends with the next step; `before` is the hash of the sequence without this step."""
    return hashlib.sha256(before.encode() + _line(uses)).hexdigest()


def hash_steps(steps: Iterable[StepUses]) -> str:
    """Returns the hash of a sequence of steps, which starts with the first step."""
    last = NO_STEPS
    for uses in steps:
        last = extend_hash(last, uses)
    return last


def append_step(checkpoints: Path, uses: StepUses) -> None:
    """Durably appends a line with the uses of the next step. Raises `OSError` if the file cannot be written."""
    append_lines(checkpoints / CONSUMED_FILE, [_line(uses)], durable=True)


def rewrite_steps(checkpoints: Path, steps: Iterable[StepUses]) -> None:
    """Durably replaces the file with one that contains the given steps. Raises `OSError` if the file cannot be written."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_atomically(checkpoints / CONSUMED_FILE, b"".join(map(_line, steps)), durable=True)


def read_steps(checkpoints: Path, count: int) -> list[StepUses]:
    """Returns the uses of the first `count` steps, or of all steps in the file if it contains fewer.

    Raises `StoreError` if the file cannot be read.
    """
    path = checkpoints / CONSUMED_FILE
    try:
        lines = read_bytes(path, most=_MAX_BYTES, inside=checkpoints).split(b"\n")[:-1]
        return [_uses(line) for line in lines[:count]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {str(error)[:200]}") from error


def recorded_steps(checkpoints: Path, count: int, sha256: str, entries: Iterable[LedgerEntry]) -> list[StepUses]:
    """Returns the uses of the first `count` steps from the file or, if it does not match a checkpoint's hash, from the ledger's entries.

    Raises `StoreError` if neither matches the hash.
    """
    try:
        steps = read_steps(checkpoints, count)
    except StoreError:
        steps = []
    if len(steps) == count and hash_steps(steps) == sha256:
        return steps
    steps = ledger_steps(entries, count)
    if hash_steps(steps) != sha256:
        path = checkpoints / CONSUMED_FILE
        raise StoreError(f"{path} and the ledger both differ from the steps of checkpoint {count}\n  fix: restore {path} from a backup")
    return steps


def ledger_steps(entries: Iterable[LedgerEntry], count: int) -> list[StepUses]:
    """Returns the uses of the first `count` steps according to the ledger."""
    steps: list[dict[int, GroupUse]] = [{} for _ in range(count)]
    for entry in entries:
        if entry.use is not None and entry.step is not None and entry.step < count:
            steps[entry.step][entry.index] = entry.use
    return list(steps)


def _line(uses: StepUses) -> bytes:
    return (
        json.dumps({str(index): codec.to_data(uses[index]) for index in sorted(uses)}, ensure_ascii=False, sort_keys=True).encode() + b"\n"
    )


def _uses(line: bytes) -> StepUses:
    return {int(index): codec.from_json(GroupUse, json.dumps(use)) for index, use in json.loads(line).items()}
