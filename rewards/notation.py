"""Parses mathematical notation into a tree of scalars (`rewards.scalars`), lists, sets, intervals, matrices, relations, words and units.

`standard` replaces equivalent notations with one form, so that `rewards.algebra` compares only that form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rewards.scalars import NUMERAL, Node, Scalar, literal, numeral, symbols
from rewards.signs import CLOSE, FUNCTIONS, OPEN, Token, Unreadable, plain, split, tokenized
from rewards.units import unit

_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
SEQUENCES = {"list", "set", "tuple"}
_RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in")

_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}\\$]*)\}")
_LABEL = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z0-9]+)+")
_WRAPPED_LABEL = re.compile(r"[A-Za-z]{2,}[A-Za-z0-9 ,.:'()-]*")
_LEAST_WORD = 4  # minimum letters of a word after a number that cannot be variables
_DATE_PART = re.compile(r"([A-Za-z]+)\.?|([0-9]+)(?:st|nd|rd|th)?(?![A-Za-z])")


def read(text: str) -> Node:
    """Returns the tree of a string. Raises `Unreadable` if the string cannot be parsed."""
    text = plain(text)
    if matrix := _MATRIX.fullmatch(_unwrapped(text)):
        return _matrix(matrix[2])
    if (digits := NUMERAL.fullmatch(text)) and (node := numeral(*digits.groups())):
        return node
    if label := _label(text):
        return Node("word", value=label)
    return _whole(tokenized(text))


def _label(text: str) -> str:
    """Returns the standard form of a date or of a name with a number (`June 20`, `Room 5`); empty for other strings."""
    wrapped = _WRAPPED.fullmatch(text)
    inside = " ".join((wrapped[1] if wrapped else text).split())
    if not re.search(r"\d", inside) or not re.fullmatch(r"[A-Za-z0-9 ,.:'()-]+", inside):
        return ""
    if date := _date(inside):
        return date
    words = set(re.findall(r"[A-Za-z]+", inside))
    if words & (FUNCTIONS | {"sqrt", "pi", "exp", "infinity", "and", "or"}):
        return ""
    return inside if (_WRAPPED_LABEL if wrapped else _LABEL).fullmatch(inside) else ""


def _date(text: str) -> str:
    """Returns the standard form of a date with or without a year, `june 20` or `june 20 2010`; empty for other strings."""
    pieces = re.split(r"[ ,]+", text)
    matches = [_DATE_PART.fullmatch(piece) for piece in pieces if piece not in ("of", "the")]
    names = [match[1].lower() for match in matches if match is not None and match[1]]
    numbers = [match[2] for match in matches if match is not None and match[2]]
    months = [month for month in _MONTHS if len(names) == 1 and len(names[0]) >= 3 and (names[0] == "sept" or month.startswith(names[0]))]
    if None in matches or len(months) != 1 or not 1 <= len(numbers) <= 2 or (len(numbers) == 2 and len(numbers[1]) != 4):
        return ""
    return " ".join([months[0], *(number.lstrip("0") for number in numbers)])


def _unwrapped(text: str) -> str:
    """Returns the string without the brackets around a matrix."""
    inner = text[1:-1].strip()
    return inner if text[:1] in "([" and text[-1:] in ")]" and inner.startswith("\\begin{") and inner.endswith("}") else text


def _whole(tokens: Sequence[Token]) -> Node:
    """Returns the list of elements, or the element itself if there is only one element."""
    pieces, between = split(tokens, ",", ";", "\\and", "\\or")
    pieces = [piece for number, piece in enumerate(pieces) if piece or not _before_and(between, number)]
    if len(pieces) == 1:
        return _element(pieces[0])
    elements = [_element(piece) for piece in pieces]
    if elements[0].kind == "relation" and all(element.kind != "relation" for element in elements[1:]) and is_assignment(elements[0]):
        elements[0] = elements[0].parts[1]  # x = 1, 2
    return Node("list", tuple(elements))


def _before_and(between: Sequence[str], number: int) -> bool:
    """Whether the piece at index `number` is between a comma and a following "and" or "or"."""
    return 0 < number < len(between) and between[number] in ("\\and", "\\or") and between[number - 1] == ","


def _element(tokens: Sequence[Token]) -> Node:
    pieces, signs = split(tokens, *_RELATIONS)
    if not signs:
        return _value(tokens)
    parts = tuple(map(_value, pieces))
    if len(signs) == 1 and signs[0] == "\\in":
        if parts[0].kind != "symbol":
            raise Unreadable("\\in without a symbol before it")
        return parts[1]
    if len(signs) == 1:
        return Node("relation", (_applied(pieces[0]) or parts[0], parts[1]), signs[0])
    return _between(parts, signs)


def _between(parts: Sequence[Node], signs: Sequence[str]) -> Node:
    """Returns the interval of a < x <= b. Longer chains and chains of equations are not values."""
    below, above = {"<", "\\le"}, {">", "\\ge"}
    if len(signs) != 2 or parts[1].kind != "symbol" or not (set(signs) <= below or set(signs) <= above):
        raise Unreadable("a chain of relations")
    low, high = (parts[0], parts[2]) if set(signs) <= below else (parts[2], parts[0])
    first, last = signs if set(signs) <= below else tuple(reversed(signs))
    return Node("interval", (low, high), ("(" if first in "<>" else "[") + (")" if last in "<>" else "]"))


def _applied(tokens: Sequence[Token]) -> Node | None:
    """Returns the left side of a definition such as f(x) = x^2, or of an inverse, f^{-1}(x); None for other tokens."""
    text = "".join(token.text for token in tokens) if all(token.kind in ("letter", "number", "sign") for token in tokens) else ""
    match = re.fullmatch(r"([A-Za-z](?:\^(?:\{-1\}|-1))?)\(([A-Za-z]|[0-9]+)\)", text)
    return Node("applied", value=f"{match[1].replace('{', '').replace('}', '')}({match[2]})") if match else None


def is_assignment(node: Node) -> bool:
    """Whether a node is `x = value`, `f(x) = value` or `(x, y) = value`. The value of f(x)
    must contain x or no variable at all, unless the argument is a digit, as in f(2)."""
    if node.kind != "relation" or node.value != "=":
        return False
    left, right = node.parts
    if symbols(left) & symbols(right):  # x = x^2
        return False
    if left.kind == "applied":
        argument = str(left.value)[-2]
        return argument.isdigit() or not symbols(right) or argument in symbols(right)
    return left.kind in ("symbol", "word") or (left.kind == "tuple" and all(part.kind == "symbol" for part in left.parts))


def _value(tokens: Sequence[Token]) -> Node:
    """Returns one side of a relation: a set, a ratio, a word, or a scalar with or without a unit."""
    if not tokens:
        raise Unreadable("no value where one is expected")
    for sign, kind in (("\\setminus", "difference"), ("\\cup", "union"), ("\\cap", "intersection")):
        sets, _ = split(tokens, sign)
        if len(sets) > 1:
            return Node(kind, tuple(map(_value, sets)))
    ratio, _ = split(tokens, ":")
    if len(ratio) > 1:
        return Node("ratio", tuple(Scalar(piece).whole() for piece in ratio))
    if bracketed := _bracketed(tokens):
        return bracketed
    if word := _word(tokens):
        return Node("word" if len(word) > 1 else "symbol", value=word)
    if len(tokens) == 1 and tokens[0].kind == "text":  # \\text{5}
        return _with_unit(tokenized(tokens[0].text))
    return _with_unit(tokens)


def _bracketed(tokens: Sequence[Token]) -> Node | None:
    """Returns a set, tuple or interval; None if the tokens are not in brackets or contain only one value."""
    first, last = tokens[0].sign, tokens[-1].sign
    inside = tokens[1:-1]
    closes_at_end = len(tokens) > 1 and first in OPEN and last in CLOSE
    if closes_at_end:
        try:
            split(inside, ",")
        except Unreadable:
            closes_at_end = False
    if not closes_at_end:
        return None
    if not inside and first != "\\{":
        raise Unreadable("empty brackets")
    pieces, _ = split(inside, ",", ";")
    if (first, last) == ("\\{", "\\}"):
        return Node("set", tuple(map(_element, pieces)) if inside else ())
    if first == "{" and last == "}":
        return _whole(inside)
    if len(pieces) == 1:
        return _value(inside) if (first, last) == ("(", ")") and (_word(inside) or _bracketed(inside)) else None
    brackets = first + last
    if brackets in ("()", "\\langle\\rangle"):
        return Node("tuple", tuple(map(_element, pieces)))
    if brackets in ("[]", "[)", "(]") and len(pieces) == 2:
        return Node("interval", tuple(Scalar(piece).whole() for piece in pieces), brackets)
    raise Unreadable(f"the brackets {brackets}")


def _word(tokens: Sequence[Token]) -> str:
    """Returns a name or word whose letters are not factors, with a capital letter or at least four letters; empty for other tokens."""
    if any(token.kind not in ("letter", "text") or not re.fullmatch(r"\(?[A-Za-z][A-Za-z ,.'()-]*", token.text) for token in tokens):
        return ""
    if len(tokens) == 1 and tokens[0].kind == "letter":
        return ""
    words = "".join(" " * token.spaced + token.text for token in tokens).strip()
    letters = [token.text for token in tokens]
    if (
        all(len(letter) == 1 for letter in letters)
        and words.islower()
        and (len(letters) < 4 or (" " in words and max(map(len, words.split())) == 1))
    ):
        return ""
    plain = words.strip("() ")
    return "".join(plain.split()) if plain.isupper() and max(map(len, plain.split())) == 1 else plain


def _with_unit(tokens: Sequence[Token]) -> Node:
    """Returns a scalar, with its unit if there is one: `5\\text{ cm}`, `5 cm^2`, `90^\\circ`, `\\$5`.

    Two or three letters may be a word, a known unit or variables (`5 men`, `5 cm^2`, `5 xy`). Their unit has a second part, the product.
    """
    end = len(tokens)
    if tokens[0].sign in ("$", "\\$") and end > 1:
        return Node("unit", (Scalar(tokens[1:]).whole(),), "$")
    if end > 2 and tokens[0].sign == "-" and tokens[1].sign in ("$", "\\$"):
        return Node("unit", (Scalar([tokens[0], *tokens[2:]]).whole(),), "$")
    power = ""
    signs = [token.sign for token in tokens]
    if end > 3 and signs[-2] == "^" and tokens[-1].kind == "number":
        power, end = f"^{tokens[-1].text}", end - 2
    elif end > 5 and signs[-4:-2] == ["^", "{"] and signs[-1] == "}" and tokens[-2].kind == "number":
        power, end = f"^{tokens[-2].text}", end - 4
    if end > 1 and tokens[end - 1].kind == "text":
        return _unit(Scalar(tokens[: end - 1]).whole(), tokens[end - 1].text + power)
    if _degrees(tokens):
        return Node("unit", (Scalar(tokens[:-2]).whole(),), "deg")
    at = next((at for at in range(1, end - 1) if tokens[at].spaced and tokens[at - 1].kind == "number"), end)
    if end - at > 1 and all(token.kind == "letter" for token in tokens[at:end]) and not any(token.spaced for token in tokens[at + 1 : end]):
        name = "".join(token.text for token in tokens[at:end]) + power
        known = unit(name) is not None
        if not power and end - at >= _LEAST_WORD:
            return _unit(Scalar(tokens[:at]).whole(), name)
        if known or not power:
            return Node("unit", (Scalar(tokens[:at]).whole(), Scalar(tokens).whole()), name)
    return Scalar(tokens).whole()


def _unit(value: Node, name: str) -> Node:
    return Node("percent", (value,)) if name == "percent" else Node("unit", (value,), name)


def _degrees(tokens: Sequence[Token]) -> bool:
    """Whether the tokens are a number of degrees and not a function of degrees."""
    ends = len(tokens) > 2 and tokens[-1].sign == "\\circ" and tokens[-2].sign == "^"
    return ends and all(token.kind == "number" or token.sign in ("-", "+", "/", "\\frac", "{", "}") for token in tokens[:-2])


def _matrix(text: str) -> Node:
    rows = [row for row in re.split(r"\\\\", text.strip().removesuffix("\\\\"))]
    cells = [[Scalar(tokenized(cell)).whole() for cell in row.split("&")] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("a matrix with rows of different lengths")
    return Node("matrix", tuple(cell for row in cells for cell in row), str(len(cells[0])))


def of_same_function(truth: Node, answer: Node) -> Node | None:
    """Returns the truth in the answer's variable if both define the same function, as f(t) = t^2 and f(x) = x^2 do; None if they do not."""
    names = truth.parts[0], answer.parts[0]
    if names[0] == names[1]:
        return truth
    if names[0].kind == names[1].kind == "applied":
        (first, old), (second, new) = (str(name.value)[:-1].split("(") for name in names)
        if first != second or old.isdigit() or new.isdigit() or new in symbols(truth.parts[1]):
            return None
        return _renamed(truth, old, new)
    if {name.kind for name in names} != {"applied", "symbol"}:
        return None
    function, variable = names if names[0].kind == "applied" else names[::-1]
    argument = str(function.value)[:-1].rpartition("(")[2]
    return None if argument.isdigit() or argument == variable.value else truth


