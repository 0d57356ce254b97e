"""Reports the status of each case in an evaluation (passed, failed or unscored), with an example, as text, JSON and JUnit XML."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

from agentrl.evaluation.results import CaseAttempt, attempt_passes
from agentrl.failure.capture import capture_reason
from agentrl.failure.case import Case
from agentrl.failure.timeline import one_line, render_trace, truncate_middle
from agentrl.failure.trace import CaptureReason, Trace, deciding_tag
from agentrl.failure.triage import TriageRule, tag_by_rules
from agentrl.records import ScoredEpisode

_TAIL = 4000  # maximum characters of a transcript
_WORDS = 2000  # maximum characters of an answer, a reason or evidence
# Characters that XML 1.0 does not allow (section 2.2). The output of models, tools and verifiers may contain them.
_NO_XML = re.compile("[^\t\n\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")  # some of them reverse the direction of text


class CaseStatus(StrEnum):
    """The result of a case."""

    PASSED = "passed"  # the mean score of its attempts reaches its threshold
    FAILED = "failed"  # the mean of the scored attempts does not reach it
    UNSCORED = "unscored"  # an attempt has no score, and the mean of the scored attempts, if any, reaches the threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleAttempt:
    """The attempt with the lowest score at a case that did not pass or, if no attempt is scored, an unscored attempt.

    All text in the fields is untrusted.
    """

    episode: str
    score: float | None
    answer: str | None
    reason: str  # why there is no score; empty if there is a score
    evidence: str  # the verifier's evidence
    tag: str  # kind of failure, according to the triage rules
    turn: int | None  # the first failing turn, counted from 1
    tail: str  # the end of the transcript, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The result of one case in one evaluation."""

    suite: str
    case: Case
    threshold: float
    attempts: tuple[CaseAttempt, ...]
    example: ExampleAttempt | None = None  # None if the case passed or has no attempts

    @property
    def scores(self) -> tuple[float | None, ...]:
        """The score of each attempt; None means unscored."""
        return tuple(attempt.score for attempt in self.attempts)

    @property
    def mean(self) -> float | None:
        """The mean score of the scored attempts; None if no attempt is scored."""
        return _mean(self.scores)

    @property
    def status(self) -> CaseStatus:
        """The status of the case."""
        return case_status(self.scores, self.threshold)

    @property
    def question(self) -> str:
        """The last message of the task's prompt."""
        return self.case.task.question

    def as_json(self) -> dict[str, Any]:
        """Returns the outcome as JSON data."""
        return {
            "suite": self.suite,
            "case": self.case.id,
            "verdict": str(self.status),
            "score": self.mean,
            "scores": list(self.scores),
            "threshold": self.threshold,
            "baseline": None if self.case.baseline is None else asdict(self.case.baseline),
            "question": truncate_middle(self.question, _WORDS),
            "wall_s": sum(attempt.wall_s for attempt in self.attempts),
            "shown": None if self.example is None else asdict(replace(self.example, tail="")),
        }


def case_status(scores: Sequence[float | None], threshold: float) -> CaseStatus:
    """Returns the status of a case whose attempts have these scores; unscored if there are no attempts."""
    mean = _mean(scores)
    if mean is not None and not attempt_passes(mean, threshold):
        return CaseStatus.FAILED
    return CaseStatus.UNSCORED if mean is None or None in scores else CaseStatus.PASSED


def _mean(scores: Sequence[float | None]) -> float | None:
    counted = [score for score in scores if score is not None]
    return math.fsum(counted) / len(counted) if counted else None


def case_outcome(
    suite: str,
    case: Case,
    attempts: Iterable[tuple[CaseAttempt, ScoredEpisode]],
    *,
    threshold: float,
    rules: Sequence[TriageRule],
    origin: Mapping[str, str],
) -> CaseOutcome:
    """Returns the outcome of a case, given its attempts. `threshold` is used if the case does not set one."""
    pairs = sorted(attempts, key=lambda pair: pair[0].number)
    bar = threshold if case.threshold is None else case.threshold
    outcome = CaseOutcome(suite=suite, case=case, threshold=bar, attempts=tuple(one for one, _ in pairs))
    if outcome.status is CaseStatus.PASSED or not pairs:
        return outcome
    attempt, scored = min(pairs, key=lambda pair: math.inf if pair[0].score is None else pair[0].score)
    return replace(outcome, example=_shown(case, attempt, scored, bar, rules, origin))


def _shown(
    case: Case, attempt: CaseAttempt, scored: ScoredEpisode, bar: float, rules: Sequence[TriageRule], origin: Mapping[str, str]
) -> ExampleAttempt:
    reason = capture_reason(scored, threshold=bar) or CaptureReason.FAILED
    bare = Trace(
        id=attempt.episode, why=reason, task=case.task, episode=scored.episode, score=scored.score, phase="eval", origin=dict(origin)
    )
    trace = replace(bare, tags=tag_by_rules(bare, rules))
    tag = deciding_tag(trace.tags)
    assert tag is not None, "rules give every trace a tag"
    text = render_trace(trace)
    tail = text if len(text) <= _TAIL else f"... {len(text) - _TAIL} earlier characters are not shown ...\n{text[-_TAIL:]}"
    return ExampleAttempt(
        episode=attempt.episode,
        score=attempt.score,
        answer=None if scored.episode.answer is None else truncate_middle(scored.episode.answer, _WORDS),
        reason=truncate_middle(attempt.reason, _WORDS),
        evidence=truncate_middle(scored.score.evidence, _WORDS),
        tag=tag.name,
        turn=None if tag.turn is None else tag.turn + 1,
        tail=tail,
    )


