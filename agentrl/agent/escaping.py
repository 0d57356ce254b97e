"""Escapes the control tokens of a tokenizer in hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SEPARATORS = " \N{MIDDLE DOT}\N{REPLACEMENT CHARACTER}"
_PRIVATE = range(0xF0000, 0xFFFFE)


class ControlTokenEscaper:
    """Escapes `tokens` by inserting a character that no token contains, usually a space, after the first character of each.

    No token can span that character, so one pass is enough, even if tokens overlap. A token of one character is replaced.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        known = {token for token in tokens if token}
        used = set("".join(known))
        unused = _unused(used)
        self._separator = next(unused)
        self._replacement = "\N{REPLACEMENT CHARACTER}" if "\N{REPLACEMENT CHARACTER}" not in used else self._separator
        self._alone = {token for token in known if len(token) == 1}
        self._pattern = re.compile(_first_characters(known)) if known else None

    def escape(self, text: str) -> str:
        """Returns the text without any of the tokens, in time linear in its length."""
        return text if self._pattern is None else self._pattern.sub(self._broken, text)

    def _broken(self, match: re.Match[str]) -> str:
        return self._replacement if match[0] in self._alone else match[0] + self._separator


def _unused(used: set[str]) -> Iterator[str]:
    """Characters that no token contains, the most readable ones first."""
    yield from (character for character in _SEPARATORS if character not in used)
    yield from (chr(number) for number in _PRIVATE if chr(number) not in used)


def _first_characters(tokens: set[str]) -> str:
    """A pattern that matches the first character of each token."""
    rests: dict[str, set[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], set()).add(token[1:])
    ends = {first: "" if "" in texts else f"(?={_any_of(texts)})" for first, texts in sorted(rests.items())}
    return "|".join(re.escape(first) + end for first, end in ends.items())


def _any_of(texts: set[str]) -> str:
    """A pattern for the shortest matching text. Common prefixes are factored out, so that many texts cost as little as one."""
    if "" in texts:
        return ""
    branches: dict[str, set[str]] = {}
    for text in texts:
        branches.setdefault(text[0], set()).add(text[1:])
    return "(?:" + "|".join(_stem(first, rests) for first, rests in sorted(branches.items())) + ")"


def _stem(first: str, rests: set[str]) -> str:
    """The pattern of one branch: the common prefix of its texts, then the alternatives."""
    stem = first
    while "" not in rests and len({rest[0] for rest in rests}) == 1:
        stem += next(iter(rests))[0]
        rests = {rest[1:] for rest in rests}
    return re.escape(stem) + _any_of(rests)
