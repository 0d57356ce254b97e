"""The files of one evaluation of a suite: what was asked of whom, and every attempt.

about.json        `EvaluationInfo`: suite, model, sampling, and what else two evaluations must share to be compared
attempts.jsonl    an `CaseAttempt` a line
episodes.jsonl    the episodes in words, a line each, with the same `episode` as their attempt
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.files import commit_folder, json_line, partial_folder
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import UserError
from agentrl.evaluation import intervals
from agentrl.evaluation.comparison import Scores
from agentrl.evaluation.passes import mean_pass_at_k
from agentrl.gate.rule import attempt_passes
from agentrl.records import codec
from agentrl.records.fields import JsonObject, Record, Text

FORMAT = 1
ABOUT, ATTEMPTS, EPISODES = "about.json", "attempts.jsonl", "episodes.jsonl"
LARGEST_SCORE = 1e100
"""Of an attempt, up or down: sums of a few larger ones are no floats any more."""
LARGEST_COUNT = 1 << 40
"""Of the tokens, turns and seconds of an attempt: sums of so many attempts as a file holds still fit a record."""
_LARGEST = 256 << 20  # bytes of one file


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseAttempt(Record):
    """One attempt at one case."""

    case: str
    task_key: str  # hash of the case's content
    number: int  # counted from 0, attempts at the same case
    episode: str
    score: float | None  # None: unscored, never 0
    reason: Text = ""  # why there is no score
    again: bool = False  # a further attempt, because the case looked worse
    tokens: int = 0  # sampled
    turns: int = 0
    wall_s: float = 0.0
    ended: str = ""  # stop reason
    versions: tuple[int, ...] = ()  # that sampled its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationInfo(Record):
    """Where the attempts come from."""

    suite: str
    suite_sha256: str
    cases: int
    repeats: int
    model: str  # as it was named
    version: int  # of the run that made it; 0 for a model of its own
    sha256: str  # of its weights
    recipe: str  # its name
    recipe_sha256: str
    sampling: JsonObject
    seed: int
    threshold: float  # score from which an attempt has passed ...
    agentrl: str
    at: str  # UTC, ISO 8601
    wall_s: float = 0.0
    thresholds: Mapping[str, float] = field(default_factory=dict)  # ... and of the cases that have one of their own
    format: int = FORMAT

    def pass_threshold(self, case: str) -> float:
        """Score from which an attempt at a case has passed."""
        return self.thresholds.get(case, self.threshold)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.format != FORMAT:
            raise ValueError(f"About.format {self.format} is not known; this version reads {FORMAT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigures(Record):
    """What an evaluation comes to."""

    pass_at_1: float | None  # mean over cases; None: not one attempt was scored
    low: float | None  # of its 95% interval
    high: float | None
    pass_at_k: float | None  # at least one of `k` attempts passes; unbiased
    k: int
    mean_score: float | None
    attempts: int
    unscored: int
    tokens: int  # of all attempts
    turns: float | None  # of an attempt, the mean
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResults:
    """One evaluation of a suite."""

    about: EvaluationInfo
    attempts: tuple[CaseAttempt, ...]

    def scores(self, *, again: bool = False) -> Scores:
        """Case -> scores in the order of the attempts: of the evaluation, or of the further attempts at cases that looked worse."""
        found: dict[str, list[float | None]] = {}
        for one in sorted(self.attempts, key=lambda one: (one.case, one.number)):
            if one.again is again:
                found.setdefault(one.case, []).append(one.score)
        return found

    @property
    def task_keys(self) -> dict[str, str]:
        """Case -> hash of its content."""
        return {one.case: one.task_key for one in self.attempts}

    def figures(self, k: int = 0) -> EvaluationFigures:
        """Rates and costs, further attempts apart. `k` 0: the number of repeats, or what every case was tried where that is more."""
        first = [one for one in self.attempts if not one.again]
        by_case: dict[str, list[float]] = {}
        for one in first:
            if one.score is not None:
                by_case.setdefault(one.case, []).append(one.score)
        counts = [
            (sum(attempt_passes(score, self.about.pass_threshold(case)) for score in scores), len(scores))
            for case, scores in by_case.items()
        ]
        tries = sum(count for _, count in counts)
        k = k or max(self.about.repeats, min(Counter(one.case for one in first).values(), default=1))
        rate = intervals.rate_interval([passed / count for passed, count in counts], tries) if counts else None
        return EvaluationFigures(
            pass_at_1=None if rate is None else rate.value,
            low=None if rate is None else rate.low,
            high=None if rate is None else rate.high,
            pass_at_k=mean_pass_at_k(counts, k),
            k=k,
            mean_score=statistics.fmean(statistics.fmean(scores) for scores in by_case.values()) if by_case else None,
            attempts=len(first),
            unscored=len(first) - tries,
            tokens=sum(one.tokens for one in first),
            turns=statistics.fmean(one.turns for one in first) if first else None,
            wall_s=self.about.wall_s,
        )


def suite_sha256(task_keys: Mapping[str, str]) -> str:
    """The hash of a suite: of its cases' names and contents."""
    return hashlib.sha256("\n".join(f"{case} {key}" for case, key in sorted(task_keys.items())).encode()).hexdigest()


