"""What an answer must spell, as the server's guided decoding takes it: JSON of a schema, calls of tools, or either.

The server masks the tokens that the grammar does not allow before it samples, and its logprobs are those of what is left. Such an answer is
sampled with supports (`agentrl.sampling`), so the learner scores each token over the tokens that it was drawn from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.gateway.asked import Asked, Refused
from agentrl.gateway.schemas import ANY_OBJECT, Schemas
from agentrl.gateway.tokens import Chat

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHITESPACE = 2
"""Most white space in a row between the parts of a JSON value; without a bound a policy may say nothing else."""


def constraint(asked: Asked, chat: Chat) -> str:
    """What the answer must spell, as the JSON of vLLM's structural tag; empty: anything. Raises `Refused`."""
    names = asked.forced
    if asked.shape is not None and asked.calls and not names:
        names = tuple(tool["function"]["name"] for tool in asked.tools)
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


def _calls(asked: Asked, names: Sequence[str], chat: Chat) -> dict[str, Any]:
    """One or more calls of these tools."""
    schemas, tags, between = Schemas(), [], ""
    for at, tool in enumerate(asked.tools):
        function = tool["function"]
        if function["name"] not in names:
            continue
        frame = chat.frame(function["name"])
        if frame is None or not _NAME.fullmatch(function["name"]):
            why = "the policy's form of calls is not one of those that can be forced" if frame is None else "its name has other letters"
            where = asked.forced_by or "tools"
            raise Refused("unsupported", f"{where}: a call of {function['name'][:100]!a} cannot be forced: {why}.", param=where)
        try:
            schema = {**ANY_OBJECT, **schemas.rebuilt(function["parameters"], f"tools[{at}]")}
        except Refused:
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
