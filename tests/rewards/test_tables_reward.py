"""`exact_answer`: the accepted forms of the truth; hostile answers are wrong and not faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Episode, Message, SandboxSpec, Split, Task
from rewards.tables import exact_answer


def task(answer: str, tolerance: float = 0.0) -> Task:
    return Task(
        id="t",
        family="tables",
        prompt=(Message(role="user", content="?"),),
        tools=("submit",),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.tables:exact_answer",),
        data={"answer": answer, "tolerance": tolerance},
        split=Split.TRAIN,
    )


async def value(truth: str, answer: str | None, tolerance: float = 0.0) -> float | None:
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=answer)
    return (await exact_answer(task(truth, tolerance), episode)).value


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", "42"),
        ("42", " 42.0\n"),
        ("42", "4.2e1"),
        ("1234567", "1234567.5"),  # within 1e-6 relative
        ("São Tomé", "São Tomé\n"),
        ("0", "-0.0"),
        ("nan", "nan"),  # a truth that is text is compared as text
    ],
)
async def test_right(truth: str, answer: str) -> None:
    assert await value(truth, answer) == 1.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", None),
        ("42", ""),
        ("42", "42.1"),
        ("42", "42 rows"),
        ("42", "nan"),
        ("42", "inf"),
        ("42", "1e999"),
        ("42", "4_2"),
        ("42", "٤٢"),
        ("42", "0x2a"),
        ("42", "4" * 100_000),
        ("42", "42" + " " * 10_000),
        ("Tuvalu", "tuvalu"),
        ("Tuvalu", "Tuvalu\x00"),
        ("Tuvalu", "1"),
    ],
)
async def test_wrong(truth: str, answer: str | None) -> None:
    assert await value(truth, answer) == 0.0


async def test_rounded_and_exact_answers_are_right_within_the_tasks_tolerance() -> None:
    for answer in ("13.345454545", "13.35", "13.3454"):
        assert await value("13.345454545", answer, tolerance=0.0051) == 1.0
    for answer in ("13.3", "13.36", "13"):
        assert await value("13.345454545", answer, tolerance=0.0051) == 0.0


async def test_evidence_is_short_whatever_the_answer() -> None:
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(), answer="\U0001f600" * 900)
    assert len((await exact_answer(task("42"), episode)).evidence) < 1000


@given(st.text())
async def test_any_text_has_a_score(answer: str) -> None:
    assert await value("42", answer) in (0.0, 1.0)
