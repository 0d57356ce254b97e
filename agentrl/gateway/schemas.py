"""Rebuilds the JSON schemas of programs from known keywords, within bounds, because the server compiles them and is shared by all sessions.

A keyword that restricts the value is kept or rejected. A keyword that only describes it is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway.request import RequestError, given, inside, listed, mapping, storable, text

MAX_DEPTH = 12
MAX_SCHEMAS = 512
"""Nested schemas in all schemas of one request."""
MAX_CHARS = 1 << 15
"""Characters of all names and values in these schemas."""
MAX_COUNT = 1024
"""Largest value of `minItems`, `maxLength` and similar keywords."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([A-Za-z0-9_.\-\[\]]{1,128})")


class Schemas:
    """Rebuilds the schemas of one request."""

    def __init__(self) -> None:
        self._schemas = self._chars = 0
        self._wanted: set[str] = set()  # definitions to which a `$ref` points

    def rebuilt(self, value: Any, where: str) -> dict[str, Any]:
        """The rebuilt schema with its definitions. Raises `RequestError` with the path of an unsupported part."""
        self._wanted.clear()
        about = mapping(storable(value, where), where)
        made = self._schema({name: one for name, one in about.items() if name not in ("$defs", "definitions")}, where, 0)
        definitions: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            for name, one in mapping(given(about.get(key), {}), inside(where, key)).items():
                definitions[self._text(name, where)] = self._schema(one, inside(inside(where, key), name[:40]), 1)
        made |= {"$defs": definitions} if definitions else {}
        for name in sorted(self._wanted):
            if name not in definitions:
                raise RequestError("invalid", f"{where}: there is no definition {name[:80]!a}.", param=where)
            if name in _same_as(name, definitions):
                raise RequestError("invalid", f"{where}: definition {name[:80]!a} refers only to itself.", param=where)
        return made

    def _schema(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        if value is True:
            return {}
        self._schemas += 1
        if depth > MAX_DEPTH or self._schemas > MAX_SCHEMAS:
            raise RequestError("invalid", f"{where}: more than {MAX_DEPTH} levels or {MAX_SCHEMAS} schemas.", param=where)
        made: dict[str, Any] = {}
        for key, one in mapping(value, where).items():
            if key not in _ANNOTATIONS and (one is not None or key == "const"):
                made |= self._keyword(key, one, inside(where, key[:40]), depth + 1)
        return made

    def _keyword(self, key: str, value: Any, where: str, depth: int) -> dict[str, Any]:
        """The rebuilt form of a keyword."""
        match key:
            case "$ref":
                reference = _REFERENCE.fullmatch(text(value, where))
                if reference is None:
                    raise RequestError("unsupported", f"{where}: only references to $defs are supported.", param=where)
                self._wanted.add(reference[1])
                return {key: f"#/$defs/{reference[1]}"}
            case "type":
                kinds = _among([value] if isinstance(value, str) else listed(value, where), _KINDS, where)
                return {key: kinds[0] if isinstance(value, str) else kinds}
            case "enum" | "const":
                self._text(json.dumps(value), where)
                return {key: listed(value, where) if key == "enum" else value}
            case "properties":
                named = mapping(value, where).items()
                return {key: {self._text(name, where): self._schema(one, inside(where, name[:40]), depth) for name, one in named}}
            case "required":
                return {key: [self._text(text(one, where), where) for one in listed(value, where)]}
            case "anyOf" | "oneOf" | "allOf" | "prefixItems":
                some = [self._schema(one, f"{where}[{at}]", depth) for at, one in enumerate(listed(value, where))]
                if key == "allOf" and len(some) != 1:
                    raise RequestError("unsupported", f"{where}: must contain exactly one schema.", param=where)
                return some[0] if key == "allOf" else {"prefixItems" if key == "prefixItems" else "anyOf": some}
            case "items":
                return {key: self._schema(value, where, depth)}
            case "additionalProperties" if isinstance(value, Mapping):
                return {key: self._schema(value, where, depth)}
        return {key: _plain(key, value, where)}

    def _text(self, value: str, where: str) -> str:
        self._chars += len(value)
        if self._chars > MAX_CHARS:
            raise RequestError("invalid", f"{where}: names and values have more than {MAX_CHARS} characters.", param=where)
        return value


def _among(values: Sequence[Any], known: Sequence[str], where: str) -> list[str]:
    for one in values:
        if not isinstance(one, str) or one not in known:
            raise RequestError("unsupported", f"{where}: must be one of {', '.join(known)}.", param=where)
    return list(values)


def _plain(key: str, value: Any, where: str) -> Any:
    """The value of a keyword that does not contain schemas."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "additionalProperties" and isinstance(value, bool):
        return value
    if key in _COUNTS and isinstance(value, int) and number and 0 <= value <= MAX_COUNT:
        return value
    if key in _BOUNDS and number and abs(value) < 1e15:
        return value
    if key == "format":
        return _among([value], _FORMATS, where)[0]
    raise RequestError("unsupported", f"{where}: this keyword or its value is not supported in the schema of an answer.", param=where)


def _same_as(name: str, definitions: Mapping[str, Any]) -> set[str]:
    """The definitions that a definition reaches through `$ref` and `anyOf` without consuming a character."""
    reached: set[str] = set()
    left: list[Any] = [definitions[name]]
    while left:
        schema = left.pop()
        reference = schema.get("$ref", "").removeprefix("#/$defs/")
        if reference and reference not in reached:
            reached.add(reference)
            left.append(definitions.get(reference, {}))
        left += schema.get("anyOf", ())
    return reached
