"""Scores numbers with a tolerance and with units.

rewards.numeric:numeric                              with task.data = {"answer": "3.6 km/h"} or {"answer": 1.0}
distance = Numeric(relative=1e-3, unit="m")          in rewards/mine.py, referenced as rewards.mine:distance
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar, NamedTuple

from pydantic import Field, field_validator

from agentrl.base.numbers import LARGEST_EXPONENT, is_near, is_whole, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, ConfiguredVerifier, answer_of, zero_score
from rewards.asked import names_percent, names_unit
from rewards.extract import final
from rewards.units import ONE, Unit, unit

LONGEST = 4000  # maximum length of a submission in characters
LONGEST_NUMBER = 200  # maximum length of the number in a submission, in characters
LONGEST_PROMPT = 20_000
RELATIVE = 1e-6
_EXPONENT = r"(?:([+-]?\d{1,3})|\{([+-]?\d{1,3})\}|\(([+-]?\d{1,3})\))"
_NUMBER = re.compile(
    r"((?:\d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+|\d+)(?:\.\d*)?|\.\d+)"  # groups: commas or no-break spaces
    rf"(?:[eE]([+-]?\d{{1,3}})|\s*[*x\u00d7\u00b7\u22c5]\s*10(?:\^|\*\*){_EXPONENT})?"
    r"(?![\d.,])",
    re.ASCII,
)
_TEN = re.compile(rf"10(?:\^|\*\*){_EXPONENT}(?![\d.,])", re.ASCII)
_FRACTION = re.compile(r"(?:(\d{1,30})[ ]+)?(\d{1,30})\s*/\s*([1-9]\d{0,29})(?![\d.,/^])", re.ASCII)
_SCALE = re.compile(r"\s*(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))  # minus signs, and dashes used as minus signs
_CURRENCY = re.compile(r"US\$|[$\u20ac\u00a3]|(?:USD|EUR|GBP)(?=\s*[\d.+-])")
_RAISED = re.compile("(?<![0-9.])10([\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+)")
_POWERS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_FORMULA = re.compile(
    r"(?P<dollars>\${1,2})((?:[^$\\]|\\.)+)(?P=dollars)|\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^\[\]])+)\\\]", re.DOTALL
)
_LATEX = (  # LaTeX that a number may contain, and its plain form
    (re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}", re.ASCII), r" \1/\2"),
    (re.compile(r"\\(?:text|mathrm)\s*\{([^{}\\]*)\}"), r" \1"),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\,(?=\d{3}(?!\d))|\{,\}(?=\d{3}(?!\d))", re.ASCII), ","),
    (re.compile(r"\\[,;: !]"), " "),
    (re.compile(r"\^\{?\\circ\}?|\\degree"), "\u00b0"),
)


class Amount(NamedTuple):
    """A number as written, and the name of its unit. The name is empty if there is no unit."""

    value: Fraction
    name: str


class Quantity(NamedTuple):
    """A number in SI base units, and the unit in which it was written; None if it was written without a unit."""

    value: Fraction
    unit: Unit | None

    @property
    def whole(self) -> bool:
        """Whether the number was written as a whole number."""
        return is_whole(self.value / self.unit.factor if self.unit else self.value)


class Numeric(ConfiguredVerifier):
    r"""Scores 1 if the answer is a number within the tolerance of the truth, else 0. Settings are in `task.data["numeric"]`.

    The answer is the last `\boxed{}` or the text after the last `####`, otherwise the text after the last "answer is", otherwise the full
    submission (`rewards.extract`). A number is written with ASCII digits: in decimal or scientific notation (2e5, 2 x 10^5, 10^5), with
    commas or no-break spaces between groups of three digits, with a scale in words (1.5 million), or as a fraction of whole numbers whose
    value is not whole (1/2, 1 1/2, \frac{1}{2}). Arithmetic (2+3, 10/2, 2^10) is not a number.

    If `unit` is set, the truth and the answer are converted to that unit, and a number without a unit is in `unit`. If `unit` is not set,
    an answer must have a unit of the truth's dimension, or no unit if the truth has none. If the question asks for a unit, either the truth
    or the answer may omit it: "How many dollars?" accepts 18, $18 and 18 dollars. 50% equals 0.5, and also 50 if the question asks for a
    percentage. A currency may be written on either side of the number, and the sign on either side of the currency: -$5, $-5, -5 USD. ($5)
    means -$5, as in accounting. Degrees Celsius and Fahrenheit are not supported, because their zero points differ. Infinity and NaN are
    not numbers.

    If neither `relative` nor `absolute` is set, two whole numbers must be equal, and other numbers may differ by 1e-6 of the truth. If
    either is set, an answer may differ by at most max(absolute, relative * |truth|). However, 0 and numbers with the opposite sign never
    match a truth other than 0, and `absolute` counts only up to half of the truth (`agentrl.base.numbers.is_near`).
    """

    name: ClassVar[str] = "numeric"

    relative: float | None = Field(None, ge=0, lt=1)
    """Relative tolerance. None means 1e-6, or 0 if both numbers are whole."""
    absolute: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Absolute tolerance in `unit`, or in the truth's unit if `unit` is not set."""
    unit: str = ""
    """Unit of a number without a unit, such as "m/s"."""
    must_name_unit: bool = False
    """Whether an answer without a unit is wrong."""
    after: str = ""
    """The number is the text after the last occurrence of this string. Empty: the number is the full submission."""

    @field_validator("unit")
    @classmethod
    def _known(cls, text: str) -> str:
        if unit(text) is None:
            raise ValueError(f"unknown unit {text!r}; rewards/units.py lists the known ones")
        return text

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the answer. Raises `TaskError` if the truth or a setting is invalid."""
        rules = self.for_task(task)
        truth = rules.truth_of(task)
        written = amount(str(truth)) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None
        wanted = None if written is None else _in_base_units(written)
        if written is None or wanted is None:
            raise TaskError(f"task {task.id}: the truth {str(truth)[:EVIDENCE_CHARS]!r} is not a number with a known unit")
        written_in = unit(rules.unit) if rules.unit else wanted.unit or ONE
        assert written_in is not None, "checked on construction"
        if (wanted.unit or written_in).powers != written_in.powers:
            raise TaskError(f"task {task.id}: the truth {truth!r} is not in units of {rules.unit}")
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        if problem:
            return zero_score(problem)
        text = final(text)
        evidence = f"answer {text[:EVIDENCE_CHARS]!r}, truth {truth!r}"
        given = amount(text)
        if given is None:
            return zero_score(f"{evidence}: the answer is not a number")
        if not given.name and rules.must_name_unit:
            return zero_score(f"{evidence}: the answer has no unit")
        prompt = "\n".join(message.content for message in task.prompt)[-LONGEST_PROMPT:]
        meant = list(_meant(given, written, prompt)) if not rules.unit else [_in_base_units(given)]
        fitting = [candidate for candidate in meant if candidate is not None and (candidate.unit or written_in).powers == written_in.powers]
        if not fitting:
            return zero_score(f"{evidence}: the answer's unit is neither the truth's nor a unit that the question requests")
        return Score(value=float(any(rules._same(candidate, wanted, written_in) for candidate in fitting)), evidence=evidence)

    def _same(self, given: Quantity, wanted: Quantity, written_in: Unit) -> bool:
        given_value, wanted_value = (each.value / written_in.factor if each.unit else each.value for each in (given, wanted))
        if self.relative is not None or self.absolute:
            return is_near(given_value, wanted_value, relative=self.relative or 0.0, absolute=self.absolute)
        return given_value == wanted_value if given.whole and wanted.whole else same_number(given_value, wanted_value, relative=RELATIVE)


def _meant(given: Amount, truth: Amount, prompt: str) -> Iterator[Quantity | None]:
    """Yields the quantities that an answer may mean if the verifier has no unit. A number without a unit is in the truth's unit."""
    known, wanted = _in_base_units(given), _in_base_units(truth)
    assert wanted is not None, "a truth with a known unit"
    has_dimension = wanted.unit is not None and any(wanted.unit.powers)
    percentage = _is_percent(given) is not _is_percent(truth) and not has_dimension and names_percent(prompt)
    if percentage and not truth.name and abs(truth.value) > 1:  # 50 is not a fraction, so 50% is correct and 5000% is wrong
        pass
    elif given.name:
        yield known
    elif not has_dimension:
        yield Quantity(given.value, ONE)  # 0.5 is 50%
    elif names_unit(prompt, truth.name):
        yield Quantity(given.value, None)
    if percentage or (given.name and not truth.name and names_unit(prompt, given.name)):
        yield Quantity(given.value, None)


