"""What a server offers: its tools, checked when a run starts and pinned for all of it."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.agent.mcp.messages import InvalidMessage, clean

MAX_TOOLS = 64
MAX_PAGES = 16
MAX_SCHEMA = 16_384
"""Characters of one tool's parameters, as JSON."""
MAX_DEPTH = 16
MAX_DESCRIPTION = 4_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_KEY = 80
_WORDS = ("description", "title", "examples", "$comment")  # of a schema: what they say is for readers
_NAMED = ("properties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies")  # their keys are names
_DATA = ("const", "enum", "default", "examples")  # their values are no schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
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

    def rewritten(self, words: Callable[[str], str]) -> ListedTool:
        """With every text in it changed by `words`; names stay."""
        return ListedTool(name=self.name, description=words(self.description), parameters=_mapped(self.parameters, words))

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


def parse_tool(given: Any) -> ListedTool:
    """One entry of a `tools/list`. Raises `InvalidMessage` for what no agent could be told of, or is too large."""
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidMessage(f"a tool named {clean(name, 80)!r}: a name is 1 to 64 letters, digits, _ and -")
    parameters = given.get("inputSchema", given.get("parameters"))
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidMessage(f"the tool {name} without a schema of type object")
    properties: Any = parameters.get("properties") or {}
    required: Any = parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidMessage(f"the tool {name} with properties that are no object, or required that is no list")
    offered: dict[str, Any] = _without(_checked(_unpatterned(parameters), name, MAX_DEPTH), ("title",))  # it repeats names and costs tokens
    offered |= {"type": "object", "properties": offered.get("properties") or {}}
    offered = {key: item for key, item in offered.items() if key != "$schema" and item is not None}
    if missing := [word for word in required if not isinstance(word, str) or word not in properties]:
        raise InvalidMessage(f"the tool {name}, which requires {clean(str(missing[0]), 80)!r} and has no such parameter")
    if (size := len(json.dumps(offered, ensure_ascii=False))) > MAX_SCHEMA:
        raise InvalidMessage(f"the tool {name} with a schema of {size} characters, at most {MAX_SCHEMA} are taken")
    return ListedTool(name=name, description=clean(given.get("description"), MAX_DESCRIPTION) or name, parameters=offered)


def usable_tools(listed: Sequence[Any], only: Sequence[str]) -> tuple[ListedTool, ...]:
    """The tools of a server that are offered: those in `only`, or all that are not `excluded_tools`.

    Raises `InvalidMessage` if one in `only` cannot be offered, or none of the server can.
    """
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in listed]
    if missing := [name for name in only if name not in names]:
        raise InvalidMessage(f"no tool {missing[0]!r}; it has {clean(', '.join(map(str, names)), 500) or 'none'}")
    usable, reasons = _sorted([entry for entry, name in zip(listed, names, strict=True) if not only or name in only])
    if reasons and (only or not usable):
        raise InvalidMessage(next(iter(reasons.values())))
    if not usable:
        raise InvalidMessage("no tools")
    if len(usable) > MAX_TOOLS:
        raise InvalidMessage(f"{len(usable)} tools, at most {MAX_TOOLS} are offered: list those to offer in `only`")
    return tuple(usable.values())


def excluded_tools(listed: Sequence[Any]) -> dict[str, str]:
    """Tools of a server that are not offered, and the reason for each. An entry without a usable name has its number as its name."""
    return _sorted(listed)[1]


def _sorted(listed: Sequence[Any]) -> tuple[dict[str, ListedTool], dict[str, str]]:
    """The usable tools, and the reasons to exclude the others, both by name. If two tools have one name, neither is usable."""
    usable: dict[str, ListedTool] = {}
    reasons: dict[str, str] = {}
    for number, entry in enumerate(listed):
        name = clean(entry.get("name"), 80) if isinstance(entry, Mapping) else ""
        try:
            tool = parse_tool(entry)
        except InvalidMessage as error:
            reasons.setdefault(name or f"number {number + 1}", str(error))
            continue
        if usable.setdefault(tool.name, tool) != tool:
            reasons[tool.name] = f"two tools named {tool.name}"
    return {name: tool for name, tool in usable.items() if name not in reasons}, reasons


def tool_difference(pinned: Sequence[ListedTool], listed: Sequence[Any]) -> str:
    """The first difference from the pinned tools; empty if there is none. Tools that were added later are not offered, and do not count."""
    for tool in pinned:
        entries = [entry for entry in listed if isinstance(entry, Mapping) and entry.get("name") == tool.name]
        if not entries:
            return f"the tool {tool.name} is gone"
        try:
            shapes = {parse_tool(entry).shape for entry in entries}
        except InvalidMessage as error:
            return f"it has {error}"
        if shapes != {tool.shape}:
            return f"the tool {tool.name} takes other arguments"
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
    remaining = {key: item for key, item in value.items() if not (open_ and key in ("patternProperties", "additionalProperties"))}
    return {
        key: item if not names and key in _DATA else _unpatterned(item, levels - 1, names=not names and key in _NAMED)
        for key, item in remaining.items()
    }


def _checked(value: Any, name: str, levels: int) -> Any:
    """A copy of a schema with clean texts. Raises `InvalidMessage`."""
    if levels <= 0:
        raise InvalidMessage(f"the tool {name} with a schema of more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return clean(value, MAX_DESCRIPTION)
    if isinstance(value, Mapping):
        for key in value:
            if not _is_key(key):
                raise InvalidMessage(f"the tool {name} with the key {clean(str(key), _MOST_KEY)!r} in its schema")
        return {key: _checked(item, name, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_checked(item, name, levels - 1) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidMessage(f"the tool {name} with a schema that is no JSON")


def _is_key(key: Any) -> bool:
    """Whether a model can write the key exactly in every form of calls: short, printable, normalized, and without the signs of tags."""
    if not isinstance(key, str) or not 0 < len(key) <= _MOST_KEY or key != key.strip() or not key.isprintable():
        return False
    return not set("<>") & set(key) and unicodedata.is_normalized("NFKC", key)


def _without(value: Any, words: Sequence[str], names: bool = False) -> Any:
    """A schema without these keywords. `names`: whether the keys of `value` are names, which stay."""
    if isinstance(value, Mapping):
        remaining = {key: item for key, item in value.items() if names or key not in words}
        return {
            key: item if not names and key in _DATA else _without(item, words, names=not names and key in _NAMED)
            for key, item in remaining.items()
        }
    return [_without(item, words) for item in value] if isinstance(value, list | tuple) else value


def _mapped(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, words) for key, item in value.items()}
    return [_mapped(item, words) for item in value] if isinstance(value, list | tuple) else value
