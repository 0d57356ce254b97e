"""Numbers, with a tolerance and units.

rewards.numeric:numeric                              with task.data = {"answer": "3.6 km/h"} or {"answer": 1.0}
distance = Numeric(relative=1e-3, unit="m")          in rewards/mine.py, referenced as rewards.mine:distance
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar, NamedTuple

from pydantic import Field, field_validator

from agentrl.contract.values import LARGEST_EXPONENT, near, same_number, whole
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import SHOWN, Configured, answer_of, wrong
from rewards.units import ONE, Unit, unit

LONGEST = 200  # characters of an answer
RELATIVE = 1e-6
_NUMBER = re.compile(
    r"((?:\d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+|\d+)(?:\.\d*)?|\.\d+)"  # groups: commas, or the spaces that do not break
    r"(?:[eE]([+-]?\d{1,3})|\s*[*x\u00d7\u00b7\u22c5]\s*10(?:\^|\*\*)(?:([+-]?\d{1,3})|\{([+-]?\d{1,3})\}|\(([+-]?\d{1,3})\)))?"
    r"(?![\d.,])",
    re.ASCII,
)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))  # minus signs, and dashes that are written for one
_CURRENCY = re.compile(r"US\$|[$\u20ac\u00a3]|(?:USD|EUR|GBP)(?=\s*[\d.+-])")


class Quantity(NamedTuple):
    """A number in SI base units, and the unit it was written in; None: it was written without one."""

    value: Fraction
    unit: Unit | None

    @property
    def whole(self) -> bool:
        """Whether it was written as a whole number."""
        return whole(self.value / self.unit.factor if self.unit else self.value)


class Numeric(Configured):
    """1 when the answer is a number within the tolerance of the truth, else 0. Settings in `task.data["numeric"]`.

    A number has ASCII digits: decimal or scientific (2e5, 2 x 10^5), commas or no-break spaces between groups of three digits. With `unit`,
    truth and answer are converted to it, and a number without a unit is one in `unit`; without it, an answer has a unit of the truth's
    dimension, or none if the truth has none. A currency stands on either side, its sign too: -$5, $-5, -5 USD; ($5) is -$5, as in accounts.
    Degrees Celsius and Fahrenheit, which have another zero, are no units here. Infinite and NaN are no numbers.

    If neither `relative` nor `absolute` is set, two numbers that are written whole must be equal, and others may differ by 1e-6 of the
    truth. If one is, an answer of any kind may differ by at most max(absolute, relative * |truth|), but 0 and a number of the other sign
    are never near a truth that is not 0, and `absolute` counts only up to half of the truth (`agentrl.contract.values.near`).
    """

    name: ClassVar[str] = "numeric"

    relative: float | None = Field(None, ge=0, lt=1)
    """None: 1e-6, and 0 between whole numbers."""
    absolute: float = Field(0.0, ge=0, allow_inf_nan=False)
    """In `unit`, or in the truth's."""
    unit: str = ""
    """What a number without a unit is in, such as "m/s"."""
    must_name_unit: bool = False
    """Whether an answer without a unit is wrong."""
    after: str = ""
    """The number is what follows the last occurrence of this. Empty: all that was submitted."""

    @field_validator("unit")
    @classmethod
    def _known(cls, text: str) -> str:
        if unit(text) is None:
            raise ValueError(f"{text!r} is no known unit; rewards/units.py lists them")
        return text

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)
        truth = rules.wanted(task)
        wanted = quantity(str(truth)) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None
        if wanted is None:
            raise TaskError(f"task {task.id}: the truth {str(truth)[:SHOWN]!r} is no number with a known unit")
        written_in = unit(rules.unit) if rules.unit else wanted.unit or ONE
        assert written_in is not None, "checked on construction"
        if (wanted.unit or written_in).powers != written_in.powers:
            raise TaskError(f"task {task.id}: the truth {truth!r} is not in units of {rules.unit}")
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        if problem:
            return wrong(problem)
        given, told = quantity(text), f"answer {text[:SHOWN]!r}, truth {truth!r}"
        if given is None:
            return wrong(f"{told}: no number with a known unit")
        bare = given.unit is None
        if bare and rules.must_name_unit:
            return wrong(f"{told}: without a unit")
        if bare and not rules.unit and wanted.unit is not None and any(wanted.unit.powers):
            return wrong(f"{told}: without the unit that the truth has")
        if (given.unit or written_in).powers != written_in.powers:
            return wrong(f"{told}: of another dimension")
        return Score(value=float(rules._same(given, wanted, written_in)), evidence=told)

    def _same(self, given: Quantity, wanted: Quantity, written_in: Unit) -> bool:
        one, other = (each.value / written_in.factor if each.unit else each.value for each in (given, wanted))
        if self.relative is not None or self.absolute:
            return near(one, other, relative=self.relative or 0.0, absolute=self.absolute)
        return one == other if given.whole and wanted.whole else same_number(one, other, relative=RELATIVE)


def quantity(text: str) -> Quantity | None:
    """A number with or without a unit behind it, or a currency on either side; None: it is neither."""
    text = text.strip().removesuffix(".").translate(_MINUS)
    accounts = text.startswith("(") and text.endswith(")")
    sign, currency, text = _opening(text[1:-1] if accounts else text)
    match = _NUMBER.match(text)
    if match is None or sign is None or (accounts and (sign or not currency)):
        return None
    digits, exponent = re.sub(r"[^\d.]", "", match[1]), int(next(filter(None, match.groups()[1:]), 0))
    rest = text[match.end() :].strip()
    found = unit(rest or currency)
    if found is None or (currency and found != unit(currency)):  # $5 USD, and not $5 m
        return None
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    value = Fraction(f"{digits}e{exponent}") * found.factor
    return Quantity(-value if accounts or sign == "-" else value, found if rest or currency else None)


def _opening(text: str) -> tuple[str | None, str, str]:
    """The sign and the currency before a number, in any order, and the rest; the sign is None if there are two."""
    signs, currency = "", ""
    while text:
        match = _CURRENCY.match(text)
        if text[0] in "+-":
            signs, text = signs + text[0], text[1:].lstrip()
        elif match is not None and not currency:
            currency, text = match[0].removeprefix("US") if match[0] == "US$" else match[0], text[match.end() :].lstrip()
        else:
            break
    return (signs if len(signs) < 2 else None), currency, text


numeric = Numeric()
