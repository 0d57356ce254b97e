"""Units, signs and currencies: one amount in every notation, and no other amount."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Message
from rewards.numeric import Numeric, numeric, quantity
from rewards.units import unit
from tests.judging import episode, judged, task, value

SAME = {
    "-$5": [
        "-$5",
        "$-5",
        "\u2212$5",
        "- $5",
        "-5 $",
        "-5 USD",
        "USD -5",
        "-US$5",
        "-$5.00",
        "($5)",
        "($5.00)",
        "-$5 USD",
        "-5 dollars",
        "\u2013$5",
    ],
    "$1,234.50": ["$1234.5", "1,234.50 USD", "+$1234.50", "1\u202f234.5 $", "US$1,234.50", "$1.2345e3"],
    "\u20ac5": ["5 \u20ac", "EUR 5", "5 EUR", "5 euros", "+\u20ac5"],
    "5 ohm": ["5 \u03a9", "5 \u2126", "0.005 k\u2126", "5 V/A", "5 ohms"],
    "300 K": ["300 \u212a", "0.3 k\u212a", "300 kelvin"],
    "2 \u00c5": ["2 \u212b", "2 A\u030a", "0.2 nm", "2 angstroms", "2e-10 m"],
    "3 \u00b5m": ["3 \u03bcm", "3 um", "0.003 mm"],
    "200000 m": ["2e5 m", "2 x 10^5 m", "2\u00d710^5 m", "2*10**5 m", "2 \u00b7 10^{5} m", "200 km", "200,000 m"],
    "180 deg": ["180\u00b0", "180 degrees", "3.14159265 rad"],
    "1 rad/s": ["1 rad s^-1", "1 rad/s", "1 rad s\u207b\u00b9", "1 rad s\u22121"],
    "1 Hz": ["1 s^-1", "1/s", "60 min^-1"],
    "9.81 m/s^2": ["9.81 m s\u207b\u00b2", "9.81 m\u2215s\u00b2", "9.81 m\u22c5s^-2"],
    "0.5": ["50%", "50 percent", ".5", "+0.50", "5e-1"],
    "\u22125": ["-5", "\u22125.0", "- 5", "\uff0d5"],
}
OTHER = {
    "-$5": ["$5", "5", "-5", "-\u20ac5", "-$50", "--$5", "-$-5", "$-5 m", "(5)", "(-$5)", "-($5)", "$$5", "-$5 EUR", "-5%"],
    "$5": ["-$5", "($5)", "\u20ac5", "5", "$5 m", "5 dollars each", "$5 or $6", "$5 $6"],
    "5": ["(5)", "+-5", "5 or 6", "5 6", "5%", "5 rad", "\u0665", "5\u0660", "5,", "5-6", "=5", "5=5", "2+3", "0x5", "5_0"],
    "1 rad/s": ["1 Hz", "1 s^-1", "1/s", "6.28 Hz", "1"],
    "1 Hz": ["1 rad/s", "6.283185307 rad/s", "1"],
    "1 rad": ["1", "1 deg", "100%", "1 m/m"],
    "0.1 B": ["1 dB"],
    "5 ohm": ["5", "5 S", "5 \u03c9", "5 k\u2126"],
    "1 m": ["1 M", "1 mm", "1 \u39e6", "1 m\u0663", "1 m^2", "1 m m"],
    "1234": ["1.234", "12,34", "1,23,4", "1 234", "1'234"],
    "0": ["1e-999", "1e-300", "nan", "inf", "-inf", "1e999"],
}


CASES = [(truth, form, 1.0) for truth, forms in SAME.items() for form in [truth, *forms]]
CASES += [(truth, form, 0.0) for truth, forms in OTHER.items() for form in forms]


async def test_equal_amounts_are_right_and_other_text_is_wrong() -> None:
    assert [(truth, answer) for truth, answer, reward in CASES if await value(numeric, answer, answer=truth) != reward] == []


async def test_verifiers_unit_applies_to_a_bare_number() -> None:
    assert await value(Numeric(unit="rad"), "3.14159265", answer="180 deg") == 1.0
    assert await value(Numeric(unit="$"), "-5", answer="-$5") == 1.0
    assert await value(Numeric(unit="Hz"), "1 rad/s", answer="1") == 0.0


NAMES = ["m", "km", "ft", "mi", "h", "min", "lb", "kWh", "J", "B", "MiB", "%", "$", "m/s", "km/h", "\u2126", "\u00c5"]


@given(st.integers(-(10**20), 10**20), st.sampled_from(NAMES))
def test_conversion_is_exact(number: int, name: str) -> None:
    parsed, plain = quantity(f"{number} {name}"), unit(name)
    assert parsed is not None and plain is not None
    assert parsed.value == number * plain.factor and parsed.value / plain.factor == number and parsed.whole
    negative = quantity(f"{-number} {name}")
    assert negative is not None and negative.value == -parsed.value


@given(st.integers(1, 10**12), st.sampled_from(["$", "\u20ac", "\u00a3"]), st.sampled_from("+-\u2212"))
def test_a_sign_is_accepted_on_either_side_of_a_currency(number: int, currency: str, sign: str) -> None:
    amounts = {quantity(form) for form in (f"{sign}{currency}{number}", f"{currency}{sign}{number}", f"{sign}{number} {currency}")}
    (amount,) = amounts
    assert amount is not None and amount.value == (number if sign == "+" else -number)
    assert quantity(f"{sign}{currency}{sign}{number}") is None


@given(st.sampled_from("kMGT"), st.sampled_from("mgsAKJWVNB"))
def test_a_prefix_is_a_factor(prefix: str, name: str) -> None:
    scaled, plain = unit(prefix + name), unit(name)
    assert scaled is not None and plain is not None
    assert scaled.factor / plain.factor == Fraction(1000) ** ("kMGT".index(prefix) + 1) and scaled.powers == plain.powers


WRITTEN_OUT = [
    ("5 cm", "5 centimeters"),
    ("5 cm", "50 millimetres"),
    ("5 km", "5 kilometers"),
    ("5 mg", "5 milligrams"),
    ("5 kg", "5 kilograms"),
    ("5 mL", "5 milliliters"),
    ("5 GB", "5 gigabytes"),
    ("5 kHz", "5 kilohertz"),
    ("5 h", "5 hrs"),
    ("5 s", "5 secs"),
    ("5 min", "5 mins"),
    ("5 lb", "5 lbs"),
    ("5 yd", "5 yards"),
    ("5 kPa", "5 kilopascals"),
    ("5 m^2", "5 square meters"),
    ("5 ft^2", "5 sq. ft"),
    ("5 cm^3", "5 cubic centimetres"),
    ("5 m/s^2", "5 meters per second squared"),
    ("5 mi/h", "5 miles per hour"),
]


@pytest.mark.parametrize(("short", "spelled_out"), WRITTEN_OUT)
def test_unit_names_may_be_spelled_out(short: str, spelled_out: str) -> None:
    short_quantity, long_quantity = quantity(short), quantity(spelled_out)
    assert short_quantity is not None and long_quantity is not None and short_quantity.unit is not None and long_quantity.unit is not None
    assert short_quantity.value == long_quantity.value and short_quantity.unit.powers == long_quantity.unit.powers


@pytest.mark.parametrize(
    "text", ["5 millibytes", "5 square", "5 square square m", "5 per hour per s", "5 kilofeet", "5 kilo", "5 meterss", "5 decidollars"]
)
def test_unknown_word_is_not_a_unit(text: str) -> None:
    assert quantity(text) is None


QUANTITIES = Path(__file__).parent / "data" / "quantities.tsv"  # expected score, truth, answer, question


async def test_notations_of_a_number_and_units_requested_by_the_question() -> None:
    wrong = []
    for row in QUANTITIES.read_text(encoding="utf-8").splitlines()[1:]:
        expected, truth, answer, question = row.split("\t")
        numeric_task = replace(task(answer=truth), prompt=(Message(role="user", content=question or "What is it?"),))
        if (await judged(numeric, numeric_task, episode(answer))).value != float(expected):
            wrong.append(row)
    assert wrong == []


async def test_verifiers_unit_takes_precedence_over_the_question() -> None:
    numeric_task = replace(task(answer="50"), prompt=(Message(role="user", content="How many apples are 50 percent?"),))
    assert (await judged(Numeric(unit="%"), numeric_task, episode("50"))).value == 1.0
    assert (await judged(Numeric(unit="%"), numeric_task, episode("50%"))).value == 1.0
    assert (await judged(Numeric(unit="%"), numeric_task, episode("50 apples"))).value == 0.0
    assert (await judged(Numeric(unit="m"), numeric_task, episode("50 apples"))).value == 0.0


@pytest.mark.parametrize("left, right", [("$", "$"), ("$$", "$$"), (r"\(", r"\)"), (r"\[", "\n\\]")])
async def test_a_number_may_be_a_formula(left: str, right: str) -> None:
    for truth, number in {"1000": r"1\,000", "0.5": r"\frac{1}{2}", "5 m": r"5\,\text{m}", "$5": r"\$5", "50%": r"50\%"}.items():
        assert await value(numeric, f"The answer is {left}{number}{right}.", answer=truth) == 1.0
    assert await value(numeric, f"{left}1000{right} {left}1000{right}", answer="1000") == 0.0
