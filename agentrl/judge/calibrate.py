"""Calibrates a judge: runs the judge on labelled answers and measures how well it agrees with the labels."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.errors import UserError
from agentrl.judge import Comparison, JudgeUsage
from agentrl.judge import agreement as stats
from agentrl.judge.agreement import AgreementTable, Bin, DesignEffects
from agentrl.judge.calibration import Calibration, IntervalEstimate
from agentrl.judge.labels import AnswerItem, LabelledAnswer, merge_duplicates
from agentrl.records import Score

_TIMEOUT_S = 60.0  # deadline of a verifier that declares none
_PAIRS = 4  # maximum number of pairs of a correct and a wrong answer per task
_REASONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledVerdict:
    """A judge's verdict on one labelled answer, or on a pair of labelled answers."""

    label: bool
    score: float | None  # None means unscored
    reason: str = ""
    chars: int = 0  # length of the answer; for a pair, the length of the first minus that of the second
    task_id: str = ""
    sides: tuple[str, ...] = ()  # for a pair: the verdict in each order


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The results of measuring a judge on labelled answers."""

    calibration: Calibration
    pairs: bool  # whether pairs of a correct and a wrong answer were judged; "right" then means that the first answer is correct
    disputed: int  # answers on which the labellers are tied
    copies: int  # labelled answers that repeat another answer to the same question; copies count once
    length_bias: IntervalEstimate | None  # correlation of score and log length (for pairs, its difference) within each label
    position_bias: IntervalEstimate | None  # for pairs: share of verdicts for A among the verdicts for A or B; 0.5 means no bias
    inconsistent: IntervalEstimate | None  # for pairs: share of pairs whose verdicts in the two orders contradict each other
    bins: tuple[Bin, ...]
    calibration_error: float | None  # for scores from 0 to 1
    reasons: Mapping[str, int] = field(default_factory=dict)  # reason for a missing verdict -> number of answers
    spent: JudgeUsage | None = None
    wall_s: float = 0.0


async def calibrate(
    judge: Any,
    labelled: Sequence[LabelledAnswer],
    *,
    reference: str,
    labels_sha256: str,
    root: Path,
    threshold: float = 0.5,
    parallel: int = 8,
    ledger: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CalibrationReport:
    """Measures a judge, or any verifier, on labelled answers.

    A judge that compares answers is measured on pairs of a correct and a wrong answer.

    Args:
        reference: plug-in reference of the judge.
        threshold: minimum score that means "right".
        parallel: maximum number of answers that are judged concurrently.
        ledger: file for the cached responses and the counters of a judge that sets no ledger, relative to `root`. A repeated measurement
            reads the cached responses and costs nothing.
        progress: called with the number of finished answers and the total number of answers.

    Raises:
        UserError: all labels are equal, fewer than two pairs can be formed, the judge cannot be prepared, or the judge returned no verdict
            on any correct answer or on any wrong answer.
    """
    distinct = merge_duplicates(labelled)
    answers = [answer for answer in distinct if answer.right is not None]
    if len({answer.right for answer in answers}) < 2:
        problem = "all labelled answers are correct, or all are wrong" if answers else "no answer has a majority for right or wrong"
        raise UserError(problem, fix="label correct and wrong answers: agentrl label RUN")
    measured = judge.without_calibration(ledger=ledger) if hasattr(judge, "without_calibration") else judge
    if hasattr(measured, "prepare"):
        measured.prepare(root=root, folder=None)
    before, started = _usage(measured), time.monotonic()
    pairs = hasattr(measured, "compare")
    try:
        verdicts = await _verdicts(measured, answers, pairs=pairs, parallel=parallel, progress=progress)
        after = _usage(measured)
    finally:
        if hasattr(measured, "close"):
            await measured.close()
    return _report(
        _calibration(measured, verdicts, reference=reference, labels_sha256=labels_sha256, threshold=threshold),
        verdicts,
        pairs=pairs,
        disputed=len(distinct) - len(answers),
        copies=len(labelled) - len(distinct),
        spent=after.minus(before) if after is not None and before is not None else None,
        wall_s=time.monotonic() - started,
    )


def _report(calibration: Calibration, verdicts: Sequence[LabelledVerdict], **fields: Any) -> CalibrationReport:
    scored = [(verdict.score, verdict) for verdict in verdicts if verdict.score is not None]
    scores, labels = [score for score, _ in scored], [verdict.label for _, verdict in scored]
    lengths = [math.copysign(math.log1p(abs(verdict.chars)), verdict.chars) for _, verdict in scored]
    sides = Counter(side for verdict in verdicts for side in verdict.sides)
    in_both_orders = [verdict for verdict in verdicts if len(verdict.sides) == 2]
    contradicting = sum(verdict.score is None and set(verdict.sides) != {"tie"} for verdict in in_both_orders)
    bins = stats.reliability(scores, labels)
    return CalibrationReport(
        calibration=calibration,
        length_bias=stats.partial_correlation(lengths, scores, labels),
        position_bias=stats.share(sides["A"], sides["A"] + sides["B"]) if sides["A"] + sides["B"] else None,
        inconsistent=stats.share(contradicting, len(in_both_orders)) if in_both_orders else None,
        bins=bins,
        calibration_error=stats.calibration_error(bins) if all(0 <= score <= 1 for score in scores) else None,
        reasons=_reasons(verdicts),
        **fields,
    )


async def _verdicts(
    judge: Any, answers: Sequence[LabelledAnswer], *, pairs: bool, parallel: int, progress: Callable[[int, int], None]
) -> list[LabelledVerdict]:
    slots, finished = asyncio.Semaphore(parallel), itertools.count(1)
    work: list[Callable[[], Awaitable[LabelledVerdict]]]
    if pairs:
        work = [partial(_compare, judge, *pair) for pair in _pairs(answers)]
        if not work:
            raise UserError("no task has a correct and a wrong answer, so there are no pairs", fix="label more answers of each task")
        if len(work) == 1:
            raise UserError(
                "the labels contain only one pair of a correct and a wrong answer, but agreement needs a pair in each order",
                fix="label more answers: agentrl label RUN",
            )
    else:
        work = [partial(_score, judge, answer) for answer in answers]

    async def run(call: Callable[[], Awaitable[LabelledVerdict]]) -> LabelledVerdict:
        async with slots:
            verdict = await call()
        progress(next(finished), len(work))
        return verdict

    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(run(call)) for call in work]
    return [job.result() for job in jobs]


async def _score(judge: Any, answer: LabelledAnswer) -> LabelledVerdict:
    item = answer.item
    task = item.task(reference_keys=_reference_keys(judge))
    score = await _call(judge, lambda: judge(task, item.episode()))
    value, reason = None, "no finite score"
    if isinstance(score, str):
        reason = score
    elif isinstance(score, Score):
        if score.value is None:
            reason = score.reason
        elif math.isfinite(score.value):
            value, reason = score.value, ""
    return LabelledVerdict(score=value, reason=reason, label=bool(answer.right), chars=len(item.answer), task_id=item.task_id)


def _reference_keys(judge: Any) -> set[str]:
    """Returns the keys of `Task.data` under which the judge, or the members of an ensemble, expect the reference answer."""
    members = getattr(judge, "judges", None)
    if isinstance(members, Mapping):
        return {key for member in members.values() for key in _reference_keys(member)}
    return {str(getattr(judge, "reference", "answer"))}


async def _compare(judge: Any, first: AnswerItem, second: AnswerItem, label: bool) -> LabelledVerdict:
    comparison = await _call(judge, lambda: judge.compare(first.question, first.answer, second.answer))
    value, reason, sides = None, "no comparison", tuple[str, ...]()
    if isinstance(comparison, str):
        reason = comparison
    elif isinstance(comparison, Comparison):
        sides = tuple(side for side in comparison.shown if side)
        if comparison.better in (None, "tie"):
            reason = comparison.answer.reason or "tie"
        else:
            value, reason = float(comparison.better == "first"), ""
    chars = len(first.answer) - len(second.answer)
    return LabelledVerdict(score=value, reason=reason, label=label, chars=chars, task_id=first.task_id, sides=sides)


async def _call(judge: Any, code: Callable[[], Any]) -> Any:
    """Returns the judge's result, or a description of its error."""
    with user_code.fault_boundary() as fault:
        limit = float(getattr(judge, "timeout_s", _TIMEOUT_S))
        return await user_code.call_user_code(code, what="judge", timeout_s=limit)
    assert fault.error is not None
    return user_code.describe_error(fault.error)


