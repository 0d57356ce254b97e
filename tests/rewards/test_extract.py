"""Extraction of the answer from a submission: the last mark counts, and never more than one guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.extract import expression, final
from rewards.mathematics import mathematics
from rewards.numeric import numeric
from tests.judging import value

FINAL = [
    ("371", "371"),
    ("371.", "371"),
    ("**371**", "371"),
    ("#### 371", "371"),
    ("He pays $5 and $13.\n#### 18\n", "18"),
    ("#### 18\nThat is all.", "18"),
    ("#### 17\n#### 18", "18"),
    ("####18", "18"),
    ("#### **18**", "18"),
    ("The answer is 371.", "371"),
    ("the final answer is: 371", "371"),
    ("Answer: 371", "371"),
    ("**Answer:** 371", "371"),
    ("**Answer: 371**", "371"),
    ("**The answer is 371.**", "371"),
    ("Answer = 371", "371"),
    ("2 + 2 = 4, so the answer is 4.", "4"),
    ("The answer is 5. No, the answer is 6.", "6"),
    ("so \\boxed{371}.", "371"),
    ("\\boxed{1} and \\boxed{371}", "371"),
    ("\\boxed {371}", "371"),
    ("\\fbox{371}", "371"),
    ("The answer is \\boxed{371}.", "371"),
    ("\\boxed{1}\n#### 371", "371"),
    ("#### 1\n\\boxed{371}", "371"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{3", "3"),
]
NO_NUMBER = [
    "The answer is not 371.",
    "The answer isn't 371.",
    "The answer is 371 or 372.",
    "The answer is 370, 371",
    "371, I think",
    "It is 371.",
    "371\nThe answer is above.",
    "#### 371 or 372",
    "####",
    "#### ####",
    "\\boxed{}",
    "\\boxed{}371",
    "\\boxed{371, 372}",
    "\\boxed{",
    "371 \\boxed{}",
    "answers: 371",
    "The answer is the sum of 370 and 1.",
    "The answer is 370+1.",
    "\\boxed{370+1}",
    "#### 370+1",
]


@pytest.mark.parametrize(("text", "expected"), FINAL)
def test_the_answer_follows_the_last_mark(text: str, expected: str) -> None:
    assert final(text) == expected == expression(text)


@pytest.mark.parametrize("text", [text for text, expected in FINAL if expected == "371"])
async def test_both_numeric_verifiers_extract_the_answer(text: str) -> None:
    assert await value(mathematics, text, answer="371") == 1.0
    assert await value(numeric, text, answer="371") == 1.0
    assert await value(mathematics, text, answer="372") == 0.0
    assert await value(numeric, text, answer="372") == 0.0


@pytest.mark.parametrize("text", NO_NUMBER)
async def test_several_guesses_are_wrong(text: str) -> None:
    assert await value(mathematics, text, answer="371") == 0.0
    assert await value(numeric, text, answer="371") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so $x=5$ and $y=6$", "y=6"),
        ("\\(5\\)", "5"),
        ("\\[5\\]", "5"),
        ("$$5$$", "5"),
        ("The answer is $371$.", "371"),
        ("Since $x=6$, the answer is 5.", "5"),
        ("#### $18$", "18"),
        ("\\boxed{$5$}", "5"),
        ("\\$5", "\\$5"),
        ("$5", "$5"),
    ],
)
def test_an_expression_is_between_the_last_dollar_signs_after_the_mark(text: str, expected: str) -> None:
    assert expression(text) == expected


@given(st.text(max_size=80), st.integers(0, 999), st.sampled_from(["\\boxed{%d}", "\n#### %d", "\nThe answer is %d."]))
def test_text_before_a_mark_is_ignored(before: str, number: int, mark: str) -> None:
    if "#" not in before and "box" not in before:
        assert final(before + mark % number) == str(number)


@given(st.text(alphabet="\\{}$#*boxed answer is:=.5\n", max_size=80))
def test_the_answer_is_always_part_of_the_text(text: str) -> None:
    assert final(text) in text and expression(text) in text
