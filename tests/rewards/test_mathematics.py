"""Mathematics: every notation of the value is right; restated questions and neighbouring values are wrong."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.records import Message
from rewards.mathematics import Mathematics, expression, mathematics, verdict
from rewards.notation import read
from rewards.scalars import literal
from rewards.signs import Unreadable
from tests.judging import episode, judged, task, value

NOTATIONS = Path(__file__).parent / "data" / "notations.tsv"


def equal(truth: str, answer: str, **options: Any) -> bool:
    """Returns the verdict of the judging process, computed in this process."""
    request = {"truth": expression(truth), "answer": expression(answer), "decimals": 6, "unevaluated": False, "prompt": ""} | options
    outcome, reason = verdict(request)
    assert outcome in ("equal", "different"), f"{truth}: {outcome}, {reason}"
    return outcome == "equal"


def pairs(*, of_equal_values: bool) -> list[tuple[str, str]]:
    """Truths and answers in `data/notations.tsv`. The first column is `equal` or the reason why the answer is wrong."""
    rows = [line.split("\t") for line in NOTATIONS.read_text(encoding="utf-8").splitlines()[1:]]
    return [(truth, answer) for kind, truth, answer in rows if (kind == "equal") == of_equal_values]


@pytest.mark.slow
def test_honest_forms_of_the_value_are_right() -> None:
    assert [pair for pair in pairs(of_equal_values=True) if not equal(*pair)] == []


def test_other_values_and_non_values_are_wrong() -> None:
    assert [pair for pair in pairs(of_equal_values=False) if equal(*pair)] == []


def test_a_power_is_a_number_where_unevaluated_forms_are_allowed() -> None:
    assert not equal("1024", "2^{10}") and equal("1024", "2^{10}", unevaluated=True)
    assert not equal("1024", "2^{9}", unevaluated=True)


@given(st.integers(0, 10**30), st.data())
def test_changed_digit_is_wrong_in_every_form(number: int, data: st.DataObject) -> None:
    digits = str(number)
    at = data.draw(st.integers(0, len(digits) - 1))
    changed = digits[:at] + data.draw(st.sampled_from([d for d in "0123456789" if d != digits[at]])) + digits[at + 1 :]
    grouped = f"{int(changed):,}"
    for form in (changed, f"{changed}.0", f"x={changed}", f"\\boxed{{{changed}}}", grouped, grouped.replace(",", "\\,"), f"{changed}e0"):
        assert not equal(digits, form), form


RESTATED = (
    "{a}+{b}",
    "{b}+{a}+0",
    "({a}+{b})",
    "{n}\\cdot 1",
    "\\frac{{{n}}}{{1}}",
    "\\frac{{{n}\\cdot 2}}{{2}}",
    "\\sqrt{{{n}^2}}",
    "{n}^1",
    "-(-{n})",
    "|{n}|",
    "\\lfloor {n} \\rfloor",
    "\\ln(e^{{{n}}})",
    "\\log_2(2^{{{n}}})",
    "{n}=x",
    "{a}+{b}={n}",
    "{n}={n}",
    "x={a}+{b}",
    "x=x={n}",
    "{n}\\approx {n}",
    "{n}\\text{{ or more}}",
    "{n},{n}",
    "{n} or {a}",
    "[{n},{n}]",
    "{n}!/{n}!\\cdot {n}",
    "\\int_0^{{{n}}} 1 dx",
    "\\sum_{{k=1}}^{{{n}}} 1",
    "\\lim_{{x\\to 0}} ({n}+x)",
    "{n}+x-x",
    "{n}\\sin^2 x+{n}\\cos^2 x",
)


@given(st.integers(2, 99), st.integers(2, 99), st.sampled_from(RESTATED))
def test_restated_question_is_wrong(a: int, b: int, form: str) -> None:
    assert not equal(str(a + b), form.format(a=a, b=b, n=a + b))


@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([form for form in RESTATED[:13] + RESTATED[23:] if "or more" not in form]))
def test_restated_question_is_right_with_unevaluated(a: int, b: int, form: str) -> None:
    assert equal(str(a + b), form.format(a=a, b=b, n=a + b), unevaluated=True)


@pytest.mark.parametrize(
    "answer", ["3=4=5", "5 \\approx 6", "5\\text{garbage}", "x=5=5", "5 or 6", "5\\%", "\\text{five}", "4", "10\\,0000+5", "1/05"]
)
def test_other_kinds_are_wrong_even_with_unevaluated(answer: str) -> None:
    assert not equal("5", answer, unevaluated=True)


literals = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-1000, 1000, places=8, allow_nan=False).map(lambda value: f"{value:f}"),
    st.tuples(st.integers(-99, 99), st.integers(2, 99)).map(lambda pair: f"\\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(-30, 30)).map(lambda pair: f"{pair[0]} \\times 10^{{{pair[1]}}}"),
    st.integers(-999, 999).map(lambda value: f"{value}\\%"),
)


def known(text: str) -> Fraction | None:
    return literal(read(text))


@given(literals, literals)
def test_numbers_are_compared_alike_both_ways_and_with_themselves(text: str, other_text: str) -> None:
    assume(known(text) is not None and known(other_text) is not None)
    assert equal(text, text)
    if known(text) == known(other_text):
        assert equal(text, other_text)
    size = min(abs(known(text) or 0), abs(known(other_text) or 0))
    if size > 1 and abs((known(text) or 0) - (known(other_text) or 0)) > Fraction(1, 10**5):
        assert not equal(text, other_text) and not equal(other_text, text)


@given(st.text("ABCDEF", min_size=2, max_size=5).filter(lambda word: len(set(word)) > 1))
def test_letters_of_a_name_are_ordered(word: str) -> None:
    for other in {"".join(letters) for letters in permutations(word)} - {word}:
        assert not equal(word, other) and not equal(f"\\text{{{word}}}", other)


@given(st.integers(2, 16), st.integers(2, 16), st.integers(0, 5000))
def test_numeral_keeps_its_base(base: int, other: int, number: int) -> None:
    assume(base != other and 10 not in (base, other))
    digits = ""
    rest = number
    while rest or not digits:
        digits, rest = "0123456789ABCDEF"[rest % base] + digits, rest // base
    assume(digits[0].isdigit())  # A_{11} is a variable
    assert equal(f"{digits}_{{{base}}}", f"({digits})_{{{base}}}")
    assert not equal(f"{digits}_{{{base}}}", digits) and not equal(str(number), f"{digits}_{{{base}}}")
    if all(int(digit, 16) < other for digit in digits):
        assert not equal(f"{digits}_{{{base}}}", f"{digits}_{{{other}}}")


SIGNS = [*"0123456789abxyzAB+-*/^_=<>()[]{}|!,;:%$& \\.'", "\\frac", "\\sqrt", "\\sin", "\\log", "\\pi", "\\text{ab}", "\\\\", "\\left"]
SIGNS += ["\\right", "\\begin{pmatrix}", "\\end{pmatrix}", "\\cup", "\\pm", "\\circ", "\\overline{3}", "\u00bd", "\u00b2", "\u2212"]
pieces = st.lists(st.sampled_from(SIGNS), max_size=40).map("".join)


@given(pieces | st.text(max_size=60))
def test_any_text_is_parsed_or_unreadable(text: str) -> None:
    try:
        node = read(text)
    except (Unreadable, ZeroDivisionError):
        return
    assert node.kind


NAMED = [
    ("18", "\\$18", "She sells 9 for $2 each. How many dollars?"),
    ("18", "$18.00", "How many dollars?"),
    ("18", "18 dollars", "She had 18 dollars. How many dollars has she now?"),
    ("70000", "\\$70,000", "He buys a house for $80,000. How much profit?"),
    ("12", "12\\text{ apples}", "How many apples?"),
    ("16\\pi", "16\\pi \\text{ cm}^2", "What is its area in square centimeters?"),
    ("12", "12\\text{ square units}", "How many square units?"),
    ("\\frac{9}{7}", "\\frac{9}{7} \\text{ hours}", "It took \\frac{9}{7} hours. In how many hours?"),
    ("12", "12 cm^2", "What is the area in cm^2?"),
    ("12\\text{ cm}^2", "12 cm^{2}", ""),
    ("12\\text{ cm}^{2}", "12\\text{ cm}\u00b2", ""),
    ("5", "5 men", "How many men are needed?"),
    ("5 men", "5", "How many men are needed?"),
    ("3\\text{ men}", "3 men", ""),
    ("3 men", "3\\text{ men}", ""),
    ("15", "15 men", "Find the least number of men."),
    ("15 men", "15", "Find the least number of men."),
    ("20", "20 cow", "A farmer has 20 cows, and each cow eats 3 kg. What is the total number of portions?"),
    ("7", "7 pts", "What is her score in pts?"),
    ("15", "x = 15\\text{ cm}", "Find $x$ in cm."),
    ("1, 2", "1\\text{ cm}, 2\\text{ cm}", "Find both in cm."),
    ("90", "90^\\circ", "How many degrees?"),
    ("18", "18\\%", "What percent is left? 18\\% were there."),
    ("18\\%", "18", "What percent is left?"),
    ("18\\%", "0.18", "What percent is left?"),
    ("0.18", "18\\%", "What percent is left?"),
    ("-18", "-18\\%", "By what percent does it change?"),
    ("-18\\%", "-18", "By what percent does it change?"),
]
NOT_NAMED = [
    ("5", "5 cm", "How many metres?"),
    ("12\\text{ cm}^2", "12 cm^3", ""),
    ("12\\text{ cm}^{2}", "12 cm", ""),
    ("5", "5 men", "How many cats?"),
    ("5", "5 xy", "Divide $10 xy$ by 2."),
    ("5 xy", "5", "Divide 10xy by 2, where $xy > 0$."),
    ("5", "5\\text{ or six}", "Is it five or six?"),
    ("5", "5\\text{ or 6}", "Is it 5 or 6?"),
    ("90", "90^\\circ", "How many apples?"),
    ("5", "5\\%", "What is 20% of 25?"),
    ("18\\%", "18", "20 of 100 are there, and 2 leave."),
    ("18", "0.18", "What percent?"),
    ("18", "18\\%\\%", "What percent?"),
    ("18", "1800\\%", "What percent?"),
    ("-18", "-1800 percent", "By what percent does it change?"),
    ("-18", "-1800\\%", "By what percent does it change?"),
    ("18", "18\\%", "He pays the 20 percent tax. How much is left?"),
    ("5", "5\\text{ people}", "How many thousands of people?"),
    ("5", "6 apples", "How many apples?"),
    ("120", "5!\\text{ ways}", "In how many ways?"),
    ("5\\text{ m}", "5\\text{ cm}", "How many m? Not cm."),
    ("5", "5\\text{ miles}", "How many mph is that?"),
    ("5", "5 miles", "How many miles per hour does he go?"),
    ("25", "25\\text{ cm}", "A side is 5 cm long. What is the area?"),
    ("18", "\\$18", "She has \\$36 and an apple costs \\$2. How many apples can she buy?"),
]


@pytest.mark.parametrize(("truth", "answer", "question"), NAMED)
def test_unit_named_by_the_question_is_accepted(truth: str, answer: str, question: str) -> None:
    assert equal(truth, answer, prompt=question)


@pytest.mark.parametrize(("truth", "answer", "question"), NOT_NAMED)
def test_other_unit_is_wrong(truth: str, answer: str, question: str) -> None:
    assert not equal(truth, answer, prompt=question)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [("2xy", "2 xy"), ("2cd^2", "2 cd^2"), ("2 c d^2", "2 cd^2"), ("-3 ab", "-3ab"), ("2ab+x", "x + 2 ab"), ("2 xy", "2yx")],
)
def test_a_space_between_a_number_and_variables_changes_nothing(truth: str, answer: str) -> None:
    assert equal(truth, answer, prompt="Simplify.")
    assert not equal("2 xy", "2", prompt="Simplify $xy + xy$.")


async def test_expression_of_the_question_is_wrong() -> None:
    async def score_of(question: str, truth: str, answer: str, verifier: Mathematics = mathematics) -> float | None:
        math_task = replace(task(answer=truth), prompt=(Message(role="user", content=question),))
        return (await judged(verifier, math_task, episode(answer))).value

    assert await score_of("Expand $(x+1)^2$.", "x^2+2x+1", "(x + 1)^2") == 0.0
    assert await score_of("Expand $(x+1)^2$.", "x^2+2x+1", "x^2 + 2x + 1") == 1.0
    assert await score_of("Factor x^2 + 2x + 1", "(x+1)^2", "x^2+2x+1") == 0.0
    for form in ("\\frac{1}{2}", "\\dfrac12", "1/2"):
        assert await score_of("Write \\(\\frac{1}{2}\\) as a decimal.", "0.5", form) == 0.0
    assert await score_of("Sort 3, 1, 2.", "1, 2, 3", "3, 1, 2") == 0.0
    assert await score_of("Which is larger, 1/2 or 2/3?", "\\frac{2}{3}", "2/3") == 1.0
    assert await score_of("Is 5 prime, or 6?", "5", "5") == 1.0
    assert await score_of("What is 12x+10?", "2x+1", "2x+1") == 1.0
    assert await score_of("Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2", Mathematics(unevaluated=True)) == 1.0


async def test_the_option_and_the_reason_reach_the_score() -> None:
    assert await value(mathematics, "\\int_0^1 x^2 dx", answer="1/3") == 0.0
    assert await value(mathematics, "\\int_0^1 x^2 dx", answer="1/3", mathematics={"unevaluated": True}) == 1.0
    score = await judged(mathematics, task(answer="5"), episode("2+3"))
    assert score.value == 0.0 and "is not evaluated" in score.evidence
    score = await judged(mathematics, task(answer="5"), episode("5 \\approx 6"))
    assert score.value == 0.0 and "no value can be read" in score.evidence


async def test_sign_before_a_brace_does_not_escape_it() -> None:
    assert expression("\\begin{pmatrix} 1 \\\\{2} \\end{pmatrix}") != ""
    assert await value(mathematics, "$\\begin{pmatrix} 1 \\\\{2} \\end{pmatrix}$", answer="\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}") == 1.0
