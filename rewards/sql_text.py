"""Parses SQL as far as a verifier needs it: the statements in a string, whether a statement orders its rows, and its literals."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<blank>[\s\ufeff]++|--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?)
      | (?P<text>'(?:[^']|'')*+'?)
      | (?P<name>"(?:[^"]|"")*+"?|`(?:[^`]|``)*+`?|\[[^\]]*+\]?|[^\W\d][\w$]*+)
      | (?P<number>(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?)
      | (?P<end>;)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def statements(text: str) -> list[str]:
    """Returns the SQL statements in a string, without semicolons and without comments around them."""
    texts: list[str] = []
    start = stop = -1
    for kind, match in _tokens(text):
        if kind == "end":
            texts += [text[start:stop]] if start >= 0 else []
            start = -1
        elif kind != "blank":
            start, stop = (match.start() if start < 0 else start), match.end()
    return texts + ([text[start:stop]] if start >= 0 else [])


def orders(query: str) -> bool:
    """Whether a query orders its own result. An ORDER BY in a subquery does not count."""
    depth, before = 0, ""
    for kind, match in _tokens(query):
        token = match[0].lower()
        depth += (token == "(") - (token == ")") if kind == "other" else 0
        if kind == "name" and token == "by" and before == "order" and depth == 0:
            return True
        before = before if kind == "blank" else token
    return False


def literals(query: str) -> list[str | int | float]:
    """Returns the strings and numbers in a query, without numbers of 19 or more characters."""
    values: list[str | int | float] = []
    for kind, match in _tokens(query):
        token = match[0]
        if kind == "text":
            values.append(token[1:].removesuffix("'").replace("''", "'"))
        elif kind == "number" and len(token) < 19:
            values.append(int(token) if token.isdigit() else float(token))
    return values


def _tokens(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    for match in _TOKEN.finditer(text):
        assert match.lastgroup is not None, "every alternative has a name"
        yield match.lastgroup, match
