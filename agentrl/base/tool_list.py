"""Checks the tools of a server when a run starts, and pins them for the duration of the run."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.base.user_code import clean

MAX_TOOLS = 64
MAX_PAGES = 16
MAX_SCHEMA = 16_384
"""Maximum number of characters in the JSON of one tool's parameters."""
MAX_DEPTH = 16
MAX_DESCRIPTION = 4_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_KEY = 80
_ANNOTATIONS = ("description", "title", "examples", "$comment")  # keywords for readers
_NAMED = ("properties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies")  # their keys are names
_DATA = ("const", "enum", "default", "examples")  # their values are not schemas


class InvalidMessage(Exception):
    """Error: a message from a server is invalid. The text of the error is printable and short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """One tool of a server, as the agent sees it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool as an OpenAI function schema."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}

    @property
    def shape(self) -> str:
        """The parameters without their annotations, because annotations may depend on the machine that the server runs on."""
        return json.dumps(_edited(self.parameters, lambda schema: _without(schema, _ANNOTATIONS)), sort_keys=True)

    def rewritten(self, rewrite: Callable[[str], str]) -> ListedTool:
        """Returns the tool with `rewrite` applied to every string in it except names."""
        return ListedTool(name=self.name, description=rewrite(self.description), parameters=_mapped(self.parameters, rewrite))

    def to_data(self) -> dict[str, Any]:
        """Returns the tool as JSON data."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


def parse_tool(listed: Any) -> ListedTool:
    """Returns the tool that one entry of a `tools/list` describes. Raises `InvalidMessage` if the tool is too large or unusable for an
    agent."""
    name = listed.get("name") if isinstance(listed, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidMessage(f"a tool named {clean(name, 80)!r}: a name must have 1 to 64 letters, digits, _ and -")
    parameters = listed.get("inputSchema", listed.get("parameters"))
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidMessage(f"the tool {name} without a schema of type object")
    properties: Any = parameters.get("properties") or {}
    required: Any = parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidMessage(f"the tool {name} with properties that are not an object, or required that is not a list")
    schema: dict[str, Any] = _checked(_edited(parameters, _reduced), name, MAX_DEPTH)
    schema |= {"type": "object", "properties": schema.get("properties") or {}}
    schema = {key: item for key, item in schema.items() if key != "$schema" and item is not None}
    if missing := [word for word in required if not isinstance(word, str) or word not in properties]:
        raise InvalidMessage(f"the tool {name}, which requires {clean(str(missing[0]), 80)!r} but has no such parameter")
    if (size := len(json.dumps(schema, ensure_ascii=False))) > MAX_SCHEMA:
        raise InvalidMessage(f"the tool {name} with a schema of {size} characters; the maximum is {MAX_SCHEMA}")
    return ListedTool(name=name, description=clean(listed.get("description"), MAX_DESCRIPTION) or name, parameters=schema)


def usable_tools(listed: Sequence[Any], only: Sequence[str]) -> tuple[ListedTool, ...]:
    """Returns the tools of a server that the agent receives: those in `only` or, if `only` is empty, all usable tools.

    Raises `InvalidMessage` if a tool in `only` is missing or unusable, if no tool is usable, or if there are too many.
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
        raise InvalidMessage(f"{len(usable)} tools, but at most {MAX_TOOLS} are allowed: list in `only` those to offer")
    return tuple(usable.values())


def excluded_tools(listed: Sequence[Any]) -> dict[str, str]:
    """Returns a mapping from the name of each unusable tool of a server to the reason why it is unusable. An entry without a usable name is
    listed by its number."""
    return _sorted(listed)[1]


def _sorted(listed: Sequence[Any]) -> tuple[dict[str, ListedTool], dict[str, str]]:
    """Returns the usable tools, and the reasons to exclude the others, both by name. If two tools have the same name, neither is usable."""
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
    """Returns the first difference between the pinned and the listed tools; empty if there is none. Added tools and other
    descriptions do not count."""
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


def _edited(value: Any, edit: Callable[[Mapping[str, Any]], Mapping[str, Any]], levels: int = MAX_DEPTH, *, names: bool = False) -> Any:
    """Returns a copy of a schema with `edit` applied to each schema object in it. `names`: whether the keys of `value` are names instead of
    keywords."""
    if levels > 0 and isinstance(value, Mapping):
        return {
            key: item if not names and key in _DATA else _edited(item, edit, levels - 1, names=not names and key in _NAMED)
            for key, item in (value if names else edit(value)).items()
        }
    return [_edited(item, edit, levels - 1) for item in value] if levels > 0 and isinstance(value, list | tuple) else value


def _reduced(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema without titles, which repeat names and cost tokens, and without `patternProperties`, whose keys are not names.

    An object with `patternProperties` then allows any other properties.
    """
    patterns = ("patternProperties", "additionalProperties") if isinstance(schema.get("patternProperties"), Mapping) else ()
    return _without(schema, ("title", *patterns))


def _without(schema: Mapping[str, Any], keywords: Sequence[str]) -> Mapping[str, Any]:
    return {key: item for key, item in schema.items() if key not in keywords}


def _checked(value: Any, name: str, levels: int) -> Any:
    """Returns a copy of a schema whose strings contain no unsafe characters. Raises `InvalidMessage`."""
    if levels <= 0:
        raise InvalidMessage(f"the tool {name} with a schema of more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return clean(value, MAX_DESCRIPTION)
    if isinstance(value, Mapping):
        for key in value:
            if not _is_key(key):
                raise InvalidMessage(f"the tool {name} with the key {clean(str(key), _MAX_KEY)!r} in its schema")
        return {key: _checked(item, name, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_checked(item, name, levels - 1) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidMessage(f"the tool {name} with a schema that is not JSON")


def _is_key(key: Any) -> bool:
    """Whether a key is short, printable, normalized and without angle brackets, so that a model can write it in every tool-call format."""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY or key != key.strip() or not key.isprintable():
        return False
    return not set("<>") & set(key) and unicodedata.is_normalized("NFKC", key)


def _mapped(value: Any, rewrite: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, rewrite) for key, item in value.items()}
    return [_mapped(item, rewrite) for item in value] if isinstance(value, list | tuple) else value
