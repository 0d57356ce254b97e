"""Builds the constraint of an answer for the server's guided decoding: JSON of a schema, calls of tools, or either.

Before it samples, the server masks the tokens that the grammar does not allow, and its logprobs are over the remaining tokens. Such an
answer is sampled with supports (`agentrl.records.sampling`), so the learner scores each token over the set from which it was drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway.request import CompletionRequest, RequestError
from agentrl.gateway.schemas import ANY_OBJECT, Schemas
from agentrl.gateway.tokens import Chat

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHITESPACE = 2
"""Maximum white space in a row between the parts of a JSON value. Without a bound, a policy could emit only white space."""


def constraint(asked: CompletionRequest, chat: Chat) -> str:
    """The constraint of the answer as the JSON of vLLM's structural tag; empty if there is none. Raises `RequestError`."""
    names = asked.forced
    if asked.shape is not None and asked.calls and not names:
        names = tuple(tool["function"]["name"] for tool in asked.known_tools)
    ways = [_calls(asked, names, chat)] if names else []
    if asked.shape is not None and not asked.forced:
        ways.append(_json(asked.shape))
    if not ways:
        return ""
    made = ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}
    if chat.thinks_first:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
        space = {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}}
        made = {"type": "sequence", "elements": [thought, space, made]}
    return json.dumps({"type": "structural_tag", "format": made})


def _calls(asked: CompletionRequest, names: Sequence[str], chat: Chat) -> dict[str, Any]:
    """The format of one or more calls of these tools."""
    schemas, tags, between = Schemas(), [], ""
    for at, tool in enumerate(asked.known_tools):
        function = tool["function"]
        if function["name"] not in names:
            continue
        frame = chat.frame(function["name"])
        if frame is None or not _NAME.fullmatch(function["name"]):
            why = "guided decoding does not support the policy's form of calls" if frame is None else "its name may only have A-Za-z0-9_.-"
            where = asked.forced_by or "tools"
            raise RequestError("unsupported", f"{where}: a call of {function['name'][:100]!a} cannot be forced: {why}.", param=where)
        try:
            schema = {**ANY_OBJECT, **schemas.rebuilt(function["parameters"], f"tools[{at}]")}
        except RequestError:
            if function["name"] in asked.strict:
                raise
            schema = dict(ANY_OBJECT)
        between = frame.between
        content = {**_json(schema, frame.style), "excludes": list(frame.excludes)}
        tags.append({"type": "tag", "begin": frame.begin, "content": content, "end": frame.end})
    once = {"at_least_one": True, "stop_after_first": asked.single}
    return {"type": "tags_with_separator", "tags": tags, "separator": between, **once}


def _json(schema: Mapping[str, Any], style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(schema), "style": style, "max_whitespace_cnt": _WHITESPACE}
