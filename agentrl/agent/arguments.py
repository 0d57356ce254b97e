"""Compares arguments with the JSON schema of a tool: the allowed types, the errors, and an example of valid arguments.

The schema may be anybody's, such as a server's: what of it cannot be judged in bounded time (patterns, formats, references that go
round) is not judged, and left to whoever takes the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from agentrl.base.user_code import printable

MAX_DEPTH = 8
MAX_TOLD = 5
_EXAMPLE_CHARS = 300
_EXAMPLE_VALUES = 100
_CHECKED_VALUES = 20_000
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}
_SAMPLES: Mapping[str, Any] = {"string": "...", "integer": 1, "number": 1.5, "boolean": True, "null": None}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a tool's schema allows for one argument. `kinds` are its JSON types; empty if the schema does not restrict them."""

    kinds: frozenset[str]
    fits: Callable[[Any], bool]  # whether the schema accepts a value, as far as it is checked


class Parameters:
    """The parameters of a tool's function schema. All queries together examine a bounded number of values."""

    def __init__(self, schema: Any) -> None:
        self._root = _parameters(schema)
        self._left = [_CHECKED_VALUES]

    def allowed(self, name: str) -> Allowed:
        """The values that the argument of this name may have."""
        schema = _argument(self._root, self._root, name, 0, self._left)
        kinds = _all_kinds(schema, self._root, 0, self._left)
        unsaid = len(kinds) == len(_KINDS)
        return Allowed(frozenset() if unsaid else kinds, lambda value: not _wrong(schema, self._root, value, "", 0, self._left))


def argument_example(schema: Mapping[str, Any]) -> str:
    """What a call of the tool with this function schema may look like, to be put behind an error; empty where it would be long."""
    parameters = _parameters(schema)
    made = _sample(parameters, parameters, 0, [_EXAMPLE_VALUES])
    text = json.dumps(made if isinstance(made, dict) else {}, ensure_ascii=False)
    return f"; for example {printable(text, _EXAMPLE_CHARS)}" if len(text) <= _EXAMPLE_CHARS else ""


def argument_errors(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, argument by argument; empty when nothing is."""
    parameters = _parameters(schema)
    errors = _wrong(parameters, parameters, dict(arguments), "", 0, [_CHECKED_VALUES])
    told = errors[:MAX_TOLD] + ([f"and {len(errors) - MAX_TOLD} more"] if len(errors) > MAX_TOLD else [])
    return printable("; ".join(told), 1500)


def _parameters(schema: Any) -> Mapping[str, Any]:
    """The parameters of a function schema, which may be any JSON; empty if it has none."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    return parameters if isinstance(parameters, Mapping) else {}


def _sample(one: Any, root: Mapping[str, Any], depth: int, left: list[int]) -> Any:
    """A value that fits a schema. An object has its required properties, or its first property if none is required.

    Args:
        left: how many values may still be generated; a recursive schema would need infinitely many.
    """
    one = _resolved(one, root)
    left[0] -= 1
    if left[0] < 0:
        return None
    if "default" in one:
        return one["default"]
    if "const" in one:
        return one["const"]
    if options := _list(one, "enum"):
        return options[0]
    for key in ("anyOf", "oneOf", "allOf"):
        if (options := _list(one, key)) and depth < MAX_DEPTH:
            return _sample(options[0], root, depth + 1, left)
    kind = next(iter(_types(one)), "object" if "properties" in one else "string")
    if depth >= MAX_DEPTH or kind in _SAMPLES:
        return _SAMPLES.get(kind, [] if kind == "array" else {})
    if kind == "array":
        return [_sample(one.get("items", {}), root, depth + 1, left)]
    properties = _properties(one)
    needed = [name for name in _required(one) if name in properties] or list(properties)[:1]
    return {name: _sample(properties[name], root, depth + 1, left) for name in needed}


def _wrong(one: Any, root: Mapping[str, Any], value: Any, where: str, depth: int, left: list[int]) -> list[str]:
    """The errors of a value. Does not examine values beyond `MAX_DEPTH`, nor more than `left` values."""
    one = _resolved(one, root)
    left[0] -= 1
    if depth >= MAX_DEPTH or left[0] < 0:
        return []
    for key in ("anyOf", "oneOf"):
        options = _list(one, key)
        if options and all(_wrong(other, root, value, where, depth + 1, left) for other in options):
            kinds = [kind for other in options for kind in _types(_resolved(other, root))]
            return [f"{where or 'arguments'}: needs {_listed(kinds) or 'something else'}, got {_got(value)}"]
    for other in _list(one, "allOf"):
        if errors := _wrong(other, root, value, where, depth + 1, left):
            return errors
    kinds = _types(one)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where or 'arguments'}: needs {_listed(kinds)}, got {_got(value)}"]
    values = _values(one)
    if values is not None and not any(_same(value, other) for other in values):
        return [f"{where}: needs one of {json.dumps(list(values), ensure_ascii=False)[:200]}, got {_got(value)}"]
    if isinstance(value, Mapping):
        return _wrong_object(one, root, value, where, depth, left)
    if isinstance(value, list) and "items" in one:
        items = enumerate(value)
        return [text for number, item in items for text in _wrong(one["items"], root, item, f"{where}[{number}]", depth + 1, left)]
    return _beyond(one, value, where)


