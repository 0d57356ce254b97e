"""Units of answers to truths without a unit: only those that the question requests are accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Message
from rewards.asked import names_unit
from rewards.mathematics import verdict
from rewards.numeric import numeric
from tests.judging import episode, judged, task

UNITS = Path(__file__).parent / "data" / "units.tsv"
ROWS = [line.split("\t") for line in UNITS.read_text(encoding="utf-8").splitlines()[1:]]
REQUESTED = [(question, unit) for requested, unit, question in ROWS if requested == "yes"]
NOT_REQUESTED = [(question, unit) for requested, unit, question in ROWS if requested == "no"]


def test_only_requested_units_are_accepted() -> None:
    assert [pair for pair in REQUESTED if not names_unit(*pair)] == []
    assert [pair for pair in NOT_REQUESTED if names_unit(*pair)] == []


@given(st.text(max_size=200), st.text(max_size=50))
def test_any_text_is_accepted(question: str, unit: str) -> None:
    assert names_unit(question, unit) in (True, False)


@pytest.mark.parametrize("text", ["how many " * 20_000, "in a " * 50_000, "a " * 100_000, "1 / " * 60_000, "m^2 " * 60_000])
def test_long_question_takes_little_time(text: str) -> None:
    names_unit(text[:20_000], "apples of my eye")


BOTH = [(*pair, 1.0) for pair in REQUESTED] + [(*pair, 0.0) for pair in NOT_REQUESTED if pair[1].replace("$", "a")[:1].isalpha()]


async def test_both_numeric_verifiers_accept_only_requested_units() -> None:
    for question, unit, expected in BOTH:
        answer = {"$": "$5"}.get(unit, f"5 {unit}")
        numeric_task = replace(task(answer="5"), prompt=(Message(role="user", content=question),))
        assert (await judged(numeric, numeric_task, episode(answer))).value == expected, (question, unit)
        latex = {"$": "\\$5", "deg": "5^\\circ"}.get(unit, f"5\\text{{ {unit}}}")
        outcome, _ = verdict({"truth": "5", "answer": latex, "decimals": 6, "unevaluated": False, "prompt": question})
        assert outcome == ("equal" if expected else "different"), (question, unit)
