"""Converts records to JSON and back, and validates them when reading. No other module depends on the JSON form of a record."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json as dump

T = TypeVar("T")


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def to_json(record: Any) -> bytes:
    """Returns a record as UTF-8 JSON. Bytes become base64. Infinities and NaN become the constants `Infinity`, `-Infinity` and `NaN`,
    which `from_json` can read."""
    return dump(record, inf_nan_mode="constants", bytes_mode="base64")


def from_json(kind: type[T], data: bytes | str) -> T:
    """Reads a record of the type `kind` from JSON. Raises `ValueError` if the data is invalid."""
    record: T = _adapter(kind).validate_json(data)
    return record


def to_data(record: Any) -> Any:
    """Returns a record as plain data that can be written as JSON."""
    return _adapter(type(record)).dump_python(record, mode="json")
