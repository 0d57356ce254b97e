"""Reads the records in a run folder about its policy versions (evaluations, staleness and size) and compares two versions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.recipe import EvalConfig, load
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.comparison import Comparison, Scores, compare
from agentrl.gate.verdict import GateVerdict, evaluation_folder, read_verdicts
from agentrl.observe import Rate
from agentrl.observe.rundata import is_finite, read_lines, read_object
from agentrl.records import PolicyVersion
from agentrl.session.measure import evaluation_key
from agentrl.version import FolderRegistry

_TRANSCRIPT: Mapping[str, type] = {"task_id": str, "split": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A policy version with all records about it in the run folder."""

    version: PolicyVersion
    pinned: bool
    weights_bytes: int  # size of the version's folder, excluding its record; 0 if the weights were deleted
    checkpoint_bytes: int | None  # size of the learner's checkpoint, to which the run can return; None if it was deleted
    verdict: GateVerdict | None  # verdict of the gate on exactly these weights
    held_out: Mapping[str, Rate] = field(default_factory=dict)  # split -> rate from the newest evaluation of these weights
    phase: str = ""  # phase of that evaluation: before, step12 or after
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the learner step that produced the version

    @property
    def number(self) -> int:
        """The version's number, which is also the number of the learner step that produced it."""
        return self.version.number


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDifference:
    """A comparison of two versions on the same cases. `comparison` lists the cases whose mean score fell (`lost`) or rose (`gained`)."""

    what: str  # the suite, or the held-out tasks
    comparison: Comparison
    changed: Sequence[str] = ()  # cases whose content differs, which are excluded


def open_registry(run_dir: Path) -> FolderRegistry:
    """Returns the registry of a run. Raises `UserError` if the folder has no versions."""
    if not (run_dir / "versions").is_dir():
        raise UserError(f"{run_dir} has no versions", fix="give the folder of a run, such as runs/quickstart")
    return FolderRegistry(run_dir / "versions")


def read_versions(run_dir: Path) -> tuple[VersionRecord, ...]:
    """Returns all registered versions of a run, the oldest first. Can be called during the run.

    Raises `UserError` if the folder has no versions, and `StoreError` if the record of a version or a verdict is damaged. Any other record
    that cannot be read counts as missing.
    """
    registry = open_registry(run_dir)
    versions, pinned = registry.versions(), registry.pinned()
    verdicts = {(verdict.version, verdict.sha256): verdict for verdict in read_verdicts(run_dir)}
    lines = read_lines(run_dir / "metrics.jsonl", {"step": int}, [])
    metrics = {line["step"]: {key: value for key, value in line.items() if is_finite(value)} for line in lines if "episodes" in line}
    evaluations = _held_out_evaluations(run_dir, {version.sha256 for version in versions})
    records = []
    for version in versions:
        phase, rates = evaluations.get(version.sha256, ("", {}))
        checkpoint = checkpoint_folder(run_dir, version.number)
        records.append(
            VersionRecord(
                version=version,
                pinned=version.number in pinned,
                weights_bytes=folder_bytes(registry.path(version), without="version.json"),
                checkpoint_bytes=folder_bytes(checkpoint) if checkpoint.is_dir() else None,
                verdict=verdicts.get((version.number, version.sha256)),
                held_out=rates,
                phase=phase,
                metrics=metrics.get(version.number, {}),
            )
        )
    return tuple(records)


def checkpoint_folder(run_dir: Path, number: int) -> Path:
    """Returns the folder of the learner's checkpoint that contains the weights of a version."""
    return run_dir / "checkpoints" / f"{number:06d}"


