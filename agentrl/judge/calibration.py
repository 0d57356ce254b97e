"""A judge's calibration: what it was measured at, in a file that a judge may demand of itself. `agentrl judge calibrate` writes it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

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
            raise ValueError(f"{self.value} does not lie between {self.low} and {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How well a judge agrees with people's labels, over the answers that it gave a verdict on."""

    identity: str  # of the judge: a hash of model, parameters and prompt; empty for a verifier that has none
    judge: str  # the reference that was measured
    labels_sha256: str
    threshold: float  # a score of at least this says "right"
    right_right: int  # labelled right, and the judge says so
    right_wrong: int  # labelled right, and the judge says wrong
    wrong_right: int
    wrong_wrong: int
    abstained: int  # without a verdict, for whatever reason
    tasks: int  # that the answers belong to
    agreement: IntervalEstimate
    kappa: IntervalEstimate
    sensitivity: IntervalEstimate  # share of the right ones that it calls right
    specificity: IntervalEstimate  # share of the wrong ones that it calls wrong
    informedness: IntervalEstimate  # sensitivity + specificity - 1 (Youden 1950): 0 is chance
    measured_at: str  # UTC
    coverage: IntervalEstimate | None = (
        None  # share of the answers that it gave a verdict on; None: measured by a version that did not tell
    )
    design_effect: float = 1.0  # answers that are worth one, because those to one task are alike; of informedness
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads {FORMAT}")
        if min(self.right_right, self.right_wrong, self.wrong_right, self.wrong_wrong, self.abstained) < 0:
            raise ValueError("negative counts")
        if not 1 <= self.design_effect < math.inf:
            raise ValueError(f"a design effect of {self.design_effect}")

    @property
    def may_be_chance(self) -> bool:
        """Whether the judge may be no better than a coin, whatever the coin's bias: its informedness may be 0 or less."""
        return self.informedness.low <= 0


_ADAPTER = TypeAdapter(Calibration)


def save_calibration(path: Path, calibration: Calibration, more: dict[str, Any] | None = None) -> None:
    """Writes the file that judges refer to; `more` is what is told beside it, for people and programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**asdict(calibration), **({"more": more} if more else {})}, indent=1) + "\n", durable=True)


def load_calibration(path: Path) -> Calibration:
    """Reads a calibration. Raises `UserError` when there is none, or the file is something else."""
    fix = f"agentrl judge calibrate JUDGE LABELS --out {path}"
    try:
        return _ADAPTER.validate_json(read_bytes(path, most=_LARGEST))
    except FileNotFoundError:
        raise UserError(f"no calibration {path}", fix=fix) from None
    except ValidationError as error:
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"{path} is no calibration: {printable(told, 300)}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no calibration: {printable(str(error), 300)}", fix=fix) from None


def validate_requirements(calibration: str | None, *, min_agreement: float, min_coverage: float) -> None:
    """Raises `UserError` for demands that nothing could meet, or that nothing is held to."""
    for key, demanded in (("min_agreement", min_agreement), ("min_coverage", min_coverage)):
        if not 0.0 <= demanded < 1.0:
            raise UserError(f"{key} lies between 0 and 1, got {demanded}", fix="such as 0.8")
        if demanded and calibration is None:
            raise UserError(f"{key} without a calibration does nothing", fix='name the file: calibration="calibrations/x.json"')


def require_calibration(path: Path, *, identity: str, name: str, min_agreement: float, min_coverage: float) -> None:
    """Raises `UserError` unless the calibration in `path` is this judge's, better than chance, and good enough.

    Good enough means that the lower end of the interval of agreement is at least `min_agreement`: few labels are not enough. So is that of
    coverage at least `min_coverage`: a judge that abstains wherever it is hard agrees with everybody on the rest.
    """
    found, again = load_calibration(path), f"agentrl judge calibrate JUDGE LABELS --out {path}"
    if found.identity != identity:
        raise UserError(f"judge {name}: the calibration {path} is of another model, prompt or setting", fix=again)
    if found.may_be_chance:
        told = f"sensitivity + specificity - 1 is {_told(found.informedness)}"
        raise UserError(f"judge {name} is not shown to be better than chance: {told} ({path})", fix="use another model or prompt")
    if found.agreement.low < min_agreement:
        raise UserError(
            f"judge {name} agrees with people's labels in {_told(found.agreement)}, and at least {min_agreement:g} is demanded ({path})",
            fix="improve the prompt, use another model, or, where the interval is wide, label more answers",
        )
    if min_coverage and found.coverage is None:
        raise UserError(f"judge {name}: the calibration {path} does not tell how often it gave a verdict", fix=again)
    if found.coverage is not None and found.coverage.low < min_coverage:
        raise UserError(
            f"judge {name} gives a verdict on {_told(found.coverage)}, and at least {min_coverage:g} is demanded ({path})",
            fix="look at why it gave none (agentrl judge calibrate tells), or, where the interval is wide, label more answers",
        )


def _told(one: IntervalEstimate) -> str:
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f}, {one.n} answers)"