def _pairs(answers: Sequence[LabelledAnswer]) -> list[tuple[AnswerItem, AnswerItem, bool]]:
    """Returns triples: a correct and a wrong answer to the same task, and whether the first one is correct.

    The correct answer is first in every second pair, because agreement needs pairs of both labels. The pairs of a task, and which answer is
    first in the first pair, are drawn with generators seeded by the task ids.
    """
    tasks: dict[tuple[str, str], list[LabelledAnswer]] = {}
    for answer in answers:
        tasks.setdefault((answer.item.task_id, answer.item.question), []).append(answer)
    pairs: list[tuple[AnswerItem, AnswerItem, bool]] = []
    for (task_id, _), of_task in sorted(tasks.items()):
        rng = random.Random(hashlib.sha256(task_id.encode()).digest())
        rights = [answer.item for answer in of_task if answer.right]
        wrongs = [answer.item for answer in of_task if not answer.right]
        candidates = [(right, wrong) for right in rights for wrong in wrongs if right.answer != wrong.answer]
        for right, wrong in rng.sample(candidates, min(_PAIRS, len(candidates))):
            right_first = rng.random() < 0.5 if not pairs else not pairs[-1][2]
            pairs.append((right, wrong, True) if right_first else (wrong, right, False))
    return pairs