def _renamed(node: Node, old: str, new: str) -> Node:
    return (
        Node("symbol", value=new)
        if node == Node("symbol", value=old)
        else node._replace(parts=tuple(_renamed(part, old, new) for part in node.parts))
    )


_INFINITE = Node("constant", value="infty")
_MINUS_INFINITE = Node("neg", (_INFINITE,))
_EVERYTHING = Node("tuple", (_MINUS_INFINITE, _INFINITE))  # the open interval that contains all real numbers
_ALL_REALS = ("all real numbers", "real numbers", "the real numbers", "all reals", "every real number", "the set of all real numbers")


def _reals(node: Node) -> Node:
    """Replaces notations for all real numbers, or for all except some points, with intervals: R, R without {1}, x != 1."""
    if node == Node("symbol", value="mathbb R") or (node.kind == "word" and str(node.value).casefold() in _ALL_REALS):
        return _EVERYTHING
    if node.kind == "relation" and node.value == "\\ne" and node.parts[0].kind == "symbol" and not symbols(node.parts[1]):
        return _without([node.parts[1]]) or node
    if node.kind == "difference" and len(node.parts) == 2 and _reals(standard(node.parts[0])) == _EVERYTHING:
        points = node.parts[1]
        return _without(points.parts if points.kind == "set" else [points]) or node
    return node


