"""Builds the guided-decoding constraint on an answer: JSON that matches a schema, tool calls, either of these, or one of several texts.

Before the inference server samples a token, it masks the tokens that the grammar does not allow, and its logprobs are normalized over the
remaining tokens. An answer with a constraint is sampled with supports (`agentrl.records.sampling`), so the learner scores each token over
the set from which the token was drawn.

The server compiles the schemas, and all sessions share the server. A client's schema is therefore rebuilt from known keywords, within size
limits. A keyword that restricts the value is copied or rejected. A keyword that only describes the value is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway import checks
from agentrl.gateway.checks import array, mapping, path, text
from agentrl.gateway.request import CompletionRequest, RequestError
from agentrl.gateway.tokens import Chat

MAX_DEPTH = 12
MAX_SCHEMAS = 512
"""Maximum number of schemas in the answer's format, and in all tools together, including nested schemas."""
MAX_CHARS = 1 << 15
"""Maximum characters of all names and values in these schemas."""
MAX_COUNT = 1024
"""Maximum value of `minItems`, `maxLength` and similar keywords."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([A-Za-z0-9_.\-\[\]]{1,128})")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHITESPACE = 2
"""Maximum number of consecutive white-space characters between the parts of a JSON value. Without a bound, a policy could emit only white
space."""


def constraint(request: CompletionRequest, chat: Chat) -> str:
    """Returns the constraint on the answer as the JSON text of a vLLM structural tag; empty if there is none. Raises `RequestError` if a
    forced call or a strict tool's schema is not supported."""
    names = request.forced
    if request.shape is not None and request.calls and not names:
        names = tuple(tool["function"]["name"] for tool in request.known_tools)
    formats = [_calls(request, names, chat)] if names else []
    if request.shape is not None and not request.forced:
        formats.append(_json(request.shape))
    return _structural_tag(formats, chat)


def choice_constraint(choices: Sequence[str], chat: Chat) -> str:
    """Returns the constraint that restricts an answer to one of `choices`; empty if there are none."""
    return _structural_tag([{"type": "const_string", "value": choice} for choice in choices], chat)


def _structural_tag(formats: Sequence[Mapping[str, Any]], chat: Chat) -> str:
    """Returns the JSON text of a vLLM structural tag for an answer in one of these formats; empty if there are no formats.

    If the model reasons before it answers, the structural tag allows any reasoning before the answer.
    """
    if not formats:
        return ""
    answer = formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
    if chat.thinks_first:
        reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
        space = {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}}
        answer = {"type": "sequence", "elements": [reasoning, space, answer]}
    return json.dumps({"type": "structural_tag", "format": answer})


def _calls(request: CompletionRequest, names: Sequence[str], chat: Chat) -> dict[str, Any]:
    """Returns the structural-tag format for one or more calls of the tools in `names`, or for exactly one call if `request.single` is
    set. If the schema of a tool that is not strict is not supported, the tool's arguments may be any object."""
    schemas, tags, between = Schemas(), [], ""
    for at, tool in enumerate(request.known_tools):
        function = tool["function"]
        if function["name"] not in names:
            continue
        frame = chat.frame(function["name"])
        if frame is None or not _NAME.fullmatch(function["name"]):
            why = (
                "guided decoding does not support the policy's form of calls" if frame is None else "its name may contain only A-Za-z0-9_.-"
            )
            where = request.forced_by or "tools"
            raise RequestError("unsupported", f"{where}: a call of {function['name'][:100]!a} cannot be forced: {why}.", param=where)
        try:
            schema = {**ANY_OBJECT, **schemas.rebuilt(function["parameters"], f"tools[{at}]")}
        except RequestError:
            if function["name"] in request.strict:
                raise
            schema = dict(ANY_OBJECT)
        between = frame.between
        content = {**_json(schema, frame.style), "excludes": list(frame.excludes)}
        tags.append({"type": "tag", "begin": frame.begin, "content": content, "end": frame.end})
    once = {"at_least_one": True, "stop_after_first": request.single}
    return {"type": "tags_with_separator", "tags": tags, "separator": between, **once}