def _calibration(judge: Any, verdicts: Sequence[LabelledVerdict], *, reference: str, labels_sha256: str, threshold: float) -> Calibration:
    ratings = [(verdict.label, is_at_least(verdict.score, threshold)) for verdict in verdicts if verdict.score is not None]
    task_ids = [verdict.task_id for verdict in verdicts if verdict.score is not None]
    table, effects = AgreementTable.from_pairs(ratings), DesignEffects.from_pairs(task_ids, ratings)
    if not table.rights or not table.wrongs:
        reasons = "; ".join(f"{count} times: {reason}" for reason, count in _reasons(verdicts).items())
        kind = "wrong" if table.rights else "correct"
        raise UserError(f"the judge gave no verdict on any {kind} answer. {reasons}", fix="remove the causes that are listed above")
    coverage_effect = stats.design_effect([(verdict.task_id, float(verdict.score is not None)) for verdict in verdicts])
    return Calibration(
        identity=str(getattr(judge, "identity", "")),
        judge=reference,
        labels_sha256=labels_sha256,
        threshold=threshold,
        **asdict(table),
        abstained=len(verdicts) - len(ratings),
        tasks=len(set(task_ids)),
        agreement=stats.agreement(table, effect=effects.agreement),
        kappa=stats.kappa(table, effect=effects.agreement),
        sensitivity=stats.share(table.right_right, table.rights, effect=effects.sensitivity),
        specificity=stats.share(table.wrong_wrong, table.wrongs, effect=effects.specificity),
        informedness=stats.informedness(table, effect=effects.informedness),
        coverage=stats.share(len(ratings), len(verdicts), effect=coverage_effect),
        design_effect=effects.informedness,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _reasons(verdicts: Sequence[LabelledVerdict]) -> dict[str, int]:
    """Returns the most frequent reasons for missing verdicts, each with its count, in descending order of frequency."""
    counts = Counter(user_code.printable(verdict.reason, 200) for verdict in verdicts if verdict.score is None)
    return dict(counts.most_common(_REASONS))


def _usage(judge: Any) -> JudgeUsage | None:
    usage = judge.spent() if hasattr(judge, "spent") else None
    return usage if isinstance(usage, JudgeUsage) else None