def _wrong_object(
    one: Mapping[str, Any], root: Mapping[str, Any], value: Mapping[str, Any], where: str, depth: int, left: list[int]
) -> list[str]:
    properties = _properties(one)
    dot = f"{where}." if where else ""
    errors = [f"{dot}{name}: is missing" for name in _required(one) if name not in value]
    for name, item in value.items():
        if name in properties:
            errors += _wrong(properties[name], root, item, f"{dot}{name[:40]}", depth + 1, left)
        elif one.get("additionalProperties") is False:
            errors.append(f"{dot}{name[:40]}: is not known; there are {', '.join(list(properties)[:20]) or 'none'}")
    return errors


def _argument(one: Any, root: Mapping[str, Any], name: str, depth: int, left: list[int]) -> Any:
    """The schema of one property of an object, in any branch of the object's schema; None if the schema does not describe it."""
    one = _resolved(one, root)
    left[0] -= 1
    if depth >= MAX_DEPTH or left[0] < 0:
        return None
    more, patterns = one.get("additionalProperties"), one.get("patternProperties")
    schemas = []
    if name in _properties(one):
        schemas.append(_properties(one)[name])
    elif isinstance(patterns, Mapping) and patterns:  # not checked which pattern matches
        schemas.append({"anyOf": list(patterns.values())})
    elif isinstance(more, Mapping):
        schemas.append(more)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = [_argument(other, root, name, depth + 1, left) for other in _list(one, key)]
        if said := [branch for branch in branches if branch is not None]:
            schemas.append({"allOf" if key == "allOf" else "anyOf": said})
    return {"allOf": schemas} if schemas else None


def _all_kinds(one: Any, root: Mapping[str, Any], depth: int, left: list[int]) -> frozenset[str]:
    """The JSON types that a schema allows. All types if it does not restrict them, or restricts them in an unchecked way."""
    one = _resolved(one, root)
    left[0] -= 1
    kinds = frozenset(_KINDS)
    if depth >= MAX_DEPTH or left[0] < 0:
        return kinds
    if named := _types(one):
        kinds &= {*named, *(["integer"] if "number" in named else [])}
    if (values := _values(one)) is not None:
        kinds &= {kind for value in values for kind in _KINDS if _is(value, kind)}
    for key in ("anyOf", "oneOf"):
        if options := _list(one, key):
            kinds &= frozenset[str]().union(*(_all_kinds(other, root, depth + 1, left) for other in options))
    for other in _list(one, "allOf"):
        kinds &= _all_kinds(other, root, depth + 1, left)
    return kinds


def _beyond(one: Mapping[str, Any], value: Any, where: str) -> list[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(low := one.get("minimum"), int | float) and value < low:
            return [f"{where}: needs at least {low}, got {_got(value)}"]
        if isinstance(high := one.get("maximum"), int | float) and value > high:
            return [f"{where}: needs at most {high}, got {_got(value)}"]
    return []


def _resolved(one: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema after its reference is followed, if that points into the root. Any other reference allows everything."""
    for _ in range(MAX_DEPTH):
        if not isinstance(one, Mapping):
            return {}
        where = one.get("$ref")
        if not isinstance(where, str):
            return one
        one = _pointed(root, where)
    return {}


def _pointed(root: Mapping[str, Any], where: str) -> Any:
    """The value at a reference such as `#/$defs/Color`, a JSON pointer (RFC 6901); None if there is none."""
    if not where.startswith("#") or where.count("/") > 2 * MAX_DEPTH:
        return None
    value: Any = root
    for part in where[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and len(key) < 6 and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _properties(one: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = one.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _list(one: Mapping[str, Any], key: str) -> Sequence[Any]:
    items = one.get(key)
    return items if isinstance(items, list | tuple) else ()


def _values(one: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values of a schema's `enum` or `const`; None if it has neither."""
    return _list(one, "enum") or ([one["const"]] if "const" in one else None)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON value: true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _required(one: Mapping[str, Any]) -> list[str]:
    return [name for name in _list(one, "required") if isinstance(name, str)]


def _types(one: Mapping[str, Any]) -> list[str]:
    kinds = one.get("type")
    return [kind for kind in ([kinds] if isinstance(kinds, str) else _list(one, "type")) if isinstance(kind, str) and kind in _KINDS]


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _listed(kinds: Sequence[str]) -> str:
    articles = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}
    return " or ".join(dict.fromkeys(articles.get(kind, f"a {kind}") for kind in kinds))


def _got(value: Any) -> str:
    """A wrong value, its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
