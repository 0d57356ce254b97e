"""Calibration files: how well a judge agrees with human labels. `agentrl judge calibrate` writes them.

A judge can be configured to require such a file.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.base.error_text import reason_text
from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError

FORMAT = 1
_LARGEST = 1 << 20  # bytes of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalEstimate:
    """An estimate with its 95% interval, from `n` observations."""

    value: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.low <= self.value <= self.high):
            raise ValueError(f"{self.value} is not between {self.low} and {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured agreement of a judge with human labels. Answers without a verdict count only in `abstained` and `coverage`."""

    identity: str  # hash of the judge's model, parameters and prompt; empty for a verifier without an identity
    judge: str  # plug-in reference of the judge
    labels_sha256: str
    threshold: float  # minimum score that means "right"
    right_right: int  # labelled right, judged right
    right_wrong: int  # labelled right, judged wrong
    wrong_right: int
    wrong_wrong: int
    abstained: int  # number of answers without a verdict, for any reason
    tasks: int  # number of tasks to which the answers belong
    agreement: IntervalEstimate
    kappa: IntervalEstimate
    sensitivity: IntervalEstimate  # share of correct answers that are judged right
    specificity: IntervalEstimate  # share of wrong answers that are judged wrong
    informedness: IntervalEstimate  # sensitivity + specificity - 1 (Youden 1950): 0 is chance
    measured_at: str  # UTC
    coverage: IntervalEstimate | None = None  # share of answers with a verdict; None in files of older versions
    design_effect: float = 1.0  # design effect of informedness: answers per effective answer; answers to one task are correlated
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"unknown format {self.format}; this version reads {FORMAT}")
        if min(self.right_right, self.right_wrong, self.wrong_right, self.wrong_wrong, self.abstained) < 0:
            raise ValueError("the counts must be at least 0")
        if not 1 <= self.design_effect < math.inf:
            raise ValueError(f"the design effect must be at least 1, got {self.design_effect}")

    @property
    def may_be_chance(self) -> bool:
        """Whether the judge may be no better than chance: the lower end of the interval of its informedness is at most 0."""
        return self.informedness.low <= 0


_ADAPTER = TypeAdapter(Calibration)


def save_calibration(path: Path, calibration: Calibration, more: dict[str, Any] | None = None) -> None:
    """Writes a calibration file. `more` contains additional fields of the report, which `load_calibration` does not read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**asdict(calibration), **({"more": more} if more else {})}, indent=1) + "\n", durable=True)


def load_calibration(path: Path) -> Calibration:
    """Reads a calibration file. Raises `UserError` if the file is missing or invalid."""
    fix = f"run agentrl judge calibrate JUDGE LABELS --out {path}"
    try:
        return _ADAPTER.validate_json(read_bytes(path, most=_LARGEST))
    except FileNotFoundError:
        raise UserError(f"there is no calibration {path}", fix=fix) from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise UserError(f"{path} is not a calibration: {printable(problem, 300)}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a calibration: {printable(reason_text(error), 300)}", fix=fix) from None


def validate_requirements(calibration: str | None, *, min_agreement: float, min_coverage: float) -> None:
    """Raises `UserError` if a minimum is not at least 0 and below 1, or if a minimum is set without a calibration."""
    for key, demanded in (("min_agreement", min_agreement), ("min_coverage", min_coverage)):
        if not 0.0 <= demanded < 1.0:
            raise UserError(f"{key} must be at least 0 and below 1, got {demanded}", fix="use a value such as 0.8")
        if demanded and calibration is None:
            raise UserError(f"{key} has no effect without a calibration", fix='set calibration="calibrations/x.json"')


def require_calibration(path: Path, *, identity: str, name: str, min_agreement: float, min_coverage: float) -> None:
    """Raises `UserError` unless the calibration in `path` is for this judge, shows a result above chance, and meets the requirements.

    The lower ends of the 95% intervals for agreement and coverage must be at least `min_agreement` and `min_coverage`, so a few labels are
    not enough. A minimum coverage is useful because a judge that abstains on hard answers could reach a high agreement on the other
    answers.
    """
    calibration, fix = load_calibration(path), f"run agentrl judge calibrate JUDGE LABELS --out {path}"
    if calibration.identity != identity:
        raise UserError(f"judge {name}: the calibration {path} belongs to a different model, prompt or setting", fix=fix)
    if calibration.may_be_chance:
        estimate = f"sensitivity + specificity - 1 is {_estimate_text(calibration.informedness)}"
        raise UserError(f"judge {name} is not shown to be better than chance: {estimate} ({path})", fix="use a different model or prompt")
    if calibration.agreement.low < min_agreement:
        raise UserError(
            f"judge {name}: its agreement is {_estimate_text(calibration.agreement)}, but the lower end must be at least {min_agreement:g},"
            f" the required minimum ({path})",
            fix="improve the prompt, use a different model, or label more answers if the interval is wide",
        )
    if min_coverage and calibration.coverage is None:
        raise UserError(f"judge {name}: the calibration {path} has no coverage", fix=fix)
    if calibration.coverage is not None and calibration.coverage.low < min_coverage:
        raise UserError(
            f"judge {name}: its coverage is {_estimate_text(calibration.coverage)}, but the lower end must be at least {min_coverage:g},"
            f" the required minimum ({path})",
            fix="run agentrl judge calibrate to see why verdicts are missing, or label more answers if the interval is wide",
        )


def _estimate_text(estimate: IntervalEstimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f}, {estimate.n} answers)"
