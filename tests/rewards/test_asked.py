"""Units of answers to truths without a unit: only those that the question asks for are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Message
from rewards.asked import names_unit
from rewards.mathematics import verdict
from rewards.numeric import numeric
from tests.judging import episode, judged, task

ASKED = [
    ("How many mph is that?", "mph"),
    ("How many miles per hour does he go?", "mph"),
    ("How many miles per hour does he go?", "miles per hour"),
    ("How many miles per hour does he go?", "miles/hour"),
    ("He drives 60 miles in 2 hours. What is his speed in miles per hour?", "mph"),
    ("How many miles does he drive in 2 hours?", "miles"),
    ("How many miles does he drive in 2 hours?", "mi"),
    ("How many more minutes does it take?", "minutes"),
    ("How many red apples are left?", "apples"),
    ("How many red apples are left?", "red apples"),
    ("In how many ways can they sit?", "ways"),
    ("Find the number of students.", "students"),
    ("What is its area in square centimeters?", "cm^2"),
    ("What is its area in square centimeters?", "square cm"),
    ("How many square feet is it?", "sq ft"),
    ("How many cubic inches is it?", "in^3"),
    ("How many inches is it?", "in"),
    ("Find $x$ in cm.", "cm"),
    ("Give the length in meters.", "m"),
    ("A side is 5 cm long. What is the perimeter?", "cm"),
    ("A side is 5 cm long. What is the area?", "cm^2"),
    ("An edge is 5 cm long. What is the volume?", "cm^3"),
    ("He drives at 60 mph. How fast is that after a rest?", "mph"),
    ("She works 5 hours and then 3 hours. How long does she work?", "hours"),
    ("They have 5 apples and buy 3 apples. What is the total?", "apples"),
    ("How many square units?", "square units"),
    ("What is the distance between the points?", "units"),
    ("How many dollars does she earn?", "$"),
    ("How many dollars does she earn?", "dollars"),
    ("Each costs $5. How much does she pay?", "$"),
    ("Each costs $5. How much does she pay?", "dollars"),
    ("How many degrees is the angle?", "deg"),
    ("What is the measure of angle $ABC$?", "degrees"),
    ("How many pages a day does he read?", "pages"),
]
NOT_ASKED = [
    ("How many mph is that?", "miles"),
    ("How many mph is that?", "hours"),
    ("How many mph is that?", "km/h"),
    ("How many miles per hour does he go?", "miles"),
    ("How many miles per hour does he go?", "hour"),
    ("How many miles per hour does he go?", "per hour"),
    ("How many miles per gallon does it use?", "miles"),
    ("How many students per class are there?", "students"),
    ("He drives 60 miles in 2 hours. What is his speed in miles per hour?", "miles"),
    ("He drives 60 miles in 2 hours. What is his speed?", "miles"),
    ("He drives 60 miles in 2 hours. What is his speed?", "hours"),
    ("He drives a distance of 60 miles in 2 hours. Find his speed.", "miles"),
    ("How many miles does he drive in 2 hours?", "hours"),
    ("How many apples can she buy for $5?", "$"),
    ("How many apples can she buy for 5 dollars?", "dollars"),
    ("How many cents is it?", "$"),
    ("How many apples are there? An angle is 90 degrees.", "deg"),
    ("What is its area in square centimeters?", "cm"),
    ("What is its area in square centimeters?", "mm^2"),
    ("What is its area in square centimeters?", "centimeters"),
    ("A side is 5 cm long. What is the area?", "cm"),
    ("A side is 5 cm long. What is the perimeter?", "cm^2"),
    ("A side is 5 cm long. What is the volume?", "cm^2"),
    ("How many thousand people live there?", "people"),
    ("5 thousand people live there. What is it?", "thousand"),
    ("5 thousand people live there. What is it?", "thousand people"),
    ("What is the value in the box?", "in"),
    ("What is $m$ if a side is 5?", "m"),
    ("What is $2^3$?", "^3"),
    ("Is it five or six?", "or six"),
    ("How many metres?", "cm"),
    ("Give the length in meters.", "feet"),
    ("Give the length in meters.", "km"),
    ("What is it?", "apples"),
    ("What is it?", ""),
    ("", "cm"),
    ("What is it, per hour?", "per"),
]


@pytest.mark.parametrize(("question", "unit"), ASKED)
def test_requested_units_are_accepted(question: str, unit: str) -> None:
    assert names_unit(question, unit)


@pytest.mark.parametrize(("question", "unit"), NOT_ASKED)
def test_other_units_are_wrong(question: str, unit: str) -> None:
    assert not names_unit(question, unit)


@given(st.text(max_size=200), st.text(max_size=50))
def test_any_text_is_accepted(question: str, unit: str) -> None:
    assert names_unit(question, unit) in (True, False)


@pytest.mark.parametrize("text", ["how many " * 20_000, "in a " * 50_000, "a " * 100_000, "1 / " * 60_000, "m^2 " * 60_000])
def test_long_question_takes_little_time(text: str) -> None:
    names_unit(text[:20_000], "apples of my eye")


BOTH = [(*pair, 1.0) for pair in ASKED] + [(*pair, 0.0) for pair in NOT_ASKED if pair[1].replace("$", "a")[:1].isalpha()]


@pytest.mark.parametrize(("question", "unit", "due"), BOTH)
async def test_both_numeric_verifiers_use_it(question: str, unit: str, due: float) -> None:
    written = {"$": "$5"}.get(unit, f"5 {unit}")
    one = replace(task(answer="5"), prompt=(Message(role="user", content=question),))
    assert (await judged(numeric, one, episode(written))).value == due
    latex = {"$": "\\$5", "deg": "5^\\circ"}.get(unit, f"5\\text{{ {unit}}}")
    told, _ = verdict({"truth": "5", "answer": latex, "decimals": 6, "unevaluated": False, "prompt": question})
    assert told == ("equal" if due else "different")