def worst_first(outcomes: Iterable[CaseOutcome]) -> list[CaseOutcome]:
    """Sorts outcomes by status (failed, unscored, passed), and by score within each status, the lowest first."""
    order = {CaseStatus.FAILED: 0, CaseStatus.UNSCORED: 1, CaseStatus.PASSED: 2}
    return sorted(outcomes, key=lambda one: (order[one.status], one.mean if one.mean is not None else 0.0, one.suite, one.case.id))


def summary_line(one: CaseOutcome) -> str:
    """Returns one line with the score, the threshold, the number of attempts, and the baseline's score if there is one."""
    score = "-" if one.mean is None else f"{one.mean:.2f}"
    missing = sum(score is None for score in one.scores)
    text = f"{score} of {one.threshold:g} in {len(one.scores)} attempt{'s' if len(one.scores) != 1 else ''}"
    text += f", {missing} unscored" if missing else ""
    if (pinned := one.case.baseline) is not None and pinned.mean is not None:
        who = f"version {pinned.version}" if pinned.version is not None else one_line(pinned.model, 60)
        text += f" (baseline {pinned.mean:.2f}, {who})"
    return text


def detail_lines(one: CaseOutcome) -> list[str]:
    """Returns printable lines about a case that did not pass: question, answer, reason, first failing turn, and the note of the case."""
    lines = [f"question  {one_line(one.question, 200)}"]
    if one.example is not None:
        at = "" if one.example.turn is None else f" at turn {one.example.turn}"
        lines.append(f"answer    {'(none)' if one.example.answer is None else one_line(one.example.answer, 200)}")
        lines += [f"unscored  {one_line(one.example.reason)}"] if one.example.reason else []
        lines += [f"evidence  {one_line(one.example.evidence)}"] if one.example.evidence.strip() else []
        lines += [f"failure   {one_line(one.example.tag, 60)}{at}"] if one.example.tag else []
    if one.case.note.strip():
        lines.append(f"note      {one_line(one.case.note)}{f' ({one_line(one.case.by, 60)})' if one.case.by else ''}")
    return lines


def show_command(one: CaseOutcome, folder: Path) -> str:
    """Returns the command that shows the example attempt of a case; empty if there is none."""
    return "" if one.example is None else shlex.join(["agentrl", "failures", "show", str(folder), one.example.episode])


def junit_xml(outcomes: Sequence[CaseOutcome], *, folder: Path, policy: str, at: str = "") -> bytes:
    """Returns an evaluation as JUnit XML for CI systems, with a test suite for each suite and a test case for each case.

    Suites are in the order of their first case. An unscored case is reported as an error, not as a failure.

    Args:
        folder: the run folder, which appears in the commands that show an episode.
        at: start time of the evaluation in ISO 8601.
    """
    root = xml.Element("testsuites", {"name": "agentrl", **_counts(outcomes)})
    for name in dict.fromkeys(outcome.suite for outcome in outcomes):
        cases = [outcome for outcome in outcomes if outcome.suite == name]
        suite = xml.SubElement(root, "testsuite", {"name": xml_text(name), **_counts(cases), **({"timestamp": xml_text(at)} if at else {})})
        about = xml.SubElement(suite, "properties")
        xml.SubElement(about, "property", name="policy", value=xml_text(policy))
        for outcome in cases:
            _add(suite, outcome, folder)
    xml.indent(root)
    written: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def xml_text(text: str) -> str:
    """Returns the text with U+FFFD in place of each character that is invisible or that XML does not allow."""
    return _INVISIBLE.sub("\ufffd", _NO_XML.sub("\ufffd", text))


def _add(suite: xml.Element, one: CaseOutcome, folder: Path) -> None:
    case = xml.SubElement(
        suite,
        "testcase",
        classname=xml_text(one.suite),
        name=xml_text(one.case.id),
        time=f"{sum(attempt.wall_s for attempt in one.attempts):.3f}",
    )
    if one.status is CaseStatus.PASSED:
        return
    kind = "failure" if one.status is CaseStatus.FAILED else "error"
    tag = one.example.tag if one.example is not None and one.example.tag else str(one.status)
    element = xml.SubElement(case, kind, type=xml_text(tag), message=xml_text(summary_line(one)))
    tail = ["", one.example.tail] if one.example is not None else []
    element.text = xml_text("\n".join([*detail_lines(one), *tail, "", show_command(one, folder)]))


def _counts(outcomes: Sequence[CaseOutcome]) -> dict[str, str]:
    verdicts = [outcome.status for outcome in outcomes]
    spent = sum(attempt.wall_s for outcome in outcomes for attempt in outcome.attempts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(CaseStatus.FAILED)),
        "errors": str(verdicts.count(CaseStatus.UNSCORED)),
        "skipped": "0",
        "time": f"{spent:.3f}",
    }
