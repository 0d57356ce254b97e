"""Asks a judge about labelled answers, and measures what it says."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.scores import is_at_least
from agentrl.errors import UserError
from agentrl.judge import Comparison, JudgeUsage
from agentrl.judge import agreement as stats
from agentrl.judge.agreement import AgreementTable, Bin, DesignEffects
from agentrl.judge.calibration import Calibration, IntervalEstimate
from agentrl.judge.labels import AnswerItem, LabelledAnswer, merge_duplicates
from agentrl.records import Score

_TIMEOUT_S = 60.0  # of a verifier that does not say how long it may take
_PAIRS = 4  # of a right and a wrong answer that a judge of pairs is shown of each task
_REASONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledVerdict:
    """What a judge says about one labelled answer, or about a pair of them."""

    label: bool
    score: float | None  # None: unscored
    reason: str = ""
    chars: int = 0  # of the answer; of a pair, how much longer the first one is
    task_id: str = ""
    places: tuple[str, ...] = ()  # of a pair: what it said in each order


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What a judge was measured at."""

    calibration: Calibration
    pairs: bool  # measured on pairs of a right and a wrong answer: "right" means that the first one is
    disputed: int  # answers on which the labellers do not agree
    copies: int  # labelled answers that say what another one says, to the same question: they count once
    length_bias: (
        IntervalEstimate | None
    )  # correlation of score and length (logarithm; of a pair, the difference) among answers of one label
    position_bias: IntervalEstimate | None  # of pairs: how often place A was preferred, where a place was; 0.5 is none
    inconsistent: IntervalEstimate | None  # of pairs: how often the two orders were told apart
    bins: tuple[Bin, ...]
    calibration_error: float | None  # for scores from 0 to 1
    reasons: Mapping[str, int] = field(default_factory=dict)  # why there was no verdict
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
    """Measures a judge, or any verifier, on labelled answers. A judge that compares is asked about pairs of a right and a wrong answer.

    Raises `UserError` for labels that say nothing, and for a judge that gave no verdict on right or on wrong answers.

    Args:
        reference: what names the judge.
        threshold: a score of at least this says "right".
        parallel: answers at once.
        ledger: file of answers and counts, relative to `root`, for a judge that names none: a second measurement then costs nothing.
        progress: hears how many are done.
    """
    every = merge_duplicates(labelled)
    known = [one for one in every if one.right is not None]
    if len({one.right for one in known}) < 2:
        raise UserError("the labels hold only right or only wrong answers", fix="label some of both: agentrl label RUN")
    measured = judge.without_calibration(ledger=ledger) if hasattr(judge, "without_calibration") else judge
    if hasattr(measured, "prepare"):
        measured.prepare(root=root, folder=None)
    before, began = _spent(measured), time.monotonic()
    pairs = hasattr(measured, "compare")
    try:
        verdicts = await _asked(measured, known, pairs=pairs, parallel=parallel, progress=progress)
        after = _spent(measured)
    finally:
        if hasattr(measured, "close"):
            await measured.close()
    made = _calibration(measured, verdicts, reference=reference, labels_sha256=labels_sha256, threshold=threshold)
    return _report(
        made,
        verdicts,
        pairs,
        disputed=len(every) - len(known),
        copies=len(labelled) - len(every),
        spent=_less(after, before),
        wall_s=time.monotonic() - began,
    )


async def _asked(
    judge: Any, known: Sequence[LabelledAnswer], *, pairs: bool, parallel: int, progress: Callable[[int, int], None]
) -> list[LabelledVerdict]:
    slots, done = asyncio.Semaphore(parallel), itertools.count(1)
    work: list[Callable[[], Any]]
    if pairs:
        chosen = _pairs(known)
        if not chosen:
            raise UserError(
                "no task has a right and a wrong answer, so there are no pairs to compare", fix="label more answers of each task"
            )
        work = [lambda one=one: _compared(judge, *one) for one in chosen]  # type: ignore[misc]
    else:
        work = [lambda one=one: _scored(judge, one) for one in known]  # type: ignore[misc]

    async def ask(one: Callable[[], Any]) -> LabelledVerdict:
        async with slots:
            verdict: LabelledVerdict = await one()
        progress(next(done), len(work))
        return verdict

    async with asyncio.TaskGroup() as asking:
        jobs = [asking.create_task(ask(one)) for one in work]
    return [job.result() for job in jobs]


async def _scored(judge: Any, one: LabelledAnswer) -> LabelledVerdict:
    item = one.item
    task = item.task(reference_keys=_reference_keys(judge))
    about: dict[str, Any] = {"label": bool(one.right), "chars": len(item.answer), "task_id": item.task_id}
    given = await _called(judge, lambda: judge(task, item.episode()))
    if isinstance(given, str):
        return LabelledVerdict(score=None, reason=given, **about)
    if not isinstance(given, Score) or given.value is None or not math.isfinite(given.value):
        return LabelledVerdict(
            score=None, reason=given.reason if isinstance(given, Score) and given.value is None else "no finite score", **about
        )
    return LabelledVerdict(score=given.value, **about)


def _reference_keys(judge: Any) -> set[str]:
    """Where a judge, or each of an ensemble's, looks for the reference in a task's data."""
    members = getattr(judge, "judges", None)
    if isinstance(members, Mapping):
        return {key for one in members.values() for key in _reference_keys(one)}
    return {str(getattr(judge, "reference", "answer"))}


