"""Promoting traces to cases, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.failure.case import load_suite
from agentrl.failure.overlap import Overlap
from agentrl.failure.promote import promote
from agentrl.failure.trace import CaptureReason, Tag, Trace
from agentrl.records import EnvironmentSpec
from agentrl.records.environment import RETURN

from .traces import imported_trace, python, submit, task, trace, turn

STEPS = (turn(python("print(97)", "97")), turn(submit("97")))
TRACE = replace(trace(*STEPS, name="g000012-3-a0", answer="97"), tags=(Tag(name="wrong_answer", by="rules", confidence=0.3),))


def test_a_case_contains_the_task_and_its_origin(tmp_path: Path) -> None:
    (added,) = promote([TRACE], tmp_path / "suite", note="seen twice", by="me", threshold=0.75, repeats=4)
    suite = load_suite(tmp_path / "suite")
    (case,) = suite.cases
    assert case.task == TRACE.task and case.tags == TRACE.tags and case.note == "seen twice"
    assert case.trace == "r:g000012-3-a0" and case.id.startswith("sum-") and added.path == tmp_path / "suite" / "cases" / f"{case.id}.json"
    assert case.origin == {
        "run": "r", "trace": "g000012-3-a0", "phase": "train", "step": "2", "why": "failed", "versions": "3", "by": "me"
    }  # fmt: skip
    assert (case.by, case.threshold, case.repeats) == ("me", 0.75, 4)
    assert case.baseline is not None and (case.baseline.version, case.baseline.scores, case.baseline.mean) == (3, (0.0,), 0.0)


def environment_trace(threshold: float | None) -> Trace:
    assert TRACE.task is not None
    spec = EnvironmentSpec(ref="gymnasium:CartPole-v1", pass_threshold=threshold)
    return replace(TRACE, task=replace(TRACE.task, environment=spec, verifiers=(RETURN,)))


@pytest.mark.parametrize(
    ("declared", "override", "threshold"), [(475.0, None, 475.0), (475.0, 0.75, 0.75), (1.0, None, None), (None, 0.75, 0.75)]
)
def test_a_case_has_the_threshold_of_its_environment_unless_one_is_given(
    declared: float | None, override: float | None, threshold: float | None, tmp_path: Path
) -> None:
    promote([environment_trace(declared)], tmp_path, threshold=override)
    assert load_suite(tmp_path).cases[0].threshold == threshold


def test_a_case_without_any_threshold_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no pass threshold\n.*--threshold"):
        promote([environment_trace(None)], tmp_path)


def test_an_unscored_trace_gives_no_baseline(tmp_path: Path) -> None:
    assert TRACE.score is not None
    promote([replace(TRACE, score=replace(TRACE.score, value=None, reason="no judge"))], tmp_path)
    assert load_suite(tmp_path).cases[0].baseline is None


def test_a_task_is_added_once_and_near_duplicates_are_reported(tmp_path: Path) -> None:
    repeated = replace(TRACE, id="g000099-0-a0")
    twin = trace(*STEPS, name="twin", of=task(files={"b.csv": "amount\n400\n12\n"}))
    other = trace(*STEPS, name="other", of=task("What is the mean?"))
    added = promote([TRACE, repeated, other], tmp_path)
    assert [(promotion.trace, promotion.likeness, promotion.path is None) for promotion in added] == [
        ("g000012-3-a0", None, False),
        ("g000099-0-a0", Overlap.SAME, True),
        ("other", None, False),
    ]
    assert "already" in added[1].summary
    (late,) = promote([twin], tmp_path)
    assert late.likeness is Overlap.TWIN and late.case == added[0].case and late.path is not None and "near duplicate" in late.summary
    assert len(load_suite(tmp_path).cases) == 3


@pytest.mark.parametrize(
    ("unusable", "message"), [(imported_trace(), "contains no task"), (replace(TRACE, why=CaptureReason.FAULT), "records a fault")]
)
def test_an_unusable_trace_is_an_error_before_anything_is_written(tmp_path: Path, unusable: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        promote([TRACE, unusable], tmp_path / "suite")  # type: ignore[list-item]
    assert not (tmp_path / "suite").exists()


def test_a_hostile_kind_gives_a_plain_case_id(tmp_path: Path) -> None:
    hostile = trace(*STEPS, of=task(data={"kind": "../../etc\x00\x1b[31m/" + "x" * 200, "answer": "1"}))
    (added,) = promote([hostile], tmp_path)
    assert added.path is not None and added.path.parent == tmp_path / "cases" and len(added.path.name) < 80 and added.path.name.isascii()
