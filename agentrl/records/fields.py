"""Checks the fields of a record when the record is created, so that every record can be stored and is equal when it is read back.

Models, sandboxes, verifiers and task families supply values for records that JSON or UTF-8 may be unable to represent. The annotation of a
field determines its check:

- `Text` is for untrusted free text: output, answers, evidence. An unpaired surrogate becomes U+FFFD. No text is rejected, so that an agent
  cannot cause a fault with its text.
- `str` is for names, ids, paths and keys. An unpaired surrogate raises a `ValueError`.
- `JsonObject` is JSON with string keys, finite numbers, integers of at most 4,000 digits, and at most 64 levels. Tuples become lists.
- `float` is any number except NaN.
- `int` has at most 63 bits, as in the store.
- `tuple[float]` contains measured numbers, which may be infinite or NaN. The learner excludes and reports such values.

A check takes time proportional to the size of the value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects in a JSON value."""

MAX_DIGITS = 4000
"""Maximum number of digits of an integer in a JSON value. By default, Python itself reads and prints at most 4,300 digits."""

_LARGEST = 10**MAX_DIGITS
_WHOLE = 1 << 63
_HALF = re.compile("[\ud800-\udfff]")

Check = Callable[[Any], Any]
"""Returns the value to store. Raises `ValueError` with a message that does not name the field."""


def text(value: Any) -> str:
    """Returns the text, with every unpaired surrogate replaced by U+FFFD. Raises `ValueError` if the value is not a string."""
    string = _string(value)
    return string if encodable(string) else _HALF.sub("\N{REPLACEMENT CHARACTER}", string)


def name(value: Any) -> str:
    """Returns the string. Raises `ValueError` if the value is not a string or contains an unpaired surrogate."""
    string = _string(value)
    if not encodable(string):
        raise ValueError(f"{string[:80]!a} contains half of a surrogate pair, which UTF-8 cannot encode")
    return string


def json_value(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Returns a copy of a JSON value with at most `levels` levels, so that later changes to the original have no effect. Tuples become
    lists. Raises `ValueError` for any other value."""
    if isinstance(value, str):
        return name(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_LARGEST < value < _LARGEST:
            raise ValueError(f"contains an integer of more than {MAX_DIGITS} digits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a JSON number")
        return float(value)
    if isinstance(value, (list, tuple)):
        _need(levels)
        return [json_value(item, levels - 1) for item in value]
    if isinstance(value, Mapping):
        return _json_items(value, levels)
    raise ValueError(f"a {type(value).__name__} is not JSON")


def json_object(value: Any) -> dict[str, Any]:
    """Returns a copy of a JSON object. Raises `ValueError` if the value is not a JSON object or has more than `MAX_DEPTH` levels."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object, got {type(value).__name__}")
    return _json_items(value, MAX_DEPTH)


def _json_items(items: Mapping[Any, Any], levels: int) -> dict[str, Any]:
    _need(levels)
    copied = {}
    for key, item in items.items():
        try:
            copied[name(key)] = json_value(item, levels - 1)
        except ValueError as error:
            raise ValueError(f"{ascii(key)[:40]}: {str(error)[:400]}") from None
    return copied


def _need(levels: int) -> None:
    if levels <= 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


@dataclass(frozen=True)
class _By:
    """Annotates a field with its check if the type alone does not determine the check."""

    check: Check


Text = Annotated[str, _By(text)]
JsonObject = Annotated[Mapping[str, Any], _By(json_object)]


class Record:
    """Base class of records, which are dataclasses. A new record checks and converts each field according to the annotation of the
    field."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field, check in _checks(type(self)):
            value = getattr(self, field)
            try:
                checked = check(value)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}.{field}: {error}") from None
            if checked is not value:
                object.__setattr__(self, field, checked)


_known: dict[type[Any], tuple[tuple[str, Check], ...]] = {}


def _checks(kind: type[Any]) -> tuple[tuple[str, Check], ...]:
    if kind not in _known:
        hints = typing.get_type_hints(kind, include_extras=True)
        _known[kind] = tuple((field.name, _check_of(hints[field.name])) for field in dataclasses.fields(kind))
    return _known[kind]


def _check_of(hint: Any) -> Check:
    """Returns the check for an annotation. Raises `TypeError` if a record field cannot have this annotation, for example `Any`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        by: _By = inner[1]
        return by.check
    if origin in (types.UnionType, typing.Union) and len(inner) == 2 and inner[1] is type(None):
        return _optional(_check_of(inner[0]))
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        return _ROWS.get(inner[0]) or _tuple_of(_check_of(inner[0]))
    if origin is Mapping:
        return _mapping_of(_check_of(inner[0]), _check_of(inner[1]))
    if hint in _SINGLE:
        return _SINGLE[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _record_of(hint)
    raise TypeError(f"a record cannot have a field of type {hint}")


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _record_of(kind: type[Any]) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"must be a {kind.__name__}, got {type(value).__name__}")
        return value

    return check


def _one_of(kind: type[Enum]) -> Check:
    known = {member.value: member for member in kind}

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in known:
            return known[value]
        got = ascii(value[:80]) if isinstance(value, str) else type(value).__name__
        raise ValueError(f"must be one of {', '.join(known)}, got {got}")

    return check


def _tuple_of(check: Check) -> Check:
    return lambda value: tuple(map(check, _tuple(value)))


def _mapping_of(key: Check, item: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping, got {type(value).__name__}")
        return {key(one): item(other) for one, other in value.items()}

    return check


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):  # a list could be changed later, and a string would become a tuple of letters
        raise ValueError(f'must be a tuple, such as ("a",), got {type(value).__name__}')
    return value


def _string(value: Any) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise ValueError(f"must be text, got {type(value).__name__}")


def encodable(value: str) -> bool:
    """Whether UTF-8 can encode the string, that is, whether it contains no unpaired surrogate."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"must be a whole number, got {type(value).__name__}") from None
    if not -_WHOLE <= number < _WHOLE:
        raise ValueError("is a number of more than 63 bits")
    return int(number)


def _measured(value: Any) -> float:
    """Returns the value as a float, including NaN. Raises `ValueError` if the value is not a number."""
    if isinstance(value, str | bytes):
        raise ValueError(f"must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"must be a number: {error}") from None


def _number(value: Any) -> float:
    number = value if type(value) is float else _measured(value)
    if number != number:
        raise ValueError("is NaN")
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {type(value).__name__}")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(f"must be bytes, got {type(value).__name__}")
    return bytes(value)


def _whole_row(value: Any) -> tuple[int, ...]:
    row = _tuple(value)
    if set(map(type, row)) - {int} or (row and not -_WHOLE <= min(row) <= max(row) < _WHOLE):
        return tuple(map(_whole, row))
    return row


def _measured_row(value: Any) -> tuple[float, ...]:
    row = _tuple(value)
    return tuple(map(_measured, row)) if set(map(type, row)) - {float} else row


def _flag_row(value: Any) -> tuple[bool, ...]:
    row = _tuple(value)
    return tuple(map(_flag, row)) if set(map(type, row)) - {bool} else row


_SINGLE: dict[Any, Check] = {str: name, int: _whole, float: _number, bool: _flag, bytes: _bytes}
_ROWS: dict[Any, Check] = {int: _whole_row, float: _measured_row, bool: _flag_row}
