"""Publishes a policy version: a Hugging Face folder that servers and `from_pretrained` load, with a probe to verify it.

`versions/000012/` contains model.safetensors and config.json, the tokenizer and chat template of version 0, `update.json` (metrics of
the update) and `probe.json` (an `agentrl.records.Probe`: the learner's logprobs of a few token rows). With LoRA,
adapter_model.safetensors and adapter_config.json replace the model, tokenizer and template files, and the base weights are in version 0.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from torch import Tensor

from agentrl.base.files import commit_folder, partial_folder, replace_file, sha256_file, write_atomically
from agentrl.learner import lora
from agentrl.learner.driver_reports import disk_errors_raised
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.remote_access import LearnerAccess
from agentrl.records import ADAPTER, WHOLE_MODEL, Group, PolicyVersion, codec
from agentrl.records.images import without_cut_image
from agentrl.version import deltas

log = logging.getLogger("agentrl.learner")
_LARGEST_DELTA = 0.5  # maximum size relative to the complete file; above it, the complete file is cheaper for the server
FULL_EVERY = 8  # one version in this many is complete, so a server that restarts applies fewer deltas than this
PROBE_ROWS = 4
_BASE_ROWS, _BASE_TOKENS = 2, 12  # rows and tokens per row in version 0's probe
_PROBE_TOKENS = 128  # tokens per row; a wrong tensor changes the logprob of any token
_IMAGE_PROBE_TOKENS = 4096  # an image has up to about 1,000 tokens
_NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.part")
_OWN_FILES = ("config.json", "generation_config.json", "version.json", "update.json", "probe.json")


def version_folder(run_dir: Path, number: int) -> Path:
    """Returns the folder of a version."""
    return run_dir / "versions" / f"{number:06d}"


def select_probe_rows(
    groups: tuple[Group, ...], *, vocabulary: int, max_model_len: int, image_token: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the ends of up to `PROBE_ROWS` contexts from different groups, or a fixed row if no context is usable.

    Only the ends are used, because contexts from the same family often start alike. A row is shorter than the model's context, because a
    server must sample one more token to return the row's logprobs. A row in which the policy sampled the `image_token` is excluded, because
    servers reject it.
    """
    longest = min(_PROBE_TOKENS if image_token is None else _IMAGE_PROBE_TOKENS, max_model_len - 1)
    rows: list[tuple[int, ...]] = []
    for group in groups:
        trajectories = (trajectory for scored in group.episodes for trajectory in scored.episode.trajectories)
        contexts = (tuple(t for turn in trajectory.turns for t in (*turn.prompt_ids, *turn.completion_ids)) for trajectory in trajectories)
        ends = (without_cut_image(context[-longest:]) for context in contexts)
        rows += islice((row for row in ends if len(row) > 1 and image_token not in row), 1)
    return tuple(rows[:PROBE_ROWS]) or (tuple(token % vocabulary for token in range(min(16, longest))),)


