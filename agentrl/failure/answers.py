"""Whether a text is the right answer, or holds it: loosely, as triage needs it. No score is ever made of this."""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl.base import numbers

_RELATIVE = 1e-6
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\.?\d[\d,.]*(?:[eE][-+]?\d{1,3})?(?!\w)")
_LONGEST = 4000  # characters of an answer that are compared
_QUOTES = "`'\"*.!$€ \t\r\n"


def parse_number(text: str) -> Fraction | None:
    """A number in plain notation, thousands commas allowed; None for anything else."""
    return numbers.parse_number(text.strip(_QUOTES + "%").replace(",", "")) if len(text) <= 64 else None


def is_right_answer(text: str, truth: str, tolerance: float) -> bool:
    """Whether a text is the answer: the same words, or the same number."""
    mine, right = text[:_LONGEST].strip(_QUOTES), truth[:_LONGEST].strip(_QUOTES)
    if mine.casefold() == right.casefold():
        return bool(right)
    given, wanted = parse_number(mine), parse_number(right)
    return given is not None and wanted is not None and numbers.same_number(given, wanted, relative=_RELATIVE, absolute=tolerance)


def contains_answer(truth: str, text: str, tolerance: float) -> bool:
    """Whether the answer stands somewhere in a text, as a word or number of its own."""
    right = truth[:_LONGEST].strip(_QUOTES)
    if not right:
        return False
    if parse_number(right) is not None:
        return any(is_right_answer(found[0], right, tolerance) for found in _NUMBER.finditer(text))
    return re.search(rf"(?<!\w){re.escape(right)}(?!\w)", text, re.IGNORECASE) is not None


def contains_only_answer(truth: str, text: str, tolerance: float) -> bool:
    """As `contains_answer`; where the answer is a number, it is the only one there."""
    if parse_number(truth) is None:
        return len(truth.strip(_QUOTES)) >= 2 and contains_answer(truth, text, tolerance)
    found = [one[0] for one in _NUMBER.finditer(text)]
    return len(found) == 1 and is_right_answer(found[0], truth, tolerance)


def nonblank_lines(text: str) -> list[str]:
    """The lines that say something."""
    return [line.strip() for line in text.split("\n") if line.strip()]