def _is_percent(written: Amount) -> bool:
    return written.name != "" and unit(written.name) == unit("%")


def quantity(text: str) -> Quantity | None:
    """Returns a number, alone, with a known unit after it, or with a currency on either side; None for any other string."""
    written = amount(text)
    return None if written is None else _in_base_units(written)


def _in_base_units(written: Amount) -> Quantity | None:
    known = unit(written.name)
    return None if known is None else Quantity(written.value * known.factor, known if written.name else None)


def amount(text: str) -> Amount | None:
    """Returns a number and the name of its unit; None if the string is not a number or contains two different currencies."""
    text = _without_latex(text.strip().removesuffix(".").translate(_MINUS))
    accounts = text.startswith("(") and text.endswith(")")
    sign, currency, text = _opening(text[1:-1] if accounts else text)
    parsed = _number(text) if len(text) <= LONGEST_NUMBER else None
    if parsed is None or sign is None or (accounts and (sign or not currency)):
        return None
    value, rest = parsed
    if currency and rest and unit(rest) != unit(currency):  # $5 USD is a number, $5 m is not
        return None
    return Amount(-value if accounts or sign == "-" else value, currency or rest)


def _number(text: str) -> tuple[Fraction, str] | None:
    """Returns the number at the start of a string, and the rest of the string; None if there is no number."""
    if match := _FRACTION.match(text):
        above, below = int(match[2]), int(match[3])
        if above % below == 0 or (match[1] and above > below):  # 10/2 is unfinished arithmetic
            return None
        value = int(match[1] or 0) + Fraction(above, below)
    elif match := _TEN.match(text) or _NUMBER.match(text):
        digits, *exponents = match.groups() if match.re is _NUMBER else ("1", *match.groups())
        exponent = int(next(filter(None, exponents), 0))
        if abs(exponent) > LARGEST_EXPONENT:
            return None
        value = Fraction(f"{re.sub(r'[^0-9.]', '', digits)}e{exponent}")
    else:
        return None
    rest = text[match.end() :]
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    return value, rest.strip()


def _without_latex(text: str) -> str:
    """Returns the text of a number without LaTeX markup."""
    text = _RAISED.sub(lambda match: "10^" + match[1].translate(_POWERS), text)
    if (formula := _FORMULA.fullmatch(text)) is not None:
        text = next(filter(None, formula.group(2, 3, 4))).strip()
    if "\\" in text or "{,}" in text:
        for pattern, plain in _LATEX:
            text = pattern.sub(plain, text)
    return text.strip()


def _opening(text: str) -> tuple[str | None, str, str]:
    """Returns (sign, currency, rest) of a string that may start with a sign and a currency in either order.

    The sign is None if there are two signs.
    """
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
