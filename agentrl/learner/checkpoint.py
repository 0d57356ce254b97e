"""Checkpoints of the learner: `checkpoints/000012/` contains the state that update 13 needs.

    state/         DeepSpeed's files, one set per rank: trained weights, float32 masters, optimizer moments
    critic/        the same for the critic, if there is one
    rng_00.pt      random state of rank 0, and so on
    meta.json      `CheckpointMeta`
    manifest.json  sha256 of every other file; written last

`consumed.jsonl` next to the checkpoint folders records how each step used its groups. The newest checkpoint is the one with the highest
number whose files match their manifest.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentrl.base.files import MANIFEST, commit_folder, folder_manifest, has_intact_files, numbered_folders, partial_folder
from agentrl.errors import LearnerError
from agentrl.experience.step_uses import NO_STEPS
from agentrl.learner.critic import Critic
from agentrl.learner.driver_reports import disk_errors_raised
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.ranks import Ranks
from agentrl.learner.universal_checkpoint import layout, layout_of, load_converted, read, tensors_only
from agentrl.learner.update_guard import FailureCounts
from agentrl.records import codec
from agentrl.records.fields import Record

log = logging.getLogger(__name__)

_META, _STATE, _CRITIC = "meta.json", "state", "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta(Record):
    """The contents of a checkpoint except its tensors."""

    step: int  # number of completed updates, and so the index of the next update
    ranks: int
    zero_stage: int
    parent: int  # version that these weights were trained from: the previous one, except after a rollback
    consumed_sha256: str = NO_STEPS  # hash of what all steps consumed (`agentrl.experience.step_uses`)
    counts: FailureCounts = field(default_factory=FailureCounts)
    good: int = 0  # newest checkpoint whose weights passed every update check: the target of a rollback
    rolled_back: tuple[int, ...] = ()  # versions that must never be served again
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the latest update; used when its version is published again
    probe_rows: tuple[tuple[int, ...], ...] = ()  # token rows of that version's probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An intact checkpoint on disk."""

    folder: Path
    meta: CheckpointMeta


def save(
    root: Path,
    engine: PolicyEngine,
    meta: CheckpointMeta,
    *,
    keep: int,
    critic: Critic | None = None,
    spare: Callable[[], Collection[int]] = tuple,
    written: Callable[[Path], None] = lambda folder: None,
    spread: bool = False,
) -> Path:
    """Writes `root/000012` durably, then deletes all checkpoints except the newest `keep` and those that `spare` returns. Returns the
    folder.

    Must be called on all ranks. If the disk has no room for the checkpoint, all earlier ones except the newest may be deleted first. Rank 0
    calls `written` with the complete folder, and calls `spare` immediately before each deletion, because a user may pin a version
    meanwhile. If `spread` is True, the ranks' hosts share no disk: the folder on each host contains the files of that host's ranks, and
    every rank calls `written`.

    Raises `DiskFull` or `LearnerError` on a write error. The newest earlier checkpoint is kept in any case.
    """
    ranks = engine.ranks
    final = root / f"{meta.step:06d}"
    part = final.with_name(f".{final.name}.part")
    with disk_errors_raised(f"checkpoint {final}"):
        if ranks.is_first or (spread and ranks.is_first_on_host):
            _make_room(root, spare)
            partial_folder(final)
            for tag in (_STATE, _CRITIC)[: 1 if critic is None else 2] if spread else ():
                (part / tag).mkdir()  # DeepSpeed creates them on the first host
        ranks.barrier()
        engine.deepspeed.save_checkpoint(str(part), tag=_STATE, save_latest=False, exclude_frozen_parameters=True)
        if critic is not None:
            critic.deepspeed.save_checkpoint(str(part), tag=_CRITIC, save_latest=False)
        torch.save(_random_state(ranks), part / _rng_name(ranks.rank))
        ranks.barrier()
        if ranks.is_first:
            (part / _META).write_bytes(codec.to_json(meta))
        manifest = _manifest(part, ranks) if spread else folder_manifest(part) if ranks.is_first else {}
        if ranks.is_first:
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if ranks.is_first or (spread and ranks.is_first_on_host):
            commit_folder(part, final)
        if ranks.is_first or spread:
            written(final)
        if ranks.is_first or (spread and ranks.is_first_on_host):
            _prune(root, keep, spare())
        ranks.barrier()
    return final


