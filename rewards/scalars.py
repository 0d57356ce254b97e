"""Parses scalar notation into a tree, and finds the numbers in it. Nothing is evaluated, so the tree shows the form in which a value was
written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rewards.signs import DEEPEST, FUNCTIONS, GREEK, NUMBER, OPEN, REPEATING, Token, Unreadable

LARGEST_POWER_OF_TEN = 1000
NUMERAL = re.compile(
    r"(-?)\(?(?:\\(?:text|mathrm)\{)?([0-9][0-9A-Za-z]*|[0-9A-Z]{2,})\}?\)?_(?:\{?(?:\\text\{)?([a-z]+|\d{1,2})\}?\}?)", re.ASCII
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}


class Node(NamedTuple):
    """A part of an expression: its `kind`, its `parts` in order and, for a leaf, its `value`.

    Scalars: number, decimal (written with a point) and mixed (2 1/2), whose value is a Fraction; symbol; constant (pi, e, i, infty); add,
    mul, div, neg, pm, pow, root, call (value: the function), abs, factorial, binomial, floor, ceiling, degrees, percent.
    Others: word, numeral (value: digits_base), list, set, tuple, interval (value: its brackets), union, intersection, difference, matrix
    (value: columns), ratio, relation (value: the sign), applied (value: f(x)), unit (value: its name).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | str = ""


def numeral(sign: str, digits: str, base: str) -> Node | None:
    """Returns a numeral in a base, whose value includes the base; None if the string is a symbol with a subscript.

    Raises `Unreadable` if a digit is not valid in the base.
    """
    number = _BASES.get(base) or (int(base) if base.isdigit() else 0)
    if not digits[0].isdigit() and not 11 <= number <= 36:
        return None
    try:
        int(digits, number if 2 <= number <= 36 else 2)
    except ValueError:
        raise Unreadable(f"{digits} in base {base}") from None
    plain = digits.lstrip("0").upper() or "0"
    node = Node("number", value=Fraction(plain)) if number == 10 else Node("numeral", value=f"{plain}_{number}")
    return Node("neg", (node,)) if sign else node


def symbols(node: Node) -> set[Fraction | str]:
    """Returns the names of the variables in a tree."""
    return ({node.value} if node.kind == "symbol" else set()).union(*map(symbols, node.parts))


def literal(node: Node) -> Fraction | None:
    """Returns the value of a number that has at most a sign, a fraction line, a power of ten or a percent sign; None for other nodes."""
    if node.kind == "neg":
        return None if (inner := literal(node.parts[0])) is None or node.parts[0].kind == "neg" else -inner
    if node.kind in ("number", "decimal", "mixed"):
        assert isinstance(node.value, Fraction)
        return node.value
    if node.kind == "percent":
        bare = node.parts[0]
        value = literal(bare) if (bare.parts[0] if bare.kind == "neg" else bare).kind in ("number", "decimal", "mixed") else None
        return None if value is None else value / 100
    if node.kind == "div":
        above, below = node.parts
        if (above.kind == "neg") is not (below.kind == "neg"):
            bare = tuple(part.parts[0] if part.kind == "neg" else part for part in node.parts)
            return None if any(part.kind == "neg" for part in bare) or (inner := literal(Node("div", bare))) is None else -inner
        if above.kind == below.kind == "number" and isinstance(above.value, Fraction) and isinstance(below.value, Fraction) and below.value:
            return None if (value := above.value / below.value).denominator == 1 else value
        return None
    return _power_of_ten(node)


def _power_of_ten(node: Node) -> Fraction | None:
    """Returns the value of 10^n or a * 10^n; None for other nodes."""
    if node.kind == "mul" and len(node.parts) == 2:
        mantissa = node.parts[0]
        power = _power_of_ten(node.parts[1]) if node.parts[1].kind == "pow" else None
        known = power is not None and mantissa.kind in ("number", "decimal") and isinstance(mantissa.value, Fraction)
        return Fraction(mantissa.value) * Fraction(power or 0) if known else None
    if node.kind != "pow" or node.parts[0] != Node("number", value=Fraction(10)):
        return None
    exponent = literal(node.parts[1])
    return None if exponent is None or exponent.denominator != 1 or abs(exponent) > 1000 else Fraction(10) ** int(exponent)


def percentage(node: Node) -> Node | None:
    """Returns the number before a percent sign, with its sign; None for other nodes."""
    if node.kind == "percent":
        return node.parts[0]
    return Node("neg", node.parts[0].parts) if node.kind == "neg" and node.parts[0].kind == "percent" else None


