"""Checks the arguments of a tool call against the tool's JSON schema, and builds an example of the arguments.

A schema may come from an MCP server or a client. Anything that cannot be checked in bounded time (patterns, formats, circular references)
is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from agentrl.base.user_code import printable

MAX_DEPTH = 8
MAX_ERRORS = 5
_EXAMPLE_CHARS = 300
_EXAMPLE_VALUES = 100
_CHECKED_VALUES = 20_000
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}
_SAMPLES: Mapping[str, Any] = {"string": "...", "integer": 1, "number": 1.5, "boolean": True, "null": None}
_ARTICLES = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The values that a schema allows for one argument. `kinds` contains the allowed JSON types; it is empty if any type is allowed."""

    kinds: frozenset[str]
    fits: Callable[[Any], bool]  # whether a value fits the schema, as far as schemas are checked


class Parameters:
    """The parameters in a tool's function schema; the schema may be any JSON value. All method calls together examine at most `values`
    values in arguments and samples."""

    def __init__(self, schema: Any, values: int = _CHECKED_VALUES) -> None:
        function = schema.get("function") if isinstance(schema, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self._left = values

    def allowed(self, name: str) -> Allowed:
        """Returns the values that the argument `name` may have."""
        schema = self._property(self._root, name, 0)
        kinds = self._kinds(schema, 0)
        return Allowed(kinds=frozenset() if len(kinds) == len(_TYPES) else kinds, fits=lambda value: not self._errors(schema, value, "", 0))

    def errors(self, arguments: Mapping[str, Any]) -> list[str]:
        """Returns the errors in the arguments. Values that are nested too deeply, and values beyond the maximum number, are not checked."""
        return self._errors(self._root, dict(arguments), "", 0)

    def sample(self) -> Any:
        """Returns an example of the arguments: the required arguments, or the first argument if none is required. Ignores ranges such as
        `minimum`; values beyond the maximum number are None."""
        return self._sample(self._root, 0)

    def _sample(self, schema: Any, depth: int) -> Any:
        schema = self._resolved(schema)
        self._left -= 1
        if self._left < 0:  # a recursive schema would need infinitely many values
            return None
        if "default" in schema:
            return schema["default"]
        if values := _enumerated(schema):
            return values[0]
        for key in ("anyOf", "oneOf", "allOf"):
            if (options := _list(schema, key)) and depth < MAX_DEPTH:
                return self._sample(options[0], depth + 1)
        kind = next(iter(_types(schema)), "object" if "properties" in schema else "string")
        if depth >= MAX_DEPTH or kind in _SAMPLES:
            return _SAMPLES.get(kind, [] if kind == "array" else {})
        if kind == "array":
            return [self._sample(schema.get("items", {}), depth + 1)]
        properties = _properties(schema)
        names = [name for name in _required(schema) if name in properties] or list(properties)[:1]
        return {name: self._sample(properties[name], depth + 1) for name in names}

    def _exhausted(self, depth: int) -> bool:
        """Counts one examined value, and returns whether the maximum depth or the maximum number of values is exceeded."""
        self._left -= 1
        return depth >= MAX_DEPTH or self._left < 0

    def _errors(self, schema: Any, value: Any, path: str, depth: int) -> list[str]:
        schema, label = self._resolved(schema), path or "arguments"
        if self._exhausted(depth):
            return []
        for key in ("anyOf", "oneOf"):
            options = _list(schema, key)
            if options and all(self._errors(option, value, path, depth + 1) for option in options):
                kinds = [kind for option in options for kind in _types(self._resolved(option))]
                return [f"{label}: needs {_alternatives(kinds) or 'another value'}, got {_excerpt(value)}"]
        for part in _list(schema, "allOf"):
            if errors := self._errors(part, value, path, depth + 1):
                return errors
        kinds = _types(schema)
        if kinds and not any(_has_type(value, kind) for kind in kinds):
            return [f"{label}: needs {_alternatives(kinds)}, got {_excerpt(value)}"]
        values = _enumerated(schema)
        if values is not None and not any(_equal(value, allowed) for allowed in values):
            return [f"{label}: needs one of {json.dumps(list(values), ensure_ascii=False)[:200]}, got {_excerpt(value)}"]
        if isinstance(value, Mapping):
            return self._object_errors(schema, value, f"{path}." if path else "", depth)
        if isinstance(value, list) and "items" in schema:
            items = enumerate(value)
            return [error for number, item in items for error in self._errors(schema["items"], item, f"{path}[{number}]", depth + 1)]
        return _range_errors(schema, value, path)

    def _object_errors(self, schema: Mapping[str, Any], value: Mapping[str, Any], prefix: str, depth: int) -> list[str]:
        properties = _properties(schema)
        errors = [f"{prefix}{name}: is missing" for name in _required(schema) if name not in value]
        for name, item in value.items():
            if name in properties:
                errors += self._errors(properties[name], item, f"{prefix}{name[:40]}", depth + 1)
            elif schema.get("additionalProperties") is False:
                errors.append(f"{prefix}{name[:40]}: is not known; known: {', '.join(list(properties)[:20]) or 'none'}")
        return errors

    def _property(self, schema: Any, name: str, depth: int) -> Any:
        """Returns the schema of an object's property, combined from all branches of the object's schema; None if no branch describes the
        property."""
        schema = self._resolved(schema)
        if self._exhausted(depth):
            return None
        additional, patterns = schema.get("additionalProperties"), schema.get("patternProperties")
        schemas = []
        if name in _properties(schema):
            schemas.append(_properties(schema)[name])
        elif isinstance(patterns, Mapping) and patterns:  # which pattern matches is not checked
            schemas.append({"anyOf": list(patterns.values())})
        elif isinstance(additional, Mapping):
            schemas.append(additional)
        for key in ("anyOf", "oneOf", "allOf"):
            branches = [self._property(branch, name, depth + 1) for branch in _list(schema, key)]
            if described := [branch for branch in branches if branch is not None]:
                schemas.append({"allOf" if key == "allOf" else "anyOf": described})
        return {"allOf": schemas} if schemas else None

    def _kinds(self, schema: Any, depth: int) -> frozenset[str]:
        """Returns the JSON types that a schema allows; all types if the schema does not restrict the type, or does so in a way that is not
        checked."""
        schema = self._resolved(schema)
        kinds = frozenset(_TYPES)
        if self._exhausted(depth):
            return kinds
        if types := _types(schema):
            kinds &= {*types, *(["integer"] if "number" in types else [])}
        if (values := _enumerated(schema)) is not None:
            kinds &= {kind for value in values for kind in _TYPES if _has_type(value, kind)}
        for key in ("anyOf", "oneOf"):
            if options := _list(schema, key):
                kinds &= frozenset[str]().union(*(self._kinds(option, depth + 1) for option in options))
        for part in _list(schema, "allOf"):
            kinds &= self._kinds(part, depth + 1)
        return kinds

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Returns the schema, or the part of the root that its `$ref` points to. A reference to anything else allows every value."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = _at_pointer(self._root, reference)
        return {}


def argument_example(schema: Mapping[str, Any]) -> str:
    """Returns text to append to an error: an example call of the tool with this function schema; empty if the example would be too long."""
    sample = Parameters(schema, _EXAMPLE_VALUES).sample()
    text = json.dumps(sample if isinstance(sample, dict) else {}, ensure_ascii=False)
    return f"; for example {printable(text, _EXAMPLE_CHARS)}" if len(text) <= _EXAMPLE_CHARS else ""


def argument_errors(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Returns the first `MAX_ERRORS` errors in a call's arguments, separated by semicolons; empty if there are none."""
    errors = Parameters(schema).errors(arguments)
    more = [f"and {len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else []
    return printable("; ".join(errors[:MAX_ERRORS] + more), 1500)


def _range_errors(schema: Mapping[str, Any], value: Any, path: str) -> list[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(low := schema.get("minimum"), int | float) and value < low:
            return [f"{path}: needs at least {low}, got {_excerpt(value)}"]
        if isinstance(high := schema.get("maximum"), int | float) and value > high:
            return [f"{path}: needs at most {high}, got {_excerpt(value)}"]
    return []


def _at_pointer(root: Mapping[str, Any], pointer: str) -> Any:
    """Returns the value at a reference such as `#/$defs/Color`, a JSON pointer (RFC 6901); None if no value is there."""
    if not pointer.startswith("#") or pointer.count("/") > 2 * MAX_DEPTH:
        return None
    value: Any = root
    for part in pointer[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and len(key) < 6 and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    items = schema.get(key)
    return items if isinstance(items, list | tuple) else ()


def _enumerated(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns the values of a schema's `enum` or `const`; None if it has neither, or only an empty `enum`."""
    return _list(schema, "enum") or ([schema["const"]] if "const" in schema else None)


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type")
    return [kind for kind in ([types] if isinstance(types, str) else _list(schema, "type")) if isinstance(kind, str) and kind in _TYPES]


def _equal(left: Any, right: Any) -> bool:
    """Whether two values are the same JSON value. For example, true is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _alternatives(kinds: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(_ARTICLES.get(kind, f"a {kind}") for kind in kinds))


def _excerpt(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