def save_results(
    folder: Path, results: SuiteResults, episodes: Iterable[Mapping[str, Any]], *, more: Mapping[str, bytes] | None = None
) -> None:
    """Writes an evaluation's folder, whole or not at all, in place of one that is there. `more`: further files, by name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = partial_folder(folder)
    (part / ABOUT).write_bytes(codec.to_json(results.about) + b"\n")
    (part / ATTEMPTS).write_bytes(b"".join(codec.to_json(one) + b"\n" for one in results.attempts))
    (part / EPISODES).write_bytes(b"".join(json_line(dict(one)) for one in episodes))
    for name, data in (more or {}).items():
        (part / name).write_bytes(data)
    commit_folder(part, folder)


def load_results(folder: Path) -> SuiteResults:
    """Reads an evaluation's folder. Raises `UserError` that says what is wrong with it."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}", fix="give one that agentrl eval RECIPE --suite SUITE has written, or RUN@VERSION")
    try:
        about = codec.from_json(EvaluationInfo, read_bytes(folder / ABOUT, most=_LARGEST, inside=folder))
        lines = read_bytes(folder / ATTEMPTS, most=_LARGEST, inside=folder).split(b"\n")[:-1]
        attempts = tuple(codec.from_json(CaseAttempt, line) for line in lines)
        _check(attempts)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no evaluation of a suite: {Path(str(error.filename)).name} is missing",
            fix="give a folder that agentrl eval RECIPE --suite SUITE has written, or RUN@VERSION",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no evaluation of a suite: {error}"[:2000], fix="evaluate again") from None
    return SuiteResults(about=about, attempts=attempts)


def _check(attempts: Iterable[CaseAttempt]) -> None:
    """Raises `ValueError` for attempts that nothing can be concluded from."""
    seen: set[tuple[str, int]] = set()
    for one in attempts:
        if (one.case, one.number) in seen or one.number < 0:
            raise ValueError(f"attempt {one.number} at {one.case!r} is there twice, or is none")
        if one.score is not None and math.isfinite(one.score) and abs(one.score) > LARGEST_SCORE:
            raise ValueError(f"attempt {one.number} at {one.case!r} has a score of {one.score:g}")
        if not (0 <= one.tokens < LARGEST_COUNT and 0 <= one.turns < LARGEST_COUNT and 0 <= one.wall_s < LARGEST_COUNT):
            raise ValueError(f"attempt {one.number} at {one.case!r} took {one.tokens} tokens, {one.turns} turns and {one.wall_s:g} s")
        seen.add((one.case, one.number))
