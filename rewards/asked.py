"""What a question asks for: units that an answer may have though the truth is written without one.

A dataset's truth is often the bare number ("18") where its question names the unit ("How many dollars does she earn?"). An answer with that
unit is the same value. A unit that the question does not name may change the value, and stays wrong.
"""

from __future__ import annotations

import re

LONGEST_UNIT = 40  # characters
_ANGLE = re.compile(r"degree|\\circ|\N{DEGREE SIGN}|\bangle", re.IGNORECASE)
_MONEY = re.compile(r"\\\$|\$\s?\d|\bdollars?\b|\bUSD\b", re.IGNORECASE)
_PERCENT = re.compile(r"\b(?:what|which|how many|as an?|in|the)(?:\s+\w+)?\s+percent(?:age)?s?\b", re.IGNORECASE)
_POWER = re.compile(r"\^\{?[23]\}?$")
_JOINING = frozenset({"or", "and", "not", "if", "but"})
_ANY = frozenset({"unit", "square", "sq", "cubic", "cu", "of", "per"})  # they say no scale


def names_unit(prompt: str, unit: str) -> bool:
    """Whether the question names this unit of an answer (`$`, `deg`, `cm^2`, `square feet`), in the singular or the plural."""
    if unit == "$":
        return _MONEY.search(prompt) is not None
    if unit in ("deg", "degree", "degrees"):
        return _ANGLE.search(prompt) is not None
    words = [_singular(word) for word in re.findall(r"[A-Za-z]+", _POWER.sub("", unit))]
    if not words or len(unit) > LONGEST_UNIT or re.search(r"\d", _POWER.sub("", unit)) or _JOINING & set(words):
        return False
    said = {_singular(word) for word in re.findall(r"[A-Za-z]+", prompt)}
    return all(word in _ANY or word in said for word in words)


def names_percent(prompt: str) -> bool:
    """Whether the question asks for a percentage, so that 18 and 18% are one answer to it."""
    return _PERCENT.search(prompt) is not None


def _singular(word: str) -> str:
    word = word.casefold()
    irregular = {"feet": "foot", "ft": "foot", "inches": "inch", "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter"}
    return irregular.get(word, word.removesuffix("s") if len(word) > 3 else word)