def has_decimal(node: Node) -> bool:
    """Whether a tree contains a number that is written with a decimal point."""
    return node.kind == "decimal" or any(map(has_decimal, node.parts))


def _number(text: str) -> Node:
    """Returns a number as written. Digits under an overline are a repeating decimal."""
    if match := REPEATING.fullmatch(text):
        return Node("number", value=int(match[1]) + Fraction(int(match[2]), 10 ** len(match[2]) - 1))
    match = NUMBER.fullmatch(text)
    assert match is not None, "a number token"
    value, exponent = Fraction(match[1]), int(match[3] or 0)
    if abs(exponent) > LARGEST_POWER_OF_TEN or (match[2] and ("." not in match[1] or exponent)):
        raise Unreadable(f"the number {text[:40]}")
    if match[2]:
        places = len(match[1].partition(".")[2])
        return Node("number", value=value + Fraction(int(match[2]), (10 ** len(match[2]) - 1) * 10**places))
    return Node("decimal" if "." in match[1] else "number", value=value * Fraction(10) ** exponent)


class Scalar:
    """A recursive-descent parser for one scalar expression."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def whole(self) -> Node:
        """Parses all tokens. Raises `Unreadable` if the tokens are not one expression."""
        if not self._tokens:
            raise Unreadable("no value where one is expected")
        node = self._sum()
        if self._at < len(self._tokens):
            raise Unreadable(f"{self._tokens[self._at].text[:40]!r} after a value")
        return node

    def _next(self) -> str:
        """Returns the next sign or command; empty at the end and before other tokens."""
        return self._tokens[self._at].sign if self._at < len(self._tokens) else ""

    def _take(self, *signs: str) -> str:
        sign = self._next()
        if sign and sign in signs:
            self._at += 1
            return sign
        return ""

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise Unreadable(f"no {sign} where one is expected")

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable("brackets that are nested too deeply")
        terms = [self._pm(self._product())] if self._take("\\pm", "\\mp") else [self._product()]
        while sign := self._take("+", "-", "\\pm", "\\mp"):
            term = self._product()
            terms.append(term if sign == "+" else Node("neg", (term,)) if sign == "-" else self._pm(term))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    @staticmethod
    def _pm(term: Node) -> Node:
        return Node("pm", (term,))

    def _product(self) -> Node:
        if self._take("-"):
            return Node("neg", (self._product(),))
        node = self._signed()
        while True:
            if self._take("*"):
                node = _times(node, self._signed())
            elif self._take("/"):
                node = Node("div", (node, self._signed()))
            elif self._starts():
                node = self._beside(node)
            else:
                return node

    def _beside(self, node: Node) -> Node:
        """Returns an implicit product or, for 2\\frac{1}{2} and 2 1/2, a mixed number."""
        number = self._tokens[self._at].kind == "number"
        after = self._power()
        if number and node.kind == "number" and self._take("/"):
            after = Node("div", (after, self._power()))
        elif number:
            raise Unreadable("a number after a value without a sign between them")
        if node.kind == "number" and after.kind == "div" and all(part.kind == "number" for part in after.parts):
            above, below = (part.value for part in after.parts)
            assert isinstance(node.value, Fraction) and isinstance(above, Fraction) and isinstance(below, Fraction)
            if not above < below or node.value.denominator != 1:
                raise Unreadable("a fraction after a number without a sign between them")
            return Node("mixed", value=node.value + above / below)
        return _times(node, after)

    def _starts(self) -> bool:
        """Whether the next token starts a factor without a preceding sign."""
        if self._at == len(self._tokens):
            return False
        token = self._tokens[self._at]
        sign = token.sign
        known = sign[1:] in FUNCTIONS or sign[1:] in GREEK
        opens = sign in ("(", "[", "{", "\\frac", "\\sqrt", "\\binom", "\\pi", "\\infty", "\\exp", "\\lfloor", "\\lceil")
        return token.kind in ("number", "letter") or known or opens

    def _signed(self) -> Node:
        if self._take("-"):
            return Node("neg", (self._signed(),))
        if self._take("+"):
            return self._signed()
        return self._power()

    def _power(self) -> Node:
        node = self._atom()
        while sign := self._take("^", "!", "%"):
            if sign == "!":
                node = Node("factorial", (node,))
            elif sign == "%":
                node = Node("percent", (node,))
            elif self._take("\\circ"):
                node = Node("degrees", (node,))
            else:
                exponent = self._exponent()
                node = Node("degrees", (node,)) if exponent is None else Node("pow", (node, exponent))
        return node

    def _exponent(self) -> Node | None:
        """Returns the exponent after ^; None for the degree sign."""
        if self._take("{"):
            if self._take("\\circ"):
                self._need("}")
                return None
            node = self._sum()
            self._need("}")
            return node
        if self._take("-"):
            return Node("neg", (self._atom(),))
        return self._atom()

    def _group(self, opening: str) -> Node:
        self._need(opening)
        node = self._sum()
        self._need(OPEN[opening])
        return node

    def _argument(self) -> Node:
        r"""Returns an argument of \frac and similar commands: the expression in braces, or one token. If the token is a number of several
        digits, only its first digit is the argument."""
        if self._next() == "{":
            return self._group("{")
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is not None and token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            self._tokens = [*self._tokens[: self._at], Token("number", token.text[0], token.spaced),
                            Token("number", token.text[1:], False), *self._tokens[self._at + 1 :]]  # fmt: skip
        return self._atom()

    def _atom(self) -> Node:
        if self._at == len(self._tokens):
            raise Unreadable("no value where one is expected")
        token = self._tokens[self._at]
        if token.kind == "number":
            self._at += 1
            return _number(token.text)
        if token.kind == "letter":
            self._at += 1
            return self._symbol(token.text)
        sign = self._next()
        if sign in ("(", "[", "{", "\\{"):
            return self._group(sign) if sign != "\\{" else self._refuse(token)
        if sign == "|":
            self._at += 1
            node = self._sum()
            self._need("|")
            return Node("abs", (node,))
        if sign in ("\\lfloor", "\\lceil"):
            return Node("floor" if sign == "\\lfloor" else "ceiling", (self._group(sign),))
        self._at += 1
        name = sign.removeprefix("\\")
        if name in FUNCTIONS:
            return self._call(name)
        if name in ("pi", "infty"):
            return Node("constant", value=name)
        if name in GREEK and sign.startswith("\\"):
            return self._symbol(name)
        if sign == "\\frac":
            return Node("div", (self._argument(), self._argument()))
        if sign == "\\binom":
            return Node("binomial", (self._argument(), self._argument()))
        if sign == "\\exp":
            return Node("pow", (Node("constant", value="e"), self._function_argument()))
        return self._root() if sign == "\\sqrt" else self._refuse(token)

    @staticmethod
    def _refuse(token: Token) -> Node:
        raise Unreadable(f"{token.text[:40]!r} where a value is expected")

    def _root(self) -> Node:
        degree = self._group("[") if self._next() == "[" else Node("number", value=Fraction(2))
        under = self._group("(") if self._next() == "(" else self._argument()
        return Node("root", (under, degree))

    def _symbol(self, name: str) -> Node:
        if name in ("e", "i") and self._next() != "_":
            return Node("constant", value=name)
        if self._take("_"):
            inside = self._subscript()
            return Node("symbol", value=f"{name}_{inside}")
        return Node("symbol", value=name)

    def _subscript(self) -> str:
        if not self._take("{"):
            if self._at == len(self._tokens) or self._tokens[self._at].kind not in ("number", "letter", "text"):
                raise Unreadable("a subscript")
            self._at += 1
            return self._tokens[self._at - 1].text
        parts: list[str] = []
        while not self._take("}"):
            if self._at == len(self._tokens) or self._next() in OPEN:
                raise Unreadable("a subscript")
            parts.append(self._tokens[self._at].text)
            self._at += 1
        return "".join(parts)

    def _call(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        if name == "log" and self._take("_"):
            base = (self._argument(),)
        power = self._exponent() if self._take("^") else None
        node = Node("call", (self._function_argument(), *base), name)
        inverse = power == Node("neg", (Node("number", value=Fraction(1)),))
        if inverse and f"arc{name}" in FUNCTIONS:
            return node._replace(value=f"arc{name}")
        return node if power is None else Node("pow", (node, power))

    def _function_argument(self) -> Node:
        """Returns the argument of a function: the part in brackets, or the product that follows."""
        if self._next() in ("(", "{", "["):
            return self._group(self._next())
        node = self._power() if self._next() != "-" else self._signed()
        while self._starts() and self._next().removeprefix("\\") not in FUNCTIONS and self._next() not in ("(", "["):
            node = self._beside(node)
        return node


def _times(left: Node, right: Node) -> Node:
    return Node("mul", (*(left.parts if left.kind == "mul" else (left,)), *(right.parts if right.kind == "mul" else (right,))))
