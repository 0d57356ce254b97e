"""Decides whether an answer contains only the truth, in any notation, and no additional text.

Many scorers search an answer for the truth, so they also accept its negation, several answers, or additional text. The scorer decides which
notations are correct, and this module rejects additional text. Datasets with several correct answers have an alphabet instead
(`sandboxes.reasoning.catalogue.LANGUAGES`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

ANY_ORDER = frozenset({"group_anagrams", "knights_knaves", "palindrome_partitioning", "polynomial_equations", "prime_factorization"})
"""Datasets whose answers are sets, such as persons and their types, roots, factors or groups."""
ROUNDED: Mapping[str, int | None] = {"advanced_geometry": None, "pool_matrix": 2}
"""Datasets that ask for rounded numbers -> decimal places. None means as many decimal places as the truth has."""
SIGNIFICANT: Mapping[str, Decimal] = {"decimal_arithmetic": Decimal("1e-12"), "power_function": Decimal("1e-2")}
"""Datasets that ask for significant digits -> relative tolerance, which applies only if the scorer accepts the answer."""
CLOSE = Decimal("1e-14")  # relative tolerance for other fractional numbers, for the rounding of binary fractions
_TOKEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?|\.[0-9]+)|(?P<word>[^\W\d_]+)|(?P<other>\S)")
_NO_PART = frozenset("\",'`$\u00b0")  # quotes, commas, and signs of units
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_Token = Decimal | str


def says_the_same(name: str, answer: str, truth: str) -> bool:
    """Whether an answer to a problem from dataset `name` consists of exactly the words, numbers and signs in the truth.

    White space, capitalization, quotes, commas, degree and dollar signs, and a full stop at the end are ignored.
    """
    if _GROUPED.fullmatch(answer):
        answer = answer.replace(",", "")
    ours, true = _tokens(answer), _tokens(truth)
    if name in ANY_ORDER:
        ours, true = sorted(ours, key=_rank), sorted(true, key=_rank)
    return all(_same(name, token, true_token) for token, true_token in zip_longest(ours, true))


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text.strip().removesuffix(".")):
        token = match[0]
        if match.lastgroup == "number":
            tokens.append(_decimal(token))
        elif token not in _NO_PART:
            tokens.append(token.casefold())
    if tokens[:1] == ["+"]:
        del tokens[0]
    return tokens


def _decimal(token: str) -> _Token:
    try:
        return Decimal(token)
    except InvalidOperation:
        return token


def _same(name: str, token: _Token | None, true_token: _Token | None) -> bool:
    if not isinstance(token, Decimal) or not isinstance(true_token, Decimal):
        return token == true_token
    if token == true_token:
        return True
    if name in ROUNDED:
        places = ROUNDED[name]
        exponent = true_token.as_tuple().exponent
        assert isinstance(exponent, int), "it is finite"
        return abs(token - true_token) <= Decimal(5).scaleb((exponent if places is None else -places) - 1)
    return true_token != true_token.to_integral_value() and abs(token - true_token) <= SIGNIFICANT.get(name, CLOSE) * abs(true_token)


def _rank(token: _Token) -> tuple[bool, Decimal, str]:
    return (True, token, "") if isinstance(token, Decimal) else (False, Decimal(0), token)
