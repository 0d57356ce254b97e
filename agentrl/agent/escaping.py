"""Text of programs in which no control token of a tokenizer is spelled any more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SEPARATORS = " \N{MIDDLE DOT}\N{REPLACEMENT CHARACTER}"
_PRIVATE = range(0xF0000, 0xFFFFE)


class ControlTokenEscaper:
    """Breaks up the `tokens` that a text spells: after its first character comes one that is in none of them, most often a space.

    No token can lie across that character, so breaking one up never makes another, and one pass over the text is enough: every
    place where a token begins is broken there, also where tokens overlap. A token of one character is replaced.
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
        """Text without a token in it; one that holds none is unchanged. Takes time proportional to the text's length."""
        return text if self._pattern is None else self._pattern.sub(self._broken, text)

    def _broken(self, match: re.Match[str]) -> str:
        return self._replacement if match[0] in self._alone else match[0] + self._separator


def _unused(used: set[str]) -> Iterator[str]:
    """Characters that no token holds: those that read best come first."""
    yield from (character for character in _SEPARATORS if character not in used)
    yield from (chr(number) for number in _PRIVATE if chr(number) not in used)


def _first_characters(tokens: set[str]) -> str:
    """A pattern of the character with which a token begins, where one does."""
    rests: dict[str, set[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], set()).add(token[1:])
    ends = {first: "" if "" in texts else f"(?={_any_of(texts)})" for first, texts in sorted(rests.items())}
    return "|".join(re.escape(first) + end for first, end in ends.items())


def _any_of(texts: set[str]) -> str:
    """A pattern of the shortest of `texts` at a place. What they begin with alike is looked at once, so that many cost as little as one."""
    if "" in texts:
        return ""
    branches: dict[str, set[str]] = {}
    for text in texts:
        branches.setdefault(text[0], set()).add(text[1:])
    return "(?:" + "|".join(_stem(first, rests) for first, rests in sorted(branches.items())) + ")"


def _stem(first: str, rests: set[str]) -> str:
    """One branch: the characters up to where its texts part."""
    stem = first
    while "" not in rests and len({rest[0] for rest in rests}) == 1:
        stem += next(iter(rests))[0]
        rests = {rest[1:] for rest in rests}
    return re.escape(stem) + _any_of(rests)
