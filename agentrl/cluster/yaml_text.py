"""Writes YAML from plain data: mappings, lists, strings, numbers, booleans and None.

Strings are written in double quotes with escapes, unless they are plain words or several lines of ASCII. So no parser can read a string as
syntax, a boolean or a number. A YAML library would add a dependency to the core for one command that only writes YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*[A-Za-z0-9]")
_UNSAFE = re.compile(r'[^ -~]|["\\]')
_EXACT = 1 << 53
_BLOCK = re.compile(r"[!-~][ -~]*\n(?:[ -~]*\n)*[ -~]*[!-~]\n")  # lines of ASCII that a literal block does not change
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "nan", "inf"})  # words that a parser may read as other types


def to_yaml(documents: Sequence[Mapping[str, Any]], *, comments: Sequence[str] = ()) -> str:
    """Returns a stream of YAML documents that starts with comment lines, in which `?` replaces non-ASCII characters. Raises `ValueError`
    for a float that is not finite, and `TypeError` for a value of another type."""
    header = "".join(f"# {re.sub('[^ -~]', '?', line)}\n" for line in comments)
    return header + "".join("---\n" + "".join(f"{line}\n" for line in _lines(document, 0)) for document in documents)


def _lines(value: Any, indent: int) -> Iterator[str]:
    """Yields the lines of a non-empty mapping or list, or one line with a scalar."""
    space = "  " * indent
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{space}{_scalar(str(key))}:", inner, indent)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            if isinstance(inner, Mapping) and inner:
                first, *others = _lines(inner, indent + 1)
                yield f"{space}- {first[len(space) + 2 :]}"
                yield from others
            else:
                yield from _entry(f"{space}-", inner, indent)
    else:
        yield f"{space}{_scalar(value)}"


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    """Yields a key or dash with its value, which is on the same line if it is a scalar."""
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from _lines(value, indent + 1)
    elif isinstance(value, str) and _BLOCK.fullmatch(value):
        yield f"{head} |"
        yield from (f"{'  ' * (indent + 1)}{line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if is_plain else '"' + _UNSAFE.sub(lambda match: f"\\U{ord(match[0]):08x}", value) + '"'
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return str(int(value)) if value else "0"
    if isinstance(value, float):
        mantissa, exponent, power = json.dumps(value, allow_nan=False).partition("e")
        return mantissa + (".0" if exponent and "." not in mantissa else "") + exponent + power  # YAML 1.1 reads 1e-07 as text
    return json.dumps(value, allow_nan=False)  # also an empty mapping or list
