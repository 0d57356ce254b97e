"""Reads and writes the files of one evaluation of a suite.

about.json        `EvaluationInfo`: the suite, the model, the sampling settings, and other metadata of the evaluation
attempts.jsonl    one `CaseAttempt` per line
episodes.jsonl    one transcript per line, with the same `episode` as its attempt
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
from agentrl.base.numbers import is_at_least
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import UserError
from agentrl.evaluation.comparison import Scores
from agentrl.evaluation.statistics import mean_pass_at_k, rate_interval
from agentrl.records import codec
from agentrl.records.fields import JsonObject, Record, Text

FORMAT = 1
ABOUT, ATTEMPTS, EPISODES = "about.json", "attempts.jsonl", "episodes.jsonl"
LARGEST_SCORE = 1e100
"""Maximum absolute score of an attempt. A sum of larger scores could overflow."""
LARGEST_COUNT = 1 << 40
"""Upper bound on the tokens, turns and seconds of an attempt, so that the sum over a file fits into a record."""
_MAX_BYTES = 256 << 20  # maximum bytes of one file
_WRITTEN_BY = "agentrl eval RECIPE --suite SUITE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseAttempt(Record):
    """One attempt at one case."""

    case: str
    task_key: str  # hash of the case's content
    number: int  # number of this attempt at the case, counted from 0
    episode: str
    score: float | None  # None means unscored, never 0
    reason: Text = ""  # why it is unscored
    again: bool = False  # whether it is an additional attempt, which was run because the case looked worse
    tokens: int = 0  # number of sampled tokens
    turns: int = 0
    wall_s: float = 0.0
    ended: str = ""  # stop reason
    versions: tuple[int, ...] = ()  # policy versions that sampled its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationInfo(Record):
    """The settings and provenance of an evaluation."""

    suite: str
    suite_sha256: str
    cases: int
    repeats: int
    model: str  # as the user named it
    version: int  # version number in the run that created the model; 0 if no run created it
    sha256: str  # hash of the model's weights
    recipe: str  # name of the recipe
    recipe_sha256: str
    sampling: JsonObject
    seed: int
    threshold: float  # minimum score for an attempt to pass, for cases without a threshold
    agentrl: str
    at: str  # UTC, ISO 8601
    wall_s: float = 0.0
    thresholds: Mapping[str, float] = field(default_factory=dict)  # case -> threshold, for cases that have a threshold
    format: int = FORMAT

    def pass_threshold(self, case: str) -> float:
        """Returns the minimum score with which an attempt at a case passes."""
        return self.thresholds.get(case, self.threshold)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.format != FORMAT:
            raise ValueError(f"EvaluationInfo.format {self.format} is not known; this version reads {FORMAT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigures(Record):
    """The rates and costs of an evaluation."""

    pass_at_1: float | None  # mean over cases; None if no attempt was scored
    low: float | None  # lower end of the 95% interval of `pass_at_1`
    high: float | None
    pass_at_k: float | None  # estimated probability that at least one of `k` attempts passes; None if no case has `k` scored attempts
    k: int
    mean_score: float | None
    attempts: int
    unscored: int
    tokens: int  # total of all attempts
    turns: float | None  # mean per attempt
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResults:
    """One evaluation of a suite."""

    about: EvaluationInfo
    attempts: tuple[CaseAttempt, ...]

    def scores(self) -> Scores:
        """Returns a mapping case -> scores of its attempts, in order, excluding the additional attempts (`CaseAttempt.again`)."""
        scores: dict[str, list[float | None]] = {}
        for attempt in sorted(self.attempts, key=lambda attempt: (attempt.case, attempt.number)):
            if not attempt.again:
                scores.setdefault(attempt.case, []).append(attempt.score)
        return scores

    @property
    def task_keys(self) -> dict[str, str]:
        """Mapping case -> hash of the content of the case."""
        return {attempt.case: attempt.task_key for attempt in self.attempts}

    def figures(self, k: int = 0) -> EvaluationFigures:
        """Returns the rates and costs of the attempts, excluding additional attempts (`CaseAttempt.again`).

        `k` is the k of pass@k. If it is 0, k is the number of repeats or the smallest number of attempts at any case, whichever is larger.
        """
        first = [attempt for attempt in self.attempts if not attempt.again]
        by_case: dict[str, list[float]] = {}
        for attempt in first:
            if attempt.score is not None:
                by_case.setdefault(attempt.case, []).append(attempt.score)
        counts = [
            (sum(attempt_passes(score, self.about.pass_threshold(case)) for score in scores), len(scores))
            for case, scores in by_case.items()
        ]
        tries = sum(count for _, count in counts)
        k = k or max(self.about.repeats, min(Counter(attempt.case for attempt in first).values(), default=1))
        rate = rate_interval([passed / count for passed, count in counts], tries) if counts else None
        return EvaluationFigures(
            pass_at_1=None if rate is None else rate.value,
            low=None if rate is None else rate.low,
            high=None if rate is None else rate.high,
            pass_at_k=mean_pass_at_k(counts, k),
            k=k,
            mean_score=statistics.fmean(statistics.fmean(scores) for scores in by_case.values()) if by_case else None,
            attempts=len(first),
            unscored=len(first) - tries,
            tokens=sum(attempt.tokens for attempt in first),
            turns=statistics.fmean(attempt.turns for attempt in first) if first else None,
            wall_s=self.about.wall_s,
        )


def same_cases(before: SuiteResults, after: SuiteResults) -> tuple[Scores, Scores, list[str]]:
    """Returns the scores in `before` and in `after`, without cases whose content differs between them, and the names of these cases."""
    ones, others = before.task_keys, after.task_keys
    changed = sorted(case for case in ones.keys() & others.keys() if ones[case] != others[case])
    shared = [{case: scores for case, scores in results.scores().items() if case not in changed} for results in (before, after)]
    return shared[0], shared[1], changed


def attempt_passes(score: float | None, threshold: float) -> bool:
    """Whether an attempt with this score passes. An attempt without a score does not pass."""
    return score is not None and is_at_least(score, threshold)


def suite_sha256(task_keys: Mapping[str, str]) -> str:
    """Returns the hash of a suite, computed from the names and contents of its cases."""
    return hashlib.sha256("\n".join(f"{case} {key}" for case, key in sorted(task_keys.items())).encode()).hexdigest()


def save_results(
    folder: Path, results: SuiteResults, episodes: Iterable[Mapping[str, Any]], *, more: Mapping[str, bytes] | None = None
) -> None:
    """Writes the folder of an evaluation atomically, replacing an existing folder.

    `more` maps names of additional files to their contents.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = partial_folder(folder)
    (part / ABOUT).write_bytes(codec.to_json(results.about) + b"\n")
    (part / ATTEMPTS).write_bytes(b"".join(codec.to_json(attempt) + b"\n" for attempt in results.attempts))
    (part / EPISODES).write_bytes(b"".join(json_line(dict(episode)) for episode in episodes))
    for name, data in (more or {}).items():
        (part / name).write_bytes(data)
    commit_folder(part, folder)


