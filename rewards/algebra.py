"""Decides whether an answer has the same value as the truth, and whether it is in evaluated form.

Two values are equal if they agree at random points to 40 digits, relative to the value, or within the tolerance if either value is written
with decimals. The points are derived from a hash of both expressions, so that no answer can be constructed that is equal only at these
points. An evaluation may take very long, so it runs in a subprocess with a deadline (`rewards.mathematics`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random
from typing import Any

import sympy

from agentrl.base.numbers import is_whole
from rewards.asked import names_percent, names_unit
from rewards.notation import SEQUENCES, is_assignment, of_same_function, standard
from rewards.scalars import Node, has_decimal, literal, percentage, symbols
from rewards.units import unit

DIGITS = 50  # precision of constants, in decimal digits
POINTS = 6
MOST_ELEMENTS = 30  # maximum number of elements in an unordered list or set
_EXACT = sympy.Float(10) ** -40
_FUNCTIONS = {"arsinh": sympy.asinh, "arcosh": sympy.acosh, "artanh": sympy.atanh, "ln": sympy.log} | {
    name: getattr(sympy, name.replace("arc", "a"))
    for name in "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh".split()  # noqa: SIM905
}
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}
_WIDE = re.compile(r"(?:[A-Za-z0-9.+\-*/^_=(){}|!, \n]|\\[,;! ])+")
_WIDE_COMMANDS = frozenset(
    """int iint sum prod lim limits to infty frac dfrac tfrac sqrt cdot times div pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh
    tanh ln log exp binom gcd lcm max min left right mathrm partial rightarrow""".split()  # noqa: SIM905
)
_WIDE_ONLY = frozenset({"int", "iint", "sum", "prod", "lim", "gcd", "lcm", "max", "min", "partial"})
_OF_NUMBERS = {"factorial": sympy.factorial, "binomial": sympy.binomial, "floor": sympy.floor, "ceiling": sympy.ceiling}


class Comparison:
    """Compares answers with truths. `unfinished` is true if a value was correct but not in evaluated form."""

    def __init__(self, decimals: int, *, any_form: bool = False, prompt: str = "") -> None:
        self._decimals, self._any_form, self._prompt = decimals, any_form, prompt
        self.unfinished = False

    def same(self, truth: Node, answer: Node) -> bool:
        """Whether the answer equals the truth."""
        if "relation" in (truth.kind, answer.kind) and truth.kind != answer.kind:  # x = 5 cm, and 5 cm
            truth, answer = (node.parts[1] if is_assignment(node) else node for node in (truth, answer))
        if answer.kind == "unit":
            known = _same_unit(truth.value, answer.value) if truth.kind == "unit" else names_unit(self._prompt, str(answer.value))
            return known and self.same(truth.parts[0] if truth.kind == "unit" else truth, answer.parts[0])
        truth_percent, answer_percent = percentage(truth), percentage(answer)
        if (truth_percent is None) is not (answer_percent is None) and names_percent(self._prompt):  # 18 and 18%
            if self._same_scalar(truth_percent or truth, answer_percent or answer):
                return True
            if truth_percent is None and abs(literal(truth) or 0) > 1:  # 18 is not a fraction, so 18% is correct and 1800% is wrong
                return False
        if truth.kind == "unit":  # an answer may omit the truth's unit, and may add only a unit that the question names
            return self.same(truth.parts[0], answer)
        if truth.kind == answer.kind == "relation" and truth.value != "=" and symbols(truth) != symbols(answer):
            return False
        truth, answer = standard(truth), standard(answer)
        if "relation" in (truth.kind, answer.kind):
            return self._same_relation(truth, answer)
        if "ratio" in (truth.kind, answer.kind) and truth.kind != answer.kind:  # 3:2 and 3/2
            truth, answer = (Node("div", node.parts) if node.kind == "ratio" and len(node.parts) == 2 else node for node in (truth, answer))
        if {truth.kind, answer.kind} & {"list", "set", "tuple"}:
            return self._same_elements(truth, answer)
        if {truth.kind, answer.kind} & _OTHERS:
            return self._same_structure(truth, answer)
        return self._same_scalar(truth, answer)

    def _same_relation(self, truth: Node, answer: Node) -> bool:
        if truth.kind != answer.kind:
            return False
        if alike(truth, answer):
            return True
        if is_assignment(truth) and is_assignment(answer):
            if (renamed := of_same_function(truth, answer)) is not None:
                return self.same(renamed.parts[1], answer.parts[1])
            if "applied" in (truth.parts[0].kind, answer.parts[0].kind):
                return False
        return truth.value == answer.value and self._finished(truth, answer, self._same_sides(truth, answer))

    def _same_sides(self, truth: Node, answer: Node) -> bool:
        """Whether lhs - rhs of one relation is a constant multiple of lhs - rhs of the other relation.

        For inequalities, the factor must be positive.
        """
        try:
            true_difference, given_difference = (built(side.parts[0]) - built(side.parts[1]) for side in (truth, answer))
        except NoScalar:
            return False
        ratios = [
            (first, second)
            for first, second in _at_points(true_difference, given_difference, truth, answer)
            if first is not None and second
        ]
        values = [first / second for first, second in ratios if second is not None]
        if len(values) < POINTS // 2 or not values[0]:
            return False
        steady = all(abs(value - values[0]) <= _EXACT * abs(values[0]) for value in values)
        return steady and (truth.value in ("=", "\\ne") or bool(sympy.re(values[0]) > 0))

    def _same_elements(self, truth: Node, answer: Node) -> bool:
        ordered = "tuple" in (truth.kind, answer.kind)
        if ordered and "set" in (truth.kind, answer.kind):
            return False
        truth_parts = list(truth.parts) if truth.kind in SEQUENCES else [truth]
        answer_parts = list(answer.parts) if answer.kind in SEQUENCES else [answer]
        if len(truth_parts) != len(answer_parts) or len(truth_parts) > MOST_ELEMENTS or (ordered and {truth.kind, answer.kind} - SEQUENCES):
            return False
        if "list" in (truth.kind, answer.kind) and len(truth_parts) == 1 and {truth.kind, answer.kind} != {"list"}:
            return False
        names = {truth.kind, answer.kind} == {"list"} and all(map(_is_name, truth_parts))
        return all(map(self.same, truth_parts, answer_parts)) if ordered or names else self._same_bag(truth_parts, answer_parts)

    def _same_bag(self, truth_parts: Sequence[Node], answer_parts: list[Node]) -> bool:
        for part in truth_parts:
            place = next((place for place, other in enumerate(answer_parts) if self.same(part, other)), None)
            if place is None:
                return False
            answer_parts = answer_parts[:place] + answer_parts[place + 1 :]
        return not answer_parts

    def _same_structure(self, truth: Node, answer: Node) -> bool:
        if "word" in (truth.kind, answer.kind):
            return _letters(truth) == _letters(answer) != ""
        if truth.kind != answer.kind or len(truth.parts) != len(answer.parts):
            return False
        if truth.kind in ("union", "intersection"):
            return len(truth.parts) <= MOST_ELEMENTS and self._same_bag(truth.parts, list(answer.parts))
        return truth.value == answer.value and all(map(self.same, truth.parts, answer.parts))

    def _same_scalar(self, truth: Node, answer: Node) -> bool:
        truth_number, answer_number = literal(truth), literal(answer)
        if truth_number is not None and answer_number is not None:
            if truth_number == answer_number:
                return True
            inexact = not (is_whole(truth_number) and is_whole(answer_number)) and (has_decimal(truth) or has_decimal(answer))
            return inexact and self._close(sympy.Rational(truth_number), sympy.Rational(answer_number))
        ordered = _matrices(truth)
        try:
            true_value, given_value = built(truth, ordered=ordered), built(answer, ordered=ordered)
        except NoScalar:
            return False
        if true_value in (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):  # 2 * oo is oo too
            return bool(true_value.is_extended_real) and alike(truth, answer)
        equal = bool(sympy.expand(true_value - given_value) == 0) if ordered else self._equal(true_value, given_value, truth, answer)
        return self._finished(truth, answer, equal)

    def _finished(self, truth: Node, answer: Node, equal: bool) -> bool:
        if not equal or self._any_form or alike(truth, answer):
            return equal
        if literal(answer) is None and (literal(truth) is not None or not unfinished(answer) <= unfinished(truth)):
            self.unfinished = True
            return False
        return True

    def _equal(self, true_value: Any, given_value: Any, truth: Node, answer: Node) -> bool:
        pairs = list(_at_points(true_value, given_value, truth, answer))
        known = [(first, second) for first, second in pairs if first is not None and second is not None]
        if len(known) < (len(pairs) + 1) // 2 or any((first is None) is not (second is None) for first, second in pairs):
            return bool(true_value == given_value)
        if not has_decimal(truth) and not has_decimal(answer):
            return all(_equal_numbers(first, second) for first, second in known)
        if len(pairs) == 1:
            return all(self._close(first, second) for first, second in known)
        relative = 5 * sympy.Float(10) ** -self._decimals  # the maximum relative difference of a coefficient that `_close` allows
        return all(abs(sympy.N(first - second, DIGITS)) <= relative * abs(first) for first, second in known)

    def _close(self, wanted: Any, given: Any) -> bool:
        """Whether two numbers agree to `decimals` places or, below 0.1, to that many significant digits. 0 is close only to 0."""
        size = abs(sympy.N(wanted, DIGITS))
        if not size or not given:
            return bool(wanted == given)
        places = self._decimals - min(0, int(sympy.floor(sympy.log(size, 10))) + 1)
        return bool(abs(sympy.N(wanted - given, DIGITS)) <= sympy.Float(10, DIGITS) ** -places / 2)


_OTHERS = {"interval", "matrix", "ratio", "union", "intersection", "difference", "word", "numeral"}
_WORK = frozenset({"function", "factorial", "binomial", "floor", "ceiling", "degrees", "abs", "arithmetic"})


class NoScalar(ValueError):
    """A tree that is not a scalar, such as a word or a set."""


def _is_name(node: Node) -> bool:
    """Whether a node is a word or a capital letter. If all elements of a list are such names, their order counts."""
    return node.kind == "word" or (node.kind == "symbol" and str(node.value).isupper())


def _letters(node: Node) -> str:
    """Returns the lower-case letters of a word, or of a product of letters ("yes" may be parsed as a product); empty for other nodes."""
    if node.kind == "mul" and all(part.kind == "symbol" or part.value in ("e", "i") for part in node.parts):
        return "".join(str(part.value) for part in node.parts).casefold()
    return str(node.value).casefold() if node.kind == "word" else ""


def _same_unit(truth: Fraction | str, answer: Fraction | str) -> bool:
    first, second = str(truth).strip(), str(answer).strip()
    return first == second or (unit(first) is not None and unit(first) == unit(second))


def _matrices(node: Node) -> bool:
    """Whether capital letters are probably matrices: an inverse is next to another letter, or a product occurs in both orders."""
    capitals = {str(name) for name in symbols(node) if len(str(name)) == 1 and str(name).isupper()}
    pairs = set(_products(node))
    return len(capitals) > 1 and (_has_inverse(node) or any(pair[::-1] in pairs and len(set(pair)) > 1 for pair in pairs))


def _products(node: Node) -> Iterator[tuple[str, str]]:
    if node.kind == "mul":
        yield from (
            (str(left.value), str(right.value)) for left, right in pairwise(node.parts) if (str(left.value) + str(right.value)).isupper()
        )
    for part in node.parts:
        yield from _products(part)


def _has_inverse(node: Node) -> bool:
    inverse = node.kind == "pow" and node.parts[1] == Node("neg", (Node("number", value=Fraction(1)),))
    return (inverse and any(str(name).isupper() for name in symbols(node.parts[0]))) or any(map(_has_inverse, node.parts))


def built(node: Node, *, ordered: bool = False) -> Any:
    """Returns the tree as a sympy expression, with sympy's automatic evaluation. Raises `NoScalar` if the tree is not a scalar.

    Args:
        ordered: whether the factors of a product that are capital letters keep their order.
    """
    parts = [built(part, ordered=ordered) for part in node.parts]
    if isinstance(node.value, Fraction):
        return sympy.Rational(node.value)
    if node.kind == "symbol":
        return sympy.Symbol(str(node.value), commutative=not (ordered and str(node.value).isupper()))
    if node.kind == "constant":
        return _CONSTANTS[str(node.value)]
    if node.kind == "wide":
        return _evaluated(str(node.value))
    if node.kind == "root":
        return _root(*parts)
    if node.kind == "call":
        if node.value in ("log", "lg"):
            return sympy.log(parts[0], parts[1] if len(parts) > 1 else 10)
        return _FUNCTIONS[str(node.value)](*parts)
    if node.kind in _OF_NUMBERS:
        return _OF_NUMBERS[node.kind](*parts)
    simple = {
        "add": lambda: sympy.Add(*parts),
        "mul": lambda: sympy.Mul(*parts),
        "div": lambda: parts[0] / parts[1],
        "neg": lambda: -parts[0],
        "pow": lambda: sympy.Pow(*parts),
        "abs": lambda: sympy.Abs(parts[0]),
        "degrees": lambda: parts[0] * sympy.pi / 180,
        "percent": lambda: parts[0] / 100,
    }
    if node.kind not in simple:
        raise NoScalar(node.kind)
    return simple[node.kind]()


def read_wide(text: str) -> Node | None:
    """Returns an integral, a sum, a limit or a similar expression as one leaf, which sympy computes later; None for other strings."""
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    if not commands & _WIDE_ONLY or not commands <= _WIDE_COMMANDS or re.search(r"\d(?:\s|\\[,;! ])+\d", text):
        return None
    if not _WIDE.fullmatch(re.sub(r"\\[A-Za-z]+", " ", text)) or "=" in re.sub(
        r"_\{[^{}]*\}", "", text
    ):  # an equation, not the bounds of a sum
        return None
    try:
        return Node("wide", value=text) if isinstance(_evaluated(text), sympy.Expr) else None
    except MemoryError:
        raise
    except Exception:  # the parser may raise anything on third-party text
        return None


@lru_cache(maxsize=4)
def _evaluated(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    return latex2sympy(text, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)).doit()


def _root(under: Any, degree: Any) -> Any:
    if under.is_negative and degree.is_Integer and degree % 2:
        return -sympy.Pow(-under, 1 / degree)  # the real root
    return sympy.Pow(under, 1 / degree)


def _at_points(true_value: Any, given_value: Any, truth: Node, answer: Node) -> Iterator[tuple[Any, Any]]:
    """Yields the values of both expressions at random points.

    All variables are negative at the first point and positive at the second. Values that are not finite are None.
    """
    names = sorted(true_value.free_symbols | given_value.free_symbols, key=str)
    random = Random(hashlib.blake2b(repr((truth, answer)).encode()).digest())
    for number in range(POINTS if names else 1):
        sign = {0: -1, 1: 1}.get(number) or random.choice((-1, 1))
        point = {symbol: sympy.Rational(sign * random.randint(1, 400), 97) for symbol in names}
        yield _number(true_value, point), _number(given_value, point)


def _number(value: Any, point: Mapping[Any, Any]) -> Any:
    number = value.subs(point) if point else value
    if not number.is_Rational:
        number = sympy.N(number, DIGITS)
    return number if number.is_number and number.is_finite else None


def _equal_numbers(first: Any, second: Any) -> bool:
    if first.is_Rational and second.is_Rational:
        return bool(first == second)
    if not first or not second:
        return bool(abs(first - second) < sympy.Float(10) ** -100)
    return bool(abs(first - second) <= _EXACT * max(abs(first), abs(second)))


def unfinished(node: Node) -> set[str]:
    """Returns the kinds of unevaluated parts in a tree: arithmetic, functions of numbers or variables, factorials and similar parts."""
    if node.kind == "wide":
        return set(_WORK)
    kinds = set().union(*map(unfinished, node.parts))
    if node.kind == "call" or node.kind in _WORK - {"abs"}:
        kinds.add("function" if node.kind == "call" else node.kind)
    if node.kind == "abs" and not built(node).free_symbols:
        kinds.add("abs")
    if node.kind != "relation" and literal(node) is None and _leaves_arithmetic(node):
        kinds.add("arithmetic")
    return kinds


def _leaves_arithmetic(node: Node) -> bool:
    """Whether the tree contains numbers, like terms or equal factors that are not combined."""
    if built(node).is_Rational or (node.kind == "neg" and node.parts[0].kind == "neg"):
        return True
    values = [built(part) for part in node.parts]
    if node.kind in ("add", "mul") and sum(bool(value.is_Rational) for value in values) > 1:
        return True
    if node.kind in ("mul", "pow", "div") and not any(value.free_symbols for value in values) and _multiplies_out(node, values):
        return True
    if node.kind == "add":
        return any(_terms(left) & _terms(right) for left, right in combinations(values, 2))
    if node.kind == "mul":
        bases = [value.as_base_exp()[0] for value in values if value.as_base_exp()[0].is_Atom and not value.is_Rational]
        return len(set(bases)) < len(bases)
    if node.kind == "div" and values[1].free_symbols:
        return _common_factor(*values)
    return False


def _multiplies_out(node: Node, values: Sequence[Any]) -> bool:
    """Whether a node is a product of sums of numbers, a power of such a sum or of i, or a division by a complex number."""
    if node.kind == "div":
        return bool(values[1].has(sympy.I))
    if node.kind == "pow":
        return bool(values[1].is_Integer) and (node.parts[0].kind == "add" or values[0] == sympy.I)
    return sum(part.kind == "add" for part in node.parts) > 1


def _common_factor(above: Any, below: Any) -> bool:
    """Whether numerator and denominator have a common factor that is not a number."""
    try:
        return not sympy.gcd(above, below).is_number
    except sympy.PolynomialError:  # for example for unknown functions
        return False


def _terms(value: Any) -> set[Any]:
    """Returns the terms of an expanded expression without their coefficients, except the constant term."""
    return {term.as_coeff_Mul()[1] for term in sympy.Add.make_args(sympy.expand(value))} - {sympy.Integer(1)}


def alike(first: Node, second: Node) -> bool:
    """Whether two trees are equal except for the order of terms and factors."""
    return _canonical(first) == _canonical(second)


def _canonical(node: Node) -> Node:
    """Returns the tree with the parts of sums and products in a fixed order."""
    parts = tuple(map(_canonical, node.parts))
    return node._replace(parts=tuple(sorted(parts, key=repr)) if node.kind in ("add", "mul") else parts)