def folder_bytes(folder: Path, *, without: str = "") -> int:
    """Returns the total size of all files in a folder, except files with the name `without`, in bytes. Links count as 0, and so do files
    that are deleted in the meantime."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with suppress(OSError):
                total += 0 if name == without or os.path.islink(path) else os.lstat(path).st_size
    return total


def _held_out_evaluations(run_dir: Path, hashes: Iterable[str]) -> dict[str, tuple[str, dict[str, Rate]]]:
    """Returns the phase and the rates of the newest held-out evaluation of each version's weights, by hash of the weights. Versions with
    equal weights share an evaluation."""
    config = _evaluation_config(run_dir)
    if config is None:
        return {}
    keys = {evaluation_key(config, sha256): sha256 for sha256 in hashes}
    evaluations: dict[str, tuple[str, dict[str, Rate]]] = {}
    for phase, splits in read_object(run_dir / "evaluations.json", []).items():
        for split, result in splits.items() if isinstance(splits, dict) else ():
            sha256 = keys.get(str(result.get("of"))) if isinstance(result, dict) else None
            if sha256 is not None and (rate := _rate(result)) is not None:
                rates = evaluations[sha256][1] if evaluations.get(sha256, ("",))[0] == phase else {}
                evaluations[sha256] = phase, rates | {split: rate}
    return evaluations


def _evaluation_config(run_dir: Path) -> EvalConfig | None:
    try:
        return load(run_dir / "recipe.json").evaluation
    except (UserError, OSError, ValueError):
        return None


def _rate(result: Mapping[str, object]) -> Rate | None:
    value, low, high, n = (result.get(name) for name in ("value", "ci_low", "ci_high", "n"))
    if not (is_finite(value) and is_finite(low) and is_finite(high) and isinstance(n, int)):
        return None
    return Rate(value=value, ci_low=low, ci_high=high, n=n)


def lineage(versions: Sequence[PolicyVersion], before: int, after: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns the newest common ancestor of two versions, the versions from that ancestor to `before`, and the versions from it to `after`.

    Both tuples of versions exclude the ancestor and start with the oldest version.
    """
    parents = {version.number: version.parent for version in versions}
    ways = [_ancestors(parents, number) for number in (before, after)]
    common = max(set(ways[0]) & set(ways[1]), default=0)
    first, second = (tuple(number for number in reversed(way) if number > common) for way in ways)
    return common, first, second


def _ancestors(parents: Mapping[int, int | None], number: int) -> list[int]:
    """Returns a version and its ancestors, the newest first. Stops at a parent that is not older, so that the search ends even if a record
    is damaged."""
    way = [number]
    while (parent := parents.get(way[-1])) is not None and parent < way[-1]:
        way.append(parent)
    return way


def evaluation_differences(run_dir: Path, before: VersionRecord, after: VersionRecord) -> tuple[EvaluationDifference, ...]:
    """Compares the evaluations that a run recorded for both versions: on the gate's suite, and on the held-out tasks.

    Skips an evaluation that only one of the versions has. Raises `UserError` if an evaluation cannot be read or scipy is missing.
    """
    differences = []
    if before.verdict is not None and after.verdict is not None:
        first, second = (results.load_results(evaluation_folder(run_dir, version.number)) for version in (before, after))
        ones, others, changed = results.same_cases(first, second)
        if (compared := compare(ones, others)) is not None:
            differences.append(EvaluationDifference(what=f"suite {second.about.suite}", comparison=compared, changed=changed))
    if before.phase and after.phase and before.phase != after.phase:
        compared = compare(held_out_scores(run_dir, before.phase), held_out_scores(run_dir, after.phase))
        if compared is not None:
            differences.append(EvaluationDifference(what="held-out tasks", comparison=compared))
    return tuple(differences)


def held_out_scores(run_dir: Path, phase: str) -> Scores:
    """Returns the scores in a held-out evaluation by task, from its transcripts. An excluded attempt has the score None."""
    scores: dict[str, list[float | None]] = {}
    for line in read_lines(run_dir / "episodes" / f"{phase}.jsonl", _TRANSCRIPT, [], inside=run_dir):
        value = None if line.get("left_out") else line.get("score")
        scores.setdefault(f"{line['split']}/{line['task_id']}", []).append(float(value) if is_finite(value) else None)
    return scores
