"""What the gate decided about a version of a run, and where: `gate/000012/verdict.json`, beside the evaluation it was decided on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.evaluation.results import EvaluationFigures
from agentrl.gate.rule import RuleResult
from agentrl.records import codec
from agentrl.records.fields import Record, Text

FOLDER, FILE = "gate", "verdict.json"
_LARGEST = 16 << 20


class GateOutcome(StrEnum):
    """What became of a version at the gate."""

    REFERENCE = "reference"  # promoted without a judgement: there was nothing to compare with
    PROMOTED = "promoted"
    BLOCKED = "blocked"  # worse; not promoted, and training goes on from it
    ROLLED_BACK = "rolled back"  # worse; server and learner go back
    UNJUDGED = "not judged"  # too little was scored; not promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRegression(Record):
    """A case that went wrong, and an episode of each version to show for it."""

    case: str
    turn: int | None  # counted from 1: the first turn in which the two episodes part; None: they say and call the same
    before_episode: str  # one that passed
    episode: str  # one that did not


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict(Record):
    """The gate's decision on one version."""

    version: int
    sha256: str  # of its weights: another version of this number has to be judged again
    outcome: GateOutcome
    reason: Text
    at: str  # UTC, ISO 8601
    reference: int | None = None  # the promoted version that it was compared with
    judgement: RuleResult | None = None
    figures: EvaluationFigures | None = None  # of the evaluation
    regressions: tuple[CaseRegression, ...] = ()  # the cases that block; where only the suite fell, those that fell furthest

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.outcome is GateOutcome.ROLLED_BACK and (self.reference is None or not 0 <= self.reference < self.version):
            raise ValueError(f"version {self.version} is rolled back, but to none before it: {self.reference}")

    @property
    def promoted(self) -> bool:
        """Whether the version is promoted."""
        return self.outcome in (GateOutcome.REFERENCE, GateOutcome.PROMOTED)


def evaluation_folder(run_dir: Path, version: int) -> Path:
    """Where the gate keeps a version's evaluation and verdict."""
    return run_dir / FOLDER / f"{version:06d}"


def read_verdict(run_dir: Path, version: int) -> GateVerdict | None:
    """The verdict on a version, or None where there is none. Raises `StoreError` for one that cannot be read."""
    path = evaluation_folder(run_dir, version) / FILE
    try:
        verdict = codec.from_json(GateVerdict, read_bytes(path, most=_LARGEST, inside=run_dir))
        if verdict.version != version:
            raise ValueError(f"it is on version {verdict.version}")
        return verdict
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is no verdict of the gate: {error}"[:2000]) from error


def read_verdicts(run_dir: Path) -> tuple[GateVerdict, ...]:
    """Every verdict of a run, by version. Raises `StoreError` for one that cannot be read."""
    folder = run_dir / FOLDER
    numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []
    found = (read_verdict(run_dir, number) for number in numbers)
    return tuple(one for one in found if one is not None)
