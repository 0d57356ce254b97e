"""Short programs for datasets whose problems can be solved in a few lines of Python.

The programs are used as worked examples in prompts and as gold solutions for these datasets. A program prints exactly the answer.

A small model depends more on the choice of examples than on anything else in its prompt. If no example contains a formula with a leading
minus sign or bracket, the model omits the sign or bracket. If no example contains a division, the model never uses `//` (whole results)
instead of `/`, so it has no successes from which to learn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from sandboxes.reasoning.problems import Problem

GENERAL = ("products", "spell_backward")
"""Datasets whose examples are used in the prompts of datasets that have no short program."""


class _Unlike(ValueError):
    """A question does not have the package's default wording, because configuration keys change the wording."""


def program(kind: str, question: str) -> str | None:
    """Returns Python source that prints the answer to a question from this dataset; None if no short program is known."""
    try:
        return PROGRAMS[kind](question) if kind in PROGRAMS else None
    except _Unlike:
        return None


def telling(candidates: Sequence[Problem], count: int) -> tuple[Problem, ...]:
    """Returns up to `count` problems whose questions together contain the most distinct characters, then the most distinct pairs of
    characters.

    If candidates are equal, the candidate whose length is nearest to the median is chosen. All digits count as one character, and all
    letters count as another character. Questions longer than twice the median are excluded.
    """
    usual = median(len(candidate.question) for candidate in candidates)
    left = [candidate for candidate in candidates if len(candidate.question) <= 2 * usual]
    chosen: list[Problem] = []
    seen: set[str] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda candidate: (*_new(_marks(candidate.question) - seen), -abs(len(candidate.question) - usual)))
        chosen.append(best)
        left.remove(best)
        seen |= _marks(best.question)
    return tuple(chosen)


def _marks(question: str) -> set[str]:
    """Returns the characters and the adjacent pairs of a question."""
    text = re.sub(r"\s+", "", re.sub(r"[^\W\d]+", "a", re.sub(r"\d+", "0", question)))
    return {*text, *(text[at : at + 2] for at in range(len(text) - 1))}


def _new(marks: set[str]) -> tuple[int, int]:
    """Returns the number of single characters and the number of pairs in a set."""
    return sum(len(mark) == 1 for mark in marks), sum(len(mark) == 2 for mark in marks)


def _groups(pattern: str, question: str) -> tuple[str, ...]:
    match = re.search(pattern, question, re.DOTALL)
    if match is None:
        raise _Unlike(f"no {pattern!r} in the question {question[:200]!r}")
    return match.groups()


def _expression(question: str) -> str:
    """Returns the formula of an arithmetic question."""
    (text,) = _groups(r"((?:[-(]\s*)*\d[-+*/() .\d]*[\d)])", question)
    return text


def _sum(question: str) -> str:
    return f"print({_expression(question)})"


def _whole(question: str) -> str:
    return f"print({_expression(question).replace('/', '//')})"


def _decimal(question: str) -> str:
    terms = re.sub(r"\d[\d.]*", lambda number: f'D("{number[0]}")', _expression(question))
    return f"from decimal import Decimal as D\nprint({terms})"


def _divisor(question: str) -> str:
    (numbers,) = _groups(r"numbers: ([\d, ]+\d)", question)
    return f"import math\nprint(math.gcd({numbers}))"


def _multiple(question: str) -> str:
    (numbers,) = _groups(r"numbers: ([\d, ]+\d)", question)
    return f"import math\nprint(math.lcm({numbers}))"


def _bits(question: str) -> str:
    (number,) = _groups(r"number (\d+)", question)
    return f"print(bin({number}).count('1'))"


def _backward(question: str) -> str:
    (word,) = _groups(r": (\S+)\s*$", question)
    return f"print({word!r}[::-1])"


def _letters(question: str) -> str:
    letter, text = _groups(r'letter "(.)" appear in the text: "(.*)"', question)
    return f"print({text!r}.lower().count({letter!r}))"


def _hexadecimal(question: str) -> str:
    (formula,) = _groups(r"\n([^\n]*0x[^\n]*)\s*$", question)
    return f"print(hex({formula}))"


def _reversal(question: str) -> str:
    (words,) = _groups(r": ([^:]*?)\s*$", question)
    return f"print(', '.join({words!r}.split(', ')[::-1]))"


def _sorted(question: str) -> str:
    order, words = _groups(r"in (ascending|descending) order[^:]*: ([^:]*?)\s*$", question)
    backward = ", reverse=True" if order == "descending" else ""
    return f"print(', '.join(sorted({words!r}.split(', '){backward})))"


PROGRAMS: Mapping[str, Callable[[str], str]] = {
    "basic_arithmetic": _whole,
    "bitwise_arithmetic": _hexadecimal,
    "chain_sum": _sum,
    "count_bits": _bits,
    "decimal_chain_sum": _decimal,
    "gcd": _divisor,
    "lcm": _multiple,
    "letter_counting": _letters,
    "products": _sum,
    "spell_backward": _backward,
    "word_sequence_reversal": _reversal,
    "word_sorting": _sorted,
}
"""Dataset -> function that turns a question into Python source that prints the answer."""