def _json(schema: Mapping[str, Any], style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(schema), "style": style, "max_whitespace_cnt": _WHITESPACE}


class Schemas:
    """Rebuilds the schemas of one request."""

    def __init__(self) -> None:
        self._schemas = self._chars = 0
        self._wanted: set[str] = set()  # names of definitions to which a `$ref` points

    def rebuilt(self, value: Any, where: str) -> dict[str, Any]:
        """Returns the rebuilt schema with its definitions. Raises `RequestError` with the path of an unsupported part."""
        self._wanted.clear()
        about = mapping(checks.storable(value, where), where)
        rebuilt = self._schema({key: item for key, item in about.items() if key not in ("$defs", "definitions")}, where, 0)
        definitions: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            for name, schema in mapping(checks.value_or(about.get(key), {}), path(where, key)).items():
                definitions[self._text(name, where)] = self._schema(schema, path(path(where, key), name[:40]), 1)
        rebuilt |= {"$defs": definitions} if definitions else {}
        for name in sorted(self._wanted):
            if name not in definitions:
                raise RequestError("invalid", f"{where}: there is no definition {name[:80]!a}.", param=where)
            if name in _same_as(name, definitions):
                raise RequestError("invalid", f"{where}: definition {name[:80]!a} refers only to itself.", param=where)
        return rebuilt

    def _schema(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        if value is True:
            return {}
        self._schemas += 1
        if depth > MAX_DEPTH or self._schemas > MAX_SCHEMAS:
            raise RequestError("invalid", f"{where}: the schema has more than {MAX_DEPTH} levels or {MAX_SCHEMAS} schemas.", param=where)
        rebuilt: dict[str, Any] = {}
        for key, item in mapping(value, where).items():
            if key not in _ANNOTATIONS and (item is not None or key == "const"):
                rebuilt |= self._keyword(key, item, path(where, key[:40]), depth + 1)
        return rebuilt

    def _keyword(self, key: str, value: Any, where: str, depth: int) -> dict[str, Any]:
        """Returns a keyword and its value in rebuilt form."""
        match key:
            case "$ref":
                reference = _REFERENCE.fullmatch(text(value, where))
                if reference is None:
                    raise RequestError("unsupported", f"{where}: only references to $defs are supported.", param=where)
                self._wanted.add(reference[1])
                return {key: f"#/$defs/{reference[1]}"}
            case "type":
                kinds = _among([value] if isinstance(value, str) else array(value, where), _KINDS, where)
                return {key: kinds[0] if isinstance(value, str) else kinds}
            case "enum" | "const":
                self._text(json.dumps(value), where)
                return {key: array(value, where) if key == "enum" else value}
            case "properties":
                named = mapping(value, where).items()
                return {key: {self._text(name, where): self._schema(item, path(where, name[:40]), depth) for name, item in named}}
            case "required":
                return {key: [self._text(text(item, where), where) for item in array(value, where)]}
            case "anyOf" | "oneOf" | "allOf" | "prefixItems":
                some = [self._schema(item, f"{where}[{at}]", depth) for at, item in enumerate(array(value, where))]
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


def answer_schema(about: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Returns the JSON schema for an answer in the format `about`, which has the keys `type` and, for `json_schema`, `schema`; None for
    text. Raises `RequestError` if the type or the schema is not supported."""
    if about.get("type") == "json_schema":
        return Schemas().rebuilt(about.get("schema"), f"{where}.schema")
    checks.one_of("text", "json_object")(about.get("type"), f"{where}.type")
    return ANY_OBJECT if about["type"] == "json_object" else None


def _among(values: Sequence[Any], known: Sequence[str], where: str) -> list[str]:
    for item in values:
        if not isinstance(item, str) or item not in known:
            raise RequestError("unsupported", f"{where}: must be one of {', '.join(known)}.", param=where)
    return list(values)


def _plain(key: str, value: Any, where: str) -> Any:
    """Returns the value of a keyword that does not contain schemas."""
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
    """Returns the names of the definitions that a definition reaches through `$ref` and `anyOf` alone."""
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