def _manifest(part: Path, ranks: Ranks) -> dict[str, str]:
    """Returns the manifest of a checkpoint whose files are on several hosts. If several hosts have the same file, the first host's hash is
    used."""
    own = folder_manifest(part) if ranks.is_first_on_host else {}
    whole: dict[str, str] = {}
    for data in reversed(ranks.gather_bytes(json.dumps(own).encode())):
        whole |= json.loads(data)
    return dict(sorted(whole.items()))


def newest(root: Path, *, alert: Callable[[str], None] = log.warning) -> Checkpoint | None:
    """Returns the newest intact checkpoint below `root`, or None if there is no checkpoint. Calls `alert` for each newer checkpoint that is
    damaged.

    Raises `LearnerError` if every checkpoint is damaged, because only the user can decide to restart from the base policy.
    """
    folders = numbered_folders(root)
    for folder in reversed(folders):
        if (checkpoint := _read(folder)) is not None:
            return checkpoint
        alert(f"checkpoint {folder} is damaged, so the previous checkpoint is used\n  fix: check the disk")
    if folders:
        raise LearnerError(f"every checkpoint in {root} is damaged; move that folder away to restart from version 0")
    return None


def numbered(root: Path, number: int) -> Checkpoint | None:
    """Returns the checkpoint after `number` updates, or None if it is missing or damaged."""
    return _read(root / f"{number:06d}")


def restore(checkpoint: Checkpoint, engine: PolicyEngine, *, critic: Critic | None = None) -> None:
    """Loads the weights, the optimizer state and the random state. Must be called on all ranks.

    If the number of ranks and the ZeRO stage are the same as when the checkpoint was written, the next update is bitwise identical to that
    of an uninterrupted run. Otherwise, the update is equal up to rounding. The random state is loaded only if the number of ranks is the
    same.

    Raises `LearnerError` if the checkpoint does not fit the recipe's model and critic, or if it contains anything other than tensors and
    plain values.
    """
    ranks, folder = engine.ranks, checkpoint.folder
    same_ranks = ranks.size == checkpoint.meta.ranks
    engines = [(engine.deepspeed, _STATE)] + ([(critic.deepspeed, _CRITIC)] if critic is not None else [])
    with tensors_only(f"checkpoint {folder}"):
        for deepspeed, tag in engines:
            _load(deepspeed, folder, tag, ranks, same_ranks=same_ranks)
        if same_ranks:
            _set_random_state(read(folder / _rng_name(ranks.rank)), ranks)


def _load(deepspeed: Any, folder: Path, tag: str, ranks: Ranks, *, same_ranks: bool) -> None:
    if not (folder / tag).is_dir():
        raise LearnerError(f"checkpoint {folder} contains no {tag}; resume with the critic settings that wrote it")
    saved = layout_of(folder / tag)
    if saved != layout(deepspeed.zero_optimization_stage()) or not (same_ranks or saved == "whole"):  # whole: not sharded
        load_converted(deepspeed, folder, tag, ranks)
        return
    loaded, _ = deepspeed.load_checkpoint(str(folder), tag=tag)
    if loaded is None:
        raise LearnerError(f"DeepSpeed loaded nothing from {folder / tag}")


def _read(folder: Path) -> Checkpoint | None:
    if not has_intact_files(folder):
        return None
    return Checkpoint(folder=folder, meta=codec.from_json(CheckpointMeta, (folder / _META).read_bytes()))


def _prune(root: Path, keep: int, spare: Collection[int]) -> None:
    for folder in numbered_folders(root)[:-keep]:
        if int(folder.name) not in spare:
            shutil.rmtree(folder)


def _make_room(root: Path, spare: Callable[[], Collection[int]]) -> None:
    """If the disk has no space for another checkpoint of the same size, deletes all checkpoints except the newest and those that `spare`
    returns."""
    folders = numbered_folders(root)
    if len(folders) < 2:
        return
    size = sum(path.stat().st_size for path in folders[-1].rglob("*") if path.is_file())
    if shutil.disk_usage(root).free < size and has_intact_files(folders[-1]):
        log.warning("%s: the disk is nearly full; older checkpoints are deleted before the next one is written", root)
        _prune(root, 1, spare())


def _rng_name(rank: int) -> str:
    return f"rng_{rank:02d}.pt"


def _random_state(ranks: Ranks) -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if ranks.device.type == "cuda" else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any], ranks: Ranks) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