async def _compared(judge: Any, first: AnswerItem, second: AnswerItem, label: bool) -> LabelledVerdict:
    about: dict[str, Any] = {"label": label, "chars": len(first.answer) - len(second.answer), "task_id": first.task_id}
    given = await _called(judge, lambda: judge.compare(first.question, first.answer, second.answer))
    if isinstance(given, str):
        return LabelledVerdict(score=None, reason=given, **about)
    if not isinstance(given, Comparison):
        return LabelledVerdict(score=None, reason="no comparison", **about)
    places = tuple(said for said in given.shown if said)
    if given.better in (None, "tie"):
        return LabelledVerdict(score=None, reason=given.answer.reason or "it says that neither is better", places=places, **about)
    return LabelledVerdict(score=float(given.better == "first"), places=places, **about)


async def _called(judge: Any, code: Callable[[], Any]) -> Any:
    """What the judge gives, or in words what went wrong."""
    since = user_code.cancellation_count()
    try:
        limit = float(getattr(judge, "timeout_s", _TIMEOUT_S))
        return await user_code.call_user_code(code, what="judge", timeout_s=limit)
    except BaseException as error:
        user_code.reraise_if_fatal(error, since)
        return user_code.describe_error(error)


def _pairs(known: Sequence[LabelledAnswer]) -> list[tuple[AnswerItem, AnswerItem, bool]]:
    """Pairs of a right and a wrong answer to one task, and whether the first is the right one: chance decides, the same one each time."""
    tasks: dict[tuple[str, str], list[LabelledAnswer]] = {}
    for one in known:
        tasks.setdefault((one.item.task_id, one.item.question), []).append(one)
    found = []
    for (name, _), answers in sorted(tasks.items()):
        draw = random.Random(hashlib.sha256(name.encode()).digest())
        both = [(a.item, b.item) for a in answers if a.right for b in answers if not b.right and a.item.answer != b.item.answer]
        for right, wrong in draw.sample(both, min(_PAIRS, len(both))):
            found.append((right, wrong, True) if draw.random() < 0.5 else (wrong, right, False))
    return found


def _calibration(judge: Any, verdicts: Sequence[LabelledVerdict], *, reference: str, labels_sha256: str, threshold: float) -> Calibration:
    given = [one for one in verdicts if one.score is not None]
    said = [(one.label, is_at_least(one.score, threshold)) for one in given if one.score is not None]
    table, worth = AgreementTable.from_pairs(said), DesignEffects.from_pairs([one.task_id for one in given], said)
    silent = stats.design_effect([(one.task_id, float(one.score is not None)) for one in verdicts])
    if not table.rights or not table.wrongs:
        why = _reasons(verdicts)
        told = "; ".join(f"{count} times: {reason}" for reason, count in why.items())
        raise UserError(f"the judge gave no verdict on {'wrong' if table.rights else 'right'} answers. {told}", fix="look at what it says")
    return Calibration(
        identity=str(getattr(judge, "identity", "")),
        judge=reference,
        labels_sha256=labels_sha256,
        threshold=threshold,
        right_right=table.right_right,
        right_wrong=table.right_wrong,
        wrong_right=table.wrong_right,
        wrong_wrong=table.wrong_wrong,
        abstained=len(verdicts) - len(given),
        tasks=len({one.task_id for one in given}),
        agreement=stats.agreement(table, effect=worth.agreement),
        kappa=stats.kappa(table, effect=worth.agreement),
        sensitivity=stats.share(table.right_right, table.rights, effect=worth.sensitivity),
        specificity=stats.share(table.wrong_wrong, table.wrongs, effect=worth.specificity),
        informedness=stats.informedness(table, effect=worth.informedness),
        coverage=stats.share(len(given), len(verdicts), effect=silent),
        design_effect=worth.informedness,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _report(
    made: Calibration,
    verdicts: Sequence[LabelledVerdict],
    pairs: bool,
    *,
    disputed: int,
    copies: int,
    spent: JudgeUsage | None,
    wall_s: float,
) -> CalibrationReport:
    given = [(one.score, one) for one in verdicts if one.score is not None]
    scores, labels = [score for score, _ in given], [one.label for _, one in given]
    lengths = [math.copysign(math.log1p(abs(one.chars)), one.chars) for _, one in given]
    bins = stats.reliability(scores, labels)
    sides = Counter(place for one in verdicts for place in one.places)
    both = [one for one in verdicts if len(one.places) == 2]
    apart = sum(one.score is None and set(one.places) != {"tie"} for one in both)
    preferred = sides["A"] + sides["B"]
    return CalibrationReport(
        calibration=made,
        pairs=pairs,
        disputed=disputed,
        copies=copies,
        length_bias=stats.partial_correlation(lengths, scores, labels),
        position_bias=stats.share(sides["A"], preferred) if preferred else None,
        inconsistent=stats.share(apart, len(both)) if both else None,
        bins=bins,
        calibration_error=stats.calibration_error(bins) if all(0 <= score <= 1 for score in scores) else None,
        reasons=_reasons(verdicts),
        spent=spent,
        wall_s=wall_s,
    )


def _reasons(verdicts: Sequence[LabelledVerdict]) -> dict[str, int]:
    """Why there was no verdict, the most frequent first."""
    counts = Counter(user_code.printable(one.reason, 200) for one in verdicts if one.score is None)
    return dict(counts.most_common(_REASONS))


def _spent(judge: Any) -> JudgeUsage | None:
    spent = judge.spent() if hasattr(judge, "spent") else None
    return spent if isinstance(spent, JudgeUsage) else None


def _less(after: JudgeUsage | None, before: JudgeUsage | None) -> JudgeUsage | None:
    return after.minus(before) if after is not None and before is not None else None
