"""The gate's decisions on the versions of a run.

The verdict on version 12 is `gate/000012/verdict.json`, next to the evaluation of the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.files import numbered_folders, read_json_lines
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError
from agentrl.evaluation.comparison import pair_scores
from agentrl.evaluation.results import EPISODES, EvaluationFigures, SuiteResults, attempt_passes
from agentrl.gate.rule import RuleResult
from agentrl.records import codec
from agentrl.records.fields import Record, Text

if TYPE_CHECKING:
    from agentrl.evaluation.engine import SuiteAttempt

FOLDER, FILE = "gate", "verdict.json"
_MAX_BYTES = 16 << 20
_CASES_SHOWN = 3  # cases shown if the suite got worse but no single case did


class GateOutcome(StrEnum):
    """The kinds of decision that the gate makes on a version."""

    REFERENCE = "reference"  # promoted without a comparison, because there was no baseline
    PROMOTED = "promoted"
    BLOCKED = "blocked"  # worse; not promoted, and training continues from it
    ROLLED_BACK = "rolled back"  # worse; server and learner return to the baseline
    UNJUDGED = "not judged"  # too few attempts were scored; not promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRegression(Record):
    """A case that regressed, with a passing episode of the baseline and a failing episode of the version."""

    case: str
    turn: int | None  # first turn, counted from 1, in which the two episodes differ; None means no difference
    before_episode: str  # passed
    episode: str  # failed


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict(Record):
    """The gate's decision on one version, and the results on which it is based."""

    version: int
    sha256: str  # hash of its weights; the decision does not apply to different weights with this number
    outcome: GateOutcome
    reason: Text
    at: str  # UTC, ISO 8601
    reference: int | None = None  # baseline version with which it was compared
    judgement: RuleResult | None = None
    figures: EvaluationFigures | None = None  # figures of its evaluation
    regressions: tuple[CaseRegression, ...] = ()  # the cases that block; if only the suite got worse, the cases that fell most

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.outcome is GateOutcome.ROLLED_BACK and (self.reference is None or not 0 <= self.reference < self.version):
            raise ValueError(f"version {self.version} is rolled back, but not to an earlier version: {self.reference}")

    @property
    def promoted(self) -> bool:
        """Whether the version is promoted."""
        return self.outcome in (GateOutcome.REFERENCE, GateOutcome.PROMOTED)


def evaluation_folder(run_dir: Path, version: int) -> Path:
    """Returns the folder that contains a version's evaluation and verdict."""
    return run_dir / FOLDER / f"{version:06d}"


def read_verdict(run_dir: Path, version: int) -> GateVerdict | None:
    """Returns the verdict on a version; None if the version has no verdict. Raises `StoreError` if the verdict cannot be read."""
    path = evaluation_folder(run_dir, version) / FILE
    try:
        verdict = codec.from_json(GateVerdict, read_bytes(path, most=_MAX_BYTES, inside=run_dir))
        if verdict.version != version:
            raise ValueError(f"it is the verdict on version {verdict.version}")
        return verdict
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is not a verdict of the gate: {error}"[:2000]) from error


def read_verdicts(run_dir: Path) -> tuple[GateVerdict, ...]:
    """Returns all verdicts of a run, sorted by version. Raises `StoreError` if a verdict cannot be read."""
    numbers = [int(path.name) for path in numbered_folders(run_dir / FOLDER)]
    return tuple(verdict for number in numbers if (verdict := read_verdict(run_dir, number)) is not None)


def case_regressions(
    folder: Path, baseline: SuiteResults, evaluation: SuiteResults, result: RuleResult, attempts: Sequence[SuiteAttempt]
) -> tuple[CaseRegression, ...]:
    """Returns the regressed cases of an evaluation, each with a passing episode of the baseline and a failing episode of the version.

    If no single case blocks, these are the cases that fell most. A case without both episodes is omitted.

    Args:
        folder: the run folder, which contains the baseline's episodes.
        attempts: attempts of the evaluation, with their transcripts.
    """
    path = evaluation_folder(folder, baseline.about.version) / EPISODES
    before = {line["episode"]: line for line in read_json_lines(path, "episode")}
    after = {attempt.attempt.episode: attempt.transcript for attempt in attempts}
    drops = sorted((pair.difference, pair.case) for pair in pair_scores(baseline.scores(), evaluation.scores()).pairs)
    names = [regression.case for regression in result.regressed] or [case for difference, case in drops if difference < 0][:_CASES_SHOWN]
    regressions = []
    for case in names:
        passed, failed = _episode(baseline, case, passed=True), _episode(evaluation, case, passed=False)
        if passed is not None and failed is not None:
            turn = first_different_turn(before.get(passed, {}), after[failed])
            regressions.append(CaseRegression(case=case, turn=turn, before_episode=passed, episode=failed))
    return tuple(regressions)


def first_different_turn(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """Returns the first turn, counted from 1, in which two transcripts differ; None if all turns are equal.

    This is the first turn with different tool calls or, if all tool calls are equal, the first turn with different text.
    """
    one, other = _turns(before), _turns(after)
    for part in ("tool_calls", "content"):
        for turn in range(max(len(one), len(other))):
            if turn >= len(one) or turn >= len(other) or one[turn].get(part) != other[turn].get(part):
                return turn + 1
    return None


def _turns(transcript: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in transcript.get("messages", ()) if message.get("role") == "assistant"]


def _episode(evaluation: SuiteResults, case: str, *, passed: bool) -> str | None:
    """Returns the episode of the first attempt at the case that passed (if `passed`) or failed; None if there is no such attempt."""
    threshold = evaluation.about.pass_threshold(case)
    scored = ((attempt.episode, attempt.score) for attempt in evaluation.attempts if attempt.case == case and attempt.score is not None)
    return next((episode for episode, score in scored if attempt_passes(score, threshold) is passed), None)
