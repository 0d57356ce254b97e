"""Finds the units for which a question asks. An answer may have such a unit even if the truth has no unit.

A dataset's truth is often a bare number ("18") if the question names the unit ("How many dollars does she earn?"). An answer with that unit
has the same value. Any other unit may change the value and is wrong. Other units are those that the question does not name, and those that
it names for a different quantity ("60 miles in 2 hours: how many miles per hour?").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rewards.units import Unit, unit

LONGEST_UNIT = 40  # maximum number of characters
LONGEST_PHRASE = 8  # maximum number of words after "how many"
_ANGLE = re.compile(r"degree|\\circ|\\angle|\N{DEGREE SIGN}|\bangle", re.IGNORECASE)
_MONEY = re.compile(r"\\\$|\$\s?\d|\bdollars?\b|\bUSD\b", re.IGNORECASE)
_PERCENT = re.compile(r"\b(?:what|which|how many|as an?|in|the)(?:\s+(?!\d)\w+)?\s+percent(?:age)?s?\b", re.IGNORECASE)
_MANY = re.compile(r"\b(?:how\s+(many|much)|(?:what is|find|determine|compute|calculate)\s+the\s+number\s+of)\b([^?.!;,]*)", re.IGNORECASE)
_IN = re.compile(r"\bin\s+((?:[A-Za-z]{2,}|[mgsLlhNJWVK](?=\s*(?:[?.!,;/]|$)))[^?.!;,]*)")
_WORDS = re.compile(r"[A-Za-z]+|/|\^\{?-?\d\}?")
_UNIT_TEXT = re.compile(r"(?:[A-Za-z\s./]|\^\{?-?\d\}?)+")
_ASKS = re.compile(r"\?|^\W*(?:find|determine|compute|calculate|what|give|express)\b", re.IGNORECASE)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENDS = _names(
    "does do did is are was were will would can could has have had must should may might in on at if when after before for to that than "
    "there from with by and or not but"
)
_JOINING = frozenset({"or", "and", "not", "if", "but", "than", "to"})
_NO_SCALE = frozenset({"unit", "square", "sq", "cubic", "cu", "of"})
_SCALES = _names(
    "hundred thousand million billion trillion dozen half third quarter tenth hundredth twice double triple times percent minus negative "
    "less more over plus squared cubed"
)
_POWERS = ("square", "sq", "cubic", "cu")
_BEFORE = frozenset({"per", "/", *_POWERS}) | (_SCALES - {"more", "less", "over", "plus", "minus", "negative"})
_OF = frozenset({"of", "a", "an", "the"})
_LETTER = re.compile(r"(?<!\d)(?<!\d\s)(?<!\\text\{)(?<!\\text\{\s)(?<!mathrm\{)\b(?:in|[A-Za-z])\b")  # units only after a number
_FORMULA = re.compile(r"\$(?!\s)[^$]*(?<!\s)\$|\\\(.*?\\\)|\\\[.*?\\\]|\S*[\d^*+=_\\{}]\S*", re.DOTALL)
_NOUNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("speed", "velocity", "fast"), ("m/s",)),
    **dict.fromkeys(("area", "surface"), ("m^2",)),
    **dict.fromkeys(("volume", "capacity"), ("m^3",)),
    **dict.fromkeys(
        _names("length height width depth radius diameter distance perimeter circumference far tall wide deep high side"), ("m",)
    ),
    **dict.fromkeys(("time", "duration"), ("s",)),
    **dict.fromkeys(("weight", "mass", "heavy"), ("kg",)),
    "long": ("m", "s"),
}
"""Noun in a question -> example units of the dimensions that the answer may have."""


def names_unit(prompt: str, named: str) -> bool:
    """Whether the question asks for this unit (`$`, `deg`, `cm^2`, `square feet`), in the singular or the plural.

    The words after the last "how many" determine the requested unit, or else the words after the last "in" before a known unit. If the
    question contains neither phrase, it must mention the unit somewhere, and the unit must have the dimension of the requested quantity (an
    area for "What is the area").
    """
    phrase = _requested_phrase(prompt)
    if (known_unit := unit(named)) is not None and known_unit == unit("$"):
        return (
            _MONEY.search(" ".join(phrase)) is not None if phrase is not None else _MONEY.search(prompt) is not None and not _noun(prompt)
        )
    if named in ("deg", "degree", "degrees"):
        return _ANGLE.search(prompt if phrase is None else " ".join(phrase)) is not None
    words = _words(named)
    plain = {_singular(word) for word in words}
    if not words or not words[0].isalpha() or words[0].lower() == "per" or len(named) > LONGEST_UNIT:
        return False
    if _JOINING & plain or not _UNIT_TEXT.fullmatch(named):
        return False
    if "unit" in plain and plain <= _NO_SCALE:
        return True
    if phrase is not None:
        return _within(words, phrase)
    prompt_words = _words(_LETTER.sub("|", prompt))
    base = [word for word in words if not word.startswith("^") and word.lower() not in _POWERS]
    known = _within(words, prompt_words) or (
        base != words and _noun(prompt) != "" and _within(base, prompt_words)
    )  # cm^2 is a valid unit for an area if the sides are in cm
    return known and not plain & _SCALES and _fits(words, prompt)


def requests_word(prompt: str, word: str) -> bool:
    """Whether the words after the last "how many" name this word, in the singular or the plural."""
    phrase = _requested_phrase(prompt)
    return phrase is not None and _within(_words(word), phrase)


def names_word(prompt: str, word: str) -> bool:
    """Whether the text of the question, without its formulas, asks for this word as `names_unit` describes: "the least number of men"."""
    return names_unit(_FORMULA.sub(" ", prompt), word)


def names_percent(prompt: str) -> bool:
    """Whether the question asks for a percentage, so that 18 and 18% are the same answer."""
    return _PERCENT.search(prompt) is not None


def _requested_phrase(prompt: str) -> list[str] | None:
    """Returns the words after the last "how many", otherwise those after the last "in" before a known unit; None if there is neither."""
    many = list(_MANY.finditer(prompt))
    if many and (many[-1][1] or "").lower() != "much":
        words = _words(many[-1][2])[:LONGEST_PHRASE]
        return words[: next((at for at, word in enumerate(words) if word.lower() in _ENDS), len(words))]
    phrases = [_words(match[1])[:LONGEST_PHRASE] for match in _IN.finditer(prompt)]
    return next((phrase for phrase in reversed(phrases) if _prefix(phrase) is not None), None)


def _within(words: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether a phrase names this unit, in the same words or as an equal known unit. "miles per hour" does not name "miles"."""
    mine, plain = _prefix(words), [_singular(word) for word in words]
    for start in range(len(phrase)):
        before = next((_singular(word) for word in reversed(phrase[:start]) if word.lower() not in _OF), "")
        if before in _BEFORE:
            continue
        if mine is not None and _begins(phrase[start]) and mine == _prefix(phrase[start:]):
            return True
        end = start + len(words)
        if [_singular(word) for word in phrase[start:end]] == plain and not any(map(_extends, phrase[end : end + 1])):
            return True
    return False