def write_base_probe(access: LearnerAccess, engine: PolicyEngine) -> None:
    """Writes the probe of version 0, whose weights the engine holds, unless the probe already exists. Must be called on all ranks. Raises
    `DiskFull` or `LearnerError` on a write error.

    Servers are checked against this probe before anything is sampled. The probe's rows are greedy continuations, because in bfloat16, the
    logprobs of unlikely tokens differ more between implementations than those of likely tokens. The rows start with tokens from the middle
    of the vocabulary, because control tokens, which are at its ends, may amplify rounding errors (SmolLM2 in float32 differs from float64
    by 2.4e-4 nats after token 0 and by 1.5e-5 nats after ordinary tokens).
    """
    path, ranks = version_folder(access.folder, 0) / "probe.json", engine.ranks
    if ranks.from_first(int(path.exists())):
        return
    vocabulary = engine.lm.config.get_text_config().vocab_size
    rows: list[tuple[int, ...]] = [(vocabulary * number // (_BASE_ROWS + 1),) for number in range(1, _BASE_ROWS + 1)]
    for _ in range(_BASE_TOKENS - 1):
        likeliest = [next(token for token in ids if token != engine.image_token) for ids in engine.probe(tuple(rows)).next_ids]
        rows = [(*row, ranks.from_first(token)) for row, token in zip(rows, likeliest, strict=True)]
    probe = engine.probe(tuple(rows))
    if ranks.is_first:
        with disk_errors_raised(f"the probe of version 0 in {access.folder}"):
            write_atomically(path, codec.to_json(probe), durable=True)
        access.base_probe_written()


def publish_version(
    access: LearnerAccess,
    engine: PolicyEngine,
    *,
    number: int,
    parent: int,
    metrics: Mapping[str, float],
    rows: tuple[tuple[int, ...], ...],
    keep: int,
    as_delta: bool = False,
) -> None:
    """Exports the engine's weights as version `number`, registers it, and deletes old versions' weights (`VersionRegistry.prune`). Must be
    called on all ranks.

    The same engine state produces the same bytes. If `as_delta` is True, the version is written as a delta from its parent if the parent's
    weights are available and the delta is at most half the size of the complete weights, but every `FULL_EVERY`th version is written in
    full. Raises `DiskFull` or `LearnerError` on a write error, and `StoreError` if the number is already registered with different weights.
    """
    weights = gather_weights(engine)
    probe = engine.probe(rows)
    if engine.ranks.is_first:
        final, adapter = version_folder(access.folder, number), engine.recipe.learner.lora
        with disk_errors_raised(f"version {number} in {access.folder}"):
            part, file = partial_folder(final), WHOLE_MODEL if adapter is None else ADAPTER
            if adapter is None:
                engine.lm.save_pretrained(part, state_dict=weights, max_shard_size="1TB")
                ignored = shutil.ignore_patterns(*_NOT_COPIED, *_OWN_FILES, ".*")  # copies the tokenizer and chat template
                shutil.copytree(version_folder(access.folder, 0), part, ignore=ignored, dirs_exist_ok=True)
            else:
                lora.save(part, weights, adapter, base=engine.recipe.policy.model)
            (part / "update.json").write_text(json.dumps(dict(metrics), indent=1, allow_nan=False))
            (part / "probe.json").write_bytes(codec.to_json(probe))
            folder = str(final.relative_to(access.folder))
            version = PolicyVersion(number=number, parent=parent, folder=folder, sha256=sha256_file(part / file), weights=file)
            if as_delta:
                _shrink(part, version, access.registry.get(parent), whole=number % FULL_EVERY == 0)
            commit_folder(part, final)
        access.version_written(final)
        access.registry.add(version)
        access.registry.prune(keep)
    engine.ranks.barrier()


def gather_weights(engine: PolicyEngine) -> dict[str, Tensor]:
    """Returns a mapping from the name of every trained parameter to its full CPU tensor on rank 0, and an empty dict on other ranks.

    A collective."""
    weights: dict[str, Tensor] = {}
    for name, parameter, _ in engine.parameters():
        with engine.gathered(parameter) as full:
            if engine.ranks.is_first:
                weights[name] = full.cpu().clone()
    return weights


def _shrink(part: Path, version: PolicyVersion, parent: PolicyVersion | None, *, whole: bool) -> None:
    """Replaces the weights with a delta if the delta is at most half the size of the weights, and keeps a copy of the weights for the next
    version's delta.

    An existing copy may belong to a different version, or be incomplete after a power failure, so a delta is used only if its base has the
    parent's checksum.
    """
    newest = part.with_name(deltas.NEWEST_WEIGHTS)
    if not whole and parent is not None and newest.exists():
        delta = deltas.write_delta(newest, part / WHOLE_MODEL, part, number=parent.number)
        if delta is not None:
            size = (part / deltas.DELTA_FILE).stat().st_size
            log.info("version %d: the size of the delta is %.1f %% of the full weights", version.number, 100 * size / delta.size)
            if delta.parent_sha256 == parent.sha256 and size <= _LARGEST_DELTA * delta.size:
                (part / WHOLE_MODEL).replace(newest)
                return
            (part / deltas.DELTA_FILE).unlink()
            (part / deltas.DELTA_RECORD).unlink()
    with replace_file(newest) as copy:
        copy.unlink(missing_ok=True)
        try:
            os.link(part / WHOLE_MODEL, copy)
        except OSError:  # a file system without hard links
            shutil.copyfile(part / WHOLE_MODEL, copy)
