"""Conversions for Gymnasium spaces: from a space to a JSON schema, from a JSON value to an action, and from an observation to text.

Spaces are recognized by the name of their class, so that this module does not import Gymnasium.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import PolicyFault, TaskError

MOST_NUMBERS = 256
"""Maximum number of values in an array of an observation that can be converted to text without a formatter."""
_MAX_SEQUENCE, _LARGEST = 64, 1e15


_kinds: dict[type, str] = {}


def kind_of(space: Any) -> str:
    """Returns the first class name in the MRO of a space's class that `_SCHEMAS` contains; empty if there is none."""
    kind = type(space)
    if kind not in _kinds:
        _kinds[kind] = next((base.__name__ for base in kind.__mro__ if base.__name__ in _SCHEMAS), "")
    return _kinds[kind]


def schema_of(space: Any) -> dict[str, Any]:
    """Returns the JSON schema for the values in a space. Raises `TaskError` if the space is unknown."""
    if not (kind := kind_of(space)):
        name = type(space).__name__
        raise TaskError(
            f"actions in a space of the class {name} have no JSON form", fix="wrap it in a subclass of agentrl.environment.Environment"
        )
    return _SCHEMAS[kind](space)


def _array(shape: tuple[int, ...], item: Mapping[str, Any]) -> dict[str, Any]:
    schema = dict(item)
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


def _box(space: Any) -> dict[str, Any]:
    low, high = float(space.low.min()), float(space.high.max())
    bounds = {key: value for key, value in (("minimum", low), ("maximum", high)) if math.isfinite(value)}
    return _array(space.shape, {"type": "integer" if space.dtype.kind in "iu" else "number", **bounds})