def load_results(folder: Path) -> SuiteResults:
    """Reads the folder of an evaluation. If the folder is missing or invalid, raises a `UserError` that describes the problem."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", fix=f"give a folder that {_WRITTEN_BY} wrote, or RUN@VERSION")
    try:
        about = codec.from_json(EvaluationInfo, read_bytes(folder / ABOUT, most=_MAX_BYTES, inside=folder))
        lines = read_bytes(folder / ATTEMPTS, most=_MAX_BYTES, inside=folder).split(b"\n")
        attempts = tuple(codec.from_json(CaseAttempt, line) for line in lines if line)
        _check(attempts)
    except FileNotFoundError as error:
        problem = f"{folder} contains no evaluation of a suite: {Path(str(error.filename)).name} is missing"
        raise UserError(problem, fix=f"give a folder that {_WRITTEN_BY} wrote, or RUN@VERSION") from None
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}", fix="make the file readable, or evaluate again") from None
    except ValueError as error:
        raise UserError(f"{folder} is not an evaluation of a suite: {error}"[:2000], fix="evaluate again") from None
    return SuiteResults(about=about, attempts=attempts)


def _check(attempts: Iterable[CaseAttempt]) -> None:
    """Raises `ValueError` if an attempt occurs twice or has a negative number, or if a score or count is out of range."""
    seen: set[tuple[str, int]] = set()
    for attempt in attempts:
        if (attempt.case, attempt.number) in seen or attempt.number < 0:
            raise ValueError(f"attempt {attempt.number} at {attempt.case!r} occurs twice, or has a negative number")
        if attempt.score is not None and math.isfinite(attempt.score) and abs(attempt.score) > LARGEST_SCORE:
            raise ValueError(f"attempt {attempt.number} at {attempt.case!r} has the score {attempt.score:g}, which is too large")
        if not all(0 <= count < LARGEST_COUNT for count in (attempt.tokens, attempt.turns, attempt.wall_s)):
            raise ValueError(
                f"attempt {attempt.number} at {attempt.case!r} took {attempt.tokens} tokens, {attempt.turns} turns and {attempt.wall_s:g} s"
                ", which is out of range"
            )
        seen.add((attempt.case, attempt.number))
