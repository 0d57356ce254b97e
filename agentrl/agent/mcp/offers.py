"""What a server offers: its tools, checked when a run starts and pinned for all of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.agent.mcp.messages import Wrong, clean

MAX_TOOLS = 64
MAX_PAGES = 16
MAX_SCHEMA = 16_384
"""Characters of one tool's parameters, as JSON."""
MAX_DEPTH = 16
MAX_DESCRIPTION = 4_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9_.$/@-]{1,80}")
_WORDS = ("description", "title", "examples", "$comment")  # of a schema: what they say is for readers


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One tool of a server, as the agent is told of it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object

    @property
    def schema(self) -> Mapping[str, Any]:
        """The OpenAI function schema."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}

    @property
    def shape(self) -> str:
        """What a call looks like, without the words about it, which may tell of the place that a server runs in."""
        return json.dumps(_without(self.parameters, _WORDS), sort_keys=True)

    def rewritten(self, words: Callable[[str], str]) -> Offer:
        """With every text in it changed by `words`; names stay."""
        return Offer(name=self.name, description=words(self.description), parameters=_mapped(self.parameters, words))

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


def offer(given: Any) -> Offer:
    """One entry of a `tools/list`. Raises `Wrong` for what no agent could be told of, or is too large."""
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Wrong(f"a tool named {clean(name, 80)!r}: a name is 1 to 64 letters, digits, _ and -")
    parameters = given.get("inputSchema", given.get("parameters"))
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise Wrong(f"the tool {name} without a schema of type object")
    if not isinstance(parameters.get("properties", {}), Mapping) or not isinstance(parameters.get("required", []), list):
        raise Wrong(f"the tool {name} with properties that are no object, or required that is no list")
    kept: dict[str, Any] = _without(_checked(_unpatterned(parameters), name, MAX_DEPTH), ("title",))  # it repeats names and costs tokens
    kept.setdefault("properties", {})
    kept.pop("$schema", None)
    if missing := [one for one in kept.get("required", []) if not isinstance(one, str) or one not in kept["properties"]]:
        raise Wrong(f"the tool {name}, which requires {clean(str(missing[0]), 80)!r} and has no such parameter")
    if (size := len(json.dumps(kept, ensure_ascii=False))) > MAX_SCHEMA:
        raise Wrong(f"the tool {name} with a schema of {size} characters, at most {MAX_SCHEMA} are taken")
    return Offer(name=name, description=clean(given.get("description"), MAX_DESCRIPTION) or name, parameters=kept)


def offers(listed: Sequence[Any], only: Sequence[str]) -> tuple[Offer, ...]:
    """The tools of a server that are offered: those in `only`, or all. Raises `Wrong`."""
    names = [one.get("name") if isinstance(one, Mapping) else None for one in listed]
    if missing := [name for name in only if name not in names]:
        raise Wrong(f"no tool {missing[0]!r}; it has {clean(', '.join(map(str, names)), 500) or 'none'}")
    found = [offer(one) for one, name in zip(listed, names, strict=True) if not only or name in only]
    if not found:
        raise Wrong("no tools")
    if len(found) > MAX_TOOLS:
        raise Wrong(f"{len(found)} tools, at most {MAX_TOOLS} are offered: name those that are wanted with `only`")
    if twice := {one.name for one in found if sum(one.name == other.name for other in found) > 1}:
        raise Wrong(f"two tools named {sorted(twice)[0]}")
    return tuple(found)


def changed(pinned: Sequence[Offer], listed: Sequence[Any]) -> str:
    """What is no longer as it was pinned; empty: nothing. Tools that have come since are not offered, and change nothing."""
    now = {one.get("name"): one for one in listed if isinstance(one, Mapping) and isinstance(one.get("name"), str)}
    for one in pinned:
        if one.name not in now:
            return f"the tool {one.name} is gone"
        try:
            shape = offer(now[one.name]).shape
        except Wrong as error:
            return f"it has {error}"
        if shape != one.shape:
            return f"the tool {one.name} takes other arguments"
    return ""


def _unpatterned(value: Any, levels: int = MAX_DEPTH, *, names: bool = False) -> Any:
    """A schema without `patternProperties`, whose keys are patterns instead of names. Such an object may then have any other properties.

    Args:
        names: the keys of `value` are names, and no keywords.
    """
    if levels <= 0 or not isinstance(value, Mapping | list | tuple):
        return value
    if not isinstance(value, Mapping):
        return [_unpatterned(item, levels - 1) for item in value]
    open_ = not names and isinstance(value.get("patternProperties"), Mapping)
    kept = {key: item for key, item in value.items() if not (open_ and key in ("patternProperties", "additionalProperties"))}
    return {key: _unpatterned(item, levels - 1, names=not names and key in ("properties", "$defs")) for key, item in kept.items()}


def _checked(value: Any, name: str, levels: int) -> Any:
    """A copy of a schema with clean texts. Raises `Wrong`."""
    if levels <= 0:
        raise Wrong(f"the tool {name} with a schema of more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return clean(value, MAX_DESCRIPTION)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise Wrong(f"the tool {name} with the key {clean(str(key), 80)!r} in its schema")
        return {key: _checked(item, name, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_checked(item, name, levels - 1) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise Wrong(f"the tool {name} with a schema that is no JSON")


def _without(value: Any, words: Sequence[str], names: bool = False) -> Any:
    """A schema without these keywords. `names`: the keys of `value` are names, which stay."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if names or key not in words}
        return {key: _without(item, words, names=not names and key in ("properties", "$defs")) for key, item in kept.items()}
    return [_without(item, words) for item in value] if isinstance(value, list | tuple) else value


def _mapped(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, words) for key, item in value.items()}
    return [_mapped(item, words) for item in value] if isinstance(value, list | tuple) else value