def _integer(low: Any, high: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": int(low), "maximum": int(high)}


def _object(spaces: Mapping[str, Any]) -> dict[str, Any]:
    properties = {str(name): schema_of(part) for name, part in spaces.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_SCHEMAS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Discrete": lambda space: _integer(space.start, int(space.start) + int(space.n) - 1),
    "Box": _box,
    "MultiDiscrete": lambda space: _array(space.shape, _integer(space.start.min(), (space.start.astype(int) + space.nvec - 1).max())),
    "MultiBinary": lambda space: _array(tuple(space.shape), _integer(0, 1)),
    "Text": lambda space: {"type": "string", "minLength": int(space.min_length), "maxLength": int(space.max_length)},
    "Dict": lambda space: _object(space.spaces),
    "Tuple": lambda space: _object({str(number): part for number, part in enumerate(space.spaces)}),
    "Sequence": lambda space: {"type": "array", "items": schema_of(space.feature_space), "maxItems": _MAX_SEQUENCE},
}


def value_of(space: Any, action: Any) -> Any:
    """Converts a JSON value to an action in a space. Raises `PolicyFault` with the reason if the value is not in the space."""
    value = _converted(space, action, "action")
    if not space.contains(value):
        raise PolicyFault(f"the action is not in {str(space)[:200]}")
    return value


def _converted(space: Any, value: Any, where: str) -> Any:
    match kind_of(space):
        case "Discrete":
            return int(_numbers(value, (), where, integers=True))
        case "Box":
            return _numbers(value, space.shape, where, integers=space.dtype.kind in "iu", dtype=space.dtype)
        case "MultiDiscrete" | "MultiBinary":
            return _numbers(value, tuple(space.shape), where, integers=True, dtype=space.dtype)
        case "Text":
            return value
        case "Sequence":
            if not isinstance(value, list) or len(value) > _MAX_SEQUENCE:
                raise PolicyFault(f"{where} must be a list of at most {_MAX_SEQUENCE} items")
            return tuple(_converted(space.feature_space, item, f"{where}[{number}]") for number, item in enumerate(value))
    parts = space.spaces if isinstance(space.spaces, Mapping) else {str(number): part for number, part in enumerate(space.spaces)}
    if not isinstance(value, Mapping) or {*value} != {str(name) for name in parts}:
        raise PolicyFault(f"{where} must be an object with the keys {', '.join(map(str, parts))}")
    values = {name: _converted(part, value[str(name)], f"{where}.{name}") for name, part in parts.items()}
    return values if isinstance(space.spaces, Mapping) else tuple(values.values())


def _numbers(value: Any, shape: tuple[int, ...], where: str, *, integers: bool, dtype: Any = None) -> Any:
    """Returns `value` as an array of the type `dtype`. Raises `PolicyFault` unless `value` has exactly the shape `shape` and contains only
    numbers (integers if `integers` is set) that `dtype` can represent and whose absolute value is at most `_LARGEST`."""
    import numpy as np

    leaves: list[Any] = [value]
    kinds = int if integers else int | float
    for size in shape:
        if any(not isinstance(item, list) or len(item) != size for item in leaves):
            raise PolicyFault(f"{where} must be nested lists of the shape {shape}")
        leaves = [leaf for item in leaves for leaf in item]
    if any(isinstance(leaf, bool) or not isinstance(leaf, kinds) or not abs(leaf) <= _LARGEST for leaf in leaves):
        raise PolicyFault(f"{where} must be {'a whole number' if integers else 'a number'}" if not shape else f"{where} must be numbers")
    exact = np.array(leaves).reshape(shape)
    with np.errstate(over="ignore"):
        array = exact if dtype is None else exact.astype(dtype)
    if not (np.isfinite(array) if array.dtype.kind == "f" else array == exact).all():  # the conversion wraps integers
        raise PolicyFault(f"{where} is outside the range of {array.dtype}")
    return array


def is_inside(space: Any, value: Any) -> bool:
    """Whether an observation is in its space. For arrays with the space's shape and type, this is faster than the space's `contains`. NaN
    is outside."""
    if kind_of(space) == "Box" and getattr(value, "shape", None) == space.shape and getattr(value, "dtype", None) == space.dtype:
        return bool(((value >= space.low) & (value <= space.high)).all())
    return bool(space.contains(value))


def describe_outside(space: Any, value: Any, where: str = "the observation") -> str:
    """Describes the part of a value that is outside its space: path, type and range."""
    parts = space.spaces if kind_of(space) in ("Dict", "Tuple") else ()
    items = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    if isinstance(value, Mapping if isinstance(parts, Mapping) else tuple) and len(value) == len(parts):
        for name, part in items:
            if isinstance(value, Mapping) and name not in value:
                return f"{where} has no key {str(name)[:80]!r}"
            if not is_inside(part, value[name]):
                key = repr(str(name)[:80]) if isinstance(value, Mapping) else name
                return describe_outside(part, value[name], f"{where}[{key}]")
    actual = repr(value)[:80] if isinstance(value, int | float) else type(value).__name__
    if kind := getattr(getattr(value, "dtype", None), "kind", ""):  # a numpy value
        actual = f"{value.dtype}{list(value.shape)}"
        actual += f" from {value.min()} to {value.max()}" if value.size and kind in "iufb" else ""
    return f"{where} is {actual}, not in {str(space)[:200]}"


def text_of(space: Any, value: Any) -> str:
    """Returns an observation as short text. Raises `TaskError` if an array has more than `MOST_NUMBERS` numbers, or if the space is unknown
    and the value is neither text nor a number."""
    import numpy as np

    match kind_of(space):
        case "Discrete":
            return str(int(value))
        case "Text":
            return str(value)
        case "Box" | "MultiDiscrete" | "MultiBinary":
            array = np.asarray(value)  # `contains` also accepts lists
            if array.size > MOST_NUMBERS:
                shape = "x".join(map(str, array.shape))
                raise TaskError(f"an observation of {shape} numbers cannot be shown as text", fix="set tasks.family.options.formatter")
            return _short(array.tolist())
        case "Sequence":
            return "[" + ", ".join(text_of(space.feature_space, item) for item in value) + "]"
        case "Dict":
            return ", ".join(f"{name}: {text_of(part, value[name])}" for name, part in space.spaces.items())
        case "" if isinstance(value, str | int | float):  # a value such as a mission in minigrid
            return str(value)
        case "":
            name = type(space).__name__
            raise TaskError(
                f"an observation in a space of the class {name} cannot be shown as text", fix="set tasks.family.options.formatter"
            )
    return ", ".join(text_of(part, item) for part, item in zip(space.spaces, value, strict=True))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return str(value) if isinstance(value, int) else f"{value:.3g}"