def _prefix(words: Sequence[str]) -> Unit | None:
    """Returns the unit named by the longest sequence of words at the start; None if they name no unit, or only a part of a longer unit."""
    for end in range(min(len(words), 6), 0, -1):
        known = _unit(words[:end])
        if known is not None:
            return None if any(map(_extends, words[end : end + 1])) else known
    return None


@lru_cache(maxsize=4096)
def _begins(word: str) -> bool:
    """Whether a unit may start with this word."""
    return word.lower() in _POWERS or unit(word) is not None or unit(word.lower()) is not None


def _extends(word: str) -> bool:
    """Whether a word after a unit turns the unit into a different unit."""
    return word.lower() in ("per", "/", "squared", "cubed") or word.startswith("^")


def _unit(words: Sequence[str]) -> Unit | None:
    """Returns the known unit that the words name: `square feet`, `miles per hour`, `km / h`, `m ^2`."""
    text = " ".join(word.replace("{", "").replace("}", "") if unit(word) is not None or word[:1] == "^" else word.lower() for word in words)
    return unit(text.replace(" ^", "^")) if text else None


def _fits(words: Sequence[str], prompt: str) -> bool:
    """Whether a unit has a dimension that the answer to the question may have.

    True if the unit or the dimension of the answer is unknown.
    """
    known, noun = _unit(words), _noun(prompt)
    allowed = (unit(name) for name in _NOUNS.get(noun, ()))
    return known is None or not noun or any(candidate is not None and known.powers == candidate.powers for candidate in allowed)


def _noun(prompt: str) -> str:
    """Returns the first noun with a dimension in the last question that has such a noun; empty if there is none."""
    sentences = re.findall(r"[^.?!]+[.?!]?", prompt)
    nouns = [
        next((word.lower() for word in _words(sentence) if word.lower() in _NOUNS), "")
        for sentence in sentences
        if _ASKS.search(sentence.strip())
    ]
    return next(filter(None, reversed(nouns)), "")


def _words(text: str) -> list[str]:
    return _WORDS.findall(text)


def _singular(word: str) -> str:
    word = word.casefold()
    return {"feet": "foot", "inches": "inch", "boxes": "box"}.get(word, word.removesuffix("s") if len(word) > 3 else word)
