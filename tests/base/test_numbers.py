"""Comparison of numbers: integers compare exactly, tolerances are relative to the true value, and no constant is near every number."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.base.numbers import LONGEST_NUMBER, is_near, is_whole, parse_number, plural, same_number, student_t_quantile

whole_numbers = st.integers(-(10**25), 10**25)
tolerances = st.floats(0, 0.5)


@given(whole_numbers, whole_numbers, tolerances)
@example(12345678901234567890, 12345678901234567891, 1e-6)
def test_integers_are_the_same_only_if_equal(number: int, other: int, tolerance: float) -> None:
    for answer, truth in ((number, other), (Fraction(number), other), (number, Fraction(other))):
        assert same_number(answer, truth, relative=tolerance, absolute=tolerance) is (number == other)


@given(st.integers(0, 10**24), st.data())
def test_a_changed_digit_changes_the_number_in_every_notation(value: int, data: st.DataObject) -> None:
    digits = str(value)
    at = data.draw(st.integers(0, len(digits) - 1))
    changed = digits[:at] + data.draw(st.sampled_from([d for d in "0123456789" if d != digits[at]])) + digits[at + 1 :]
    for form in (changed, changed + ".0", changed + "e0", "+" + changed, "0" + changed):
        answer = parse_number(form)
        assert answer is not None and not same_number(answer, value, relative=1e-6, absolute=0.4), form


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_exact_comparison_is_symmetric_and_matches_python(number: float, other: float) -> None:
    assert same_number(number, other, relative=0) is same_number(other, number, relative=0) is (number == other)


@given(st.fractions().filter(bool), st.floats(0, 1e6, exclude_min=True), st.floats(0, 0.4))
@example(Fraction(3, 1000), 0.0051, 0.0)
@example(Fraction(1, 10**9), 1.0, 0.1)
def test_no_constant_is_near_under_any_tolerance(truth: Fraction, absolute: float, relative: float) -> None:
    """0 and numbers of the other sign are never near. Below the scale of the tolerance, only the relative tolerance counts."""
    assert not is_near(0, truth, relative=relative, absolute=absolute)
    assert not is_near(-truth, truth, relative=relative, absolute=absolute)
    if abs(truth) < absolute:
        assert not is_near(truth * 3 / 2, truth, relative=relative, absolute=absolute)
    else:
        assert not is_near(truth * 8 / 5, truth, relative=relative, absolute=absolute)


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), tolerances)
def test_comparing_floats_agrees_with_exact_fractions(number: float, other: float, relative: float) -> None:
    exact = is_near(Fraction(number), Fraction(other), relative=relative)
    at_bound = abs(abs(number - other) - relative * abs(other)) <= 1e-12 * abs(other)  # exactly at the bound, rounding decides
    assert at_bound or is_near(number, other, relative=relative) is exact


@pytest.mark.parametrize(
    ("answer", "truth", "relative", "absolute", "expected"),
    [
        (1.000001, 1, 1e-6, 0.0, True),
        (1.0000011, 1, 1e-6, 0.0, False),
        (0, 1e-300, 1e-6, 0.0, False),
        (1e-300, 0, 1e-6, 0.0, False),
        (0.004, 0, 0.0, 0.005, True),  # the task says so
        (-0.0, 0, 0.0, 0.0, True),
        (13.35, 13.345454545, 0.0, 0.0051, True),
        (0.0, 0.003, 0.0, 0.0051, False),
        (1234567.5, 1234567, 1e-6, 0.0, True),
        (1234567.6, 1234567, 1e-6, 0.0, False),
        (12345678901234567891.5, 12345678901234567890, 1e-6, 0.0, False),
        (0.1 + 0.2, Fraction(3, 10), 1e-9, 0.0, True),
        (9007199254740994.0, 9007199254740992.0, 1e-9, 0.0, True),  # two float sums: neither is known to be whole
        (9007199254740994.0, 9007199254740993, 1e-9, 0.0, False),
        (math.inf, 10**400, 0.5, 1.0, False),
        (math.inf, math.inf, 0.0, 0.0, True),
        (math.nan, math.nan, 0.5, 1.0, False),
        (10**400, 1.5, 0.5, 1.0, False),
    ],
)
def test_same_number(answer: float, truth: float, relative: float, absolute: float, expected: bool) -> None:
    assert same_number(answer, truth, relative=relative, absolute=absolute) is expected


@pytest.mark.parametrize("text", ["", "nan", "inf", "1e999", "1_000", "٣", "1,000", "0x2a", " 1", "1e", ".", "+-1", "½", "9" * 1001])
def test_invalid_numbers(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"), [("-0", 0), (".5", Fraction(1, 2)), ("5.", 5), ("+4.20e1", 42), ("1e-400", Fraction(1, 10**400))]
)
def test_numbers_keep_every_digit(text: str, value: Fraction) -> None:
    number = parse_number(text)
    assert number == value and number is not None and is_whole(number) is (value.denominator == 1)


def test_limits_of_parsed_numbers() -> None:
    assert parse_number("9" * LONGEST_NUMBER) == 10**LONGEST_NUMBER - 1 and parse_number("9" * (LONGEST_NUMBER + 1)) is None
    assert parse_number("1e400") == 10**400 and parse_number("1e-400") == Fraction(1, 10**400)
    assert parse_number("1e401") is None and parse_number("1e-401") is None
    assert is_whole(1e6) and is_whole(2.0**53 - 1) and is_whole(1 - 2.0**53)
    assert not is_whole(2.0**53) and not is_whole(-(2.0**53)) and not is_whole(0.5)


@pytest.mark.parametrize("kind", [float, Fraction])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("answer", "truth", "relative", "absolute", "expected"),
    [
        (0.5, 0.0, 0.0, 0.5, True),  # a difference of exactly the tolerance
        (1.5, 1.0, 0.5, 0.0, True),
        (1.5, 1.0, 0.0, 1.0, True),  # half of the true value, if it is at least the tolerance
        (1.625, 1.0, 0.0, 1.0, False),
        (0.0625, 0.03125, 0.0, 1.0, False),  # a true value below the tolerance
        (1.0, 1.0078125, 0.125, 0.0, True),
        (0.5, 0.5078125, 0.125, 0.0, True),
        (0.0, 1.5, 2.0, 0.0, False),  # 0 and the other sign are not near at any tolerance
        (-0.125, 0.125, 4.0, 0.0, False),
    ],
)
def test_differences_at_the_tolerance(
    kind: Any, sign: int, answer: float, truth: float, relative: float, absolute: float, expected: bool
) -> None:
    assert is_near(kind(sign * answer), kind(sign * truth), relative=relative, absolute=absolute) is expected


def test_default_tolerance_is_0_and_fractions_are_exact() -> None:
    assert not is_near(1.4, 1.5, relative=0) and not is_near(Fraction(7, 5), Fraction(3, 2), relative=0)
    assert is_near(Fraction(13, 10), 1.0, relative=0.3), "1.3 - 1.0 is more than 0.3 in floats"
    assert is_near(1.0, Fraction(5, 4), relative=0.2)


@pytest.mark.parametrize(("freedom", "level"), [(0, 0.95), (-1, 0.95), (3, 1.0), (3, math.nan)])
def test_an_undefined_quantile_raises(freedom: int, level: float) -> None:
    with pytest.raises(ValueError, match="has no quantile"):
        student_t_quantile(freedom, level=level)


def test_a_count_agrees_with_its_noun() -> None:
    assert [plural(count, "case") for count in (0, 1, 2, 1234)] == ["0 cases", "1 case", "2 cases", "1,234 cases"]
