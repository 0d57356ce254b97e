"""Arguments against the JSON schema of a tool: what is wrong with them, and an example of what is right, in words for the agent.

The schema may be anybody's, such as a server's: what of it cannot be judged in bounded time (patterns, formats, references that go
round) is not judged, and left to whoever takes the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.usercode import printable

MAX_DEPTH = 8
MAX_TOLD = 5
_EXAMPLE_CHARS = 300
_EXAMPLE_VALUES = 100
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


def example(schema: Mapping[str, Any]) -> str:
    """What a call of the tool with this function schema may look like, to be put behind an error; empty where it would be long."""
    parameters = _parameters(schema)
    made = _sample(parameters, parameters, 0, [_EXAMPLE_VALUES])
    text = json.dumps(made if isinstance(made, dict) else {}, ensure_ascii=False)
    return f"; for example {printable(text, _EXAMPLE_CHARS)}" if len(text) <= _EXAMPLE_CHARS else ""


def problems(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, argument by argument; empty when nothing is."""
    parameters = _parameters(schema)
    found = _wrong(parameters, parameters, dict(arguments), "", 0)
    told = found[:MAX_TOLD] + ([f"and {len(found) - MAX_TOLD} more"] if len(found) > MAX_TOLD else [])
    return printable("; ".join(told), 1500)


def _parameters(schema: Any) -> Mapping[str, Any]:
    """The parameters of a function schema, which may be any JSON; empty if it has none."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    found = function.get("parameters") if isinstance(function, Mapping) else None
    return found if isinstance(found, Mapping) else {}


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


def _wrong(one: Any, root: Mapping[str, Any], value: Any, where: str, depth: int) -> list[str]:
    one = _resolved(one, root)
    if depth >= MAX_DEPTH:
        return []
    for key in ("anyOf", "oneOf"):
        if options := _list(one, key):
            if any(not _wrong(other, root, value, where, depth + 1) for other in options):
                return []
            kinds = [kind for other in options for kind in _types(_resolved(other, root))]
            return [f"{where or 'arguments'}: needs {_listed(kinds) or 'something else'}, got {_got(value)}"]
    kinds = _types(one)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where or 'arguments'}: needs {_listed(kinds)}, got {_got(value)}"]
    allowed = _list(one, "enum") or ([one["const"]] if "const" in one else None)
    if allowed is not None and value not in allowed:
        return [f"{where}: needs one of {json.dumps(list(allowed), ensure_ascii=False)[:200]}, got {_got(value)}"]
    if isinstance(value, Mapping):
        return _wrong_object(one, root, value, where, depth)
    if isinstance(value, list) and "items" in one:
        return [text for number, item in enumerate(value) for text in _wrong(one["items"], root, item, f"{where}[{number}]", depth + 1)]
    return _beyond(one, value, where)


def _wrong_object(one: Mapping[str, Any], root: Mapping[str, Any], value: Mapping[str, Any], where: str, depth: int) -> list[str]:
    properties = _properties(one)
    dot = f"{where}." if where else ""
    found = [f"{dot}{name}: is missing" for name in _required(one) if name not in value]
    for name, item in value.items():
        if name in properties:
            found += _wrong(properties[name], root, item, f"{dot}{name[:40]}", depth + 1)
        elif one.get("additionalProperties") is False:
            found.append(f"{dot}{name[:40]}: is not known; there are {', '.join(list(properties)[:20]) or 'none'}")
    return found


def _beyond(one: Mapping[str, Any], value: Any, where: str) -> list[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(low := one.get("minimum"), int | float) and value < low:
            return [f"{where}: needs at least {low}, got {_got(value)}"]
        if isinstance(high := one.get("maximum"), int | float) and value > high:
            return [f"{where}: needs at most {high}, got {_got(value)}"]
    return []


def _resolved(one: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its reference followed, where that is a definition of its own; anything else allows everything."""
    for _ in range(MAX_DEPTH):
        if not isinstance(one, Mapping):
            return {}
        where = one.get("$ref")
        if not isinstance(where, str):
            return one
        kind, _, name = where.removeprefix("#/").partition("/")
        definitions = root.get(kind) if kind in ("$defs", "definitions") else None
        one = definitions.get(name) if isinstance(definitions, Mapping) else None
    return {}


def _properties(one: Mapping[str, Any]) -> Mapping[str, Any]:
    found = one.get("properties")
    return found if isinstance(found, Mapping) else {}


def _list(one: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = one.get(key)
    return found if isinstance(found, list | tuple) else ()


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