def _without(points: Sequence[Node]) -> Node | None:
    """Returns all real numbers except the given points, as a union of open intervals; None if the points are not numbers."""
    known = [(value, point) for point in points if (value := literal(point)) is not None]
    if len(known) < len(points) or not points or len({value for value, _ in known}) < len(points):
        return None
    ends = [_MINUS_INFINITE, *(point for _, point in sorted(known, key=lambda entry: entry[0])), _INFINITE]
    return Node("union", tuple(Node("interval", pair, "()") for pair in pairwise(ends)))


def standard(node: Node) -> Node:
    """Returns the same tree for equivalent notations: x > 3 becomes an interval, an open interval a tuple, ± a list, {a} its element."""
    node = _reals(node)
    if node.kind == "relation" and node.value in ("<", ">", "\\le", "\\ge"):
        left, right = node.parts
        sign = str(node.value)
        if right.kind == "symbol":
            left, right, sign = right, left, {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]
        if left.kind == "symbol" and literal(right) is not None:
            ends = {"<": "()", "\\le": "(]", ">": "()", "\\ge": "[)"}[sign]
            parts: tuple[Node, ...] = (right, _INFINITE) if sign in (">", "\\ge") else (_MINUS_INFINITE, right)
            node = Node("interval", parts, ends)
    if node.kind == "interval" and node.value == "()":
        return Node("tuple", node.parts)
    if node.kind in ("list", "set") and len(node.parts) > 1:
        parts = tuple(element for part in node.parts for element in (standard(part).parts if _has(part, "pm") else (part,)))
        return Node(node.kind, parts)
    if _has(node, "pm"):
        return Node("list", tuple(_signed(node, plus) for plus in (True, False)))
    return standard(node.parts[0]) if node.kind == "set" and len(node.parts) == 1 else node


def _has(node: Node, kind: str) -> bool:
    return node.kind == kind or (node.kind not in SEQUENCES and any(_has(part, kind) for part in node.parts))


def _signed(node: Node, plus: bool) -> Node:
    if node.kind == "pm":
        return node.parts[0] if plus else Node("neg", node.parts)
    return node._replace(parts=tuple(_signed(part, plus) for part in node.parts))
