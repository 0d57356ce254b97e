"""Short programs for the kinds of problem that a few lines of Python solve, read off the question: they make the worked examples of a
prompt, and are the gold solutions of these kinds. A program prints exactly the answer.

Which problems are the examples matters to a small model more than anything else in its prompt: one that was shown no formula that begins
with a minus sign or a bracket leaves it out when it meets one; and one that was shown no division never finds `//`, whose answers are
whole numbers, in place of `/`, so that it has nothing to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from sandboxes.reasoning.problems import Problem

GENERAL = ("products", "spell_backward")
"""Kinds whose examples stand in the prompts of kinds without a program."""


class _Unlike(ValueError):
    """A question that is not put as the package puts it by default, as some keys of a configuration have it."""


def program(kind: str, question: str) -> str | None:
    """Python source that prints the answer to a question of this kind, or None where no short program is known here."""
    try:
        return PROGRAMS[kind](question) if kind in PROGRAMS else None
    except _Unlike:
        return None


def telling(candidates: Sequence[Problem], count: int) -> tuple[Problem, ...]:
    """The problems whose questions together show the most marks, then the most pairs of them; of equal ones, those of a usual length.

    Digits are one mark and letters another. Questions of more than twice the usual length are no candidates.
    """
    usual = median(len(one.question) for one in candidates)
    left = [one for one in candidates if len(one.question) <= 2 * usual]
    chosen: list[Problem] = []
    seen: set[str] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda one: (*_new(_marks(one.question) - seen), -abs(len(one.question) - usual)))
        chosen.append(best)
        left.remove(best)
        seen |= _marks(best.question)
    return tuple(chosen)


def _marks(question: str) -> set[str]:
    """Its marks, and the pairs of them that stand side by side."""
    text = re.sub(r"\s+", "", re.sub(r"[^\W\d]+", "a", re.sub(r"\d+", "0", question)))
    return {*text, *(text[at : at + 2] for at in range(len(text) - 1))}


def _new(marks: set[str]) -> tuple[int, int]:
    """How many marks, and how many pairs."""
    return sum(len(mark) == 1 for mark in marks), sum(len(mark) == 2 for mark in marks)


def _found(pattern: str, question: str) -> tuple[str, ...]:
    match = re.search(pattern, question, re.DOTALL)
    if match is None:
        raise _Unlike(f"no {pattern!r} in the question {question[:200]!r}")
    return match.groups()


def _expression(question: str) -> str:
    """The formula of an arithmetic question, by what stands around it."""
    (text,) = _found(r"((?:[-(]\s*)*\d[-+*/() .\d]*[\d)])", question)
    return text


def _sum(question: str) -> str:
    return f"print({_expression(question)})"


def _whole(question: str) -> str:
    return f"print({_expression(question).replace('/', '//')})"


def _decimal(question: str) -> str:
    terms = re.sub(r"\d[\d.]*", lambda number: f'D("{number[0]}")', _expression(question))
    return f"from decimal import Decimal as D\nprint({terms})"


def _divisor(question: str) -> str:
    (numbers,) = _found(r"numbers: ([\d, ]+\d)", question)
    return f"import math\nprint(math.gcd({numbers}))"


def _multiple(question: str) -> str:
    (numbers,) = _found(r"numbers: ([\d, ]+\d)", question)
    return f"import math\nprint(math.lcm({numbers}))"


def _bits(question: str) -> str:
    (number,) = _found(r"number (\d+)", question)
    return f"print(bin({number}).count('1'))"


def _backward(question: str) -> str:
    (word,) = _found(r": (\S+)\s*$", question)
    return f"print({word!r}[::-1])"


def _letters(question: str) -> str:
    letter, text = _found(r'letter "(.)" appear in the text: "(.*)"', question)
    return f"print({text!r}.lower().count({letter!r}))"


def _hexadecimal(question: str) -> str:
    (formula,) = _found(r"\n([^\n]*0x[^\n]*)\s*$", question)
    return f"print(hex({formula}))"


def _reversal(question: str) -> str:
    (words,) = _found(r": ([^:]*?)\s*$", question)
    return f"print(', '.join({words!r}.split(', ')[::-1]))"


def _sorted(question: str) -> str:
    order, words = _found(r"in (ascending|descending) order[^:]*: ([^:]*?)\s*$", question)
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
"""From a kind's question to Python source that prints the answer."""
