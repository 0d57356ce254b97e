"""Options for the requests to an evaluated endpoint: additional keys and headers, and the name of the token limit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.base import secrets
from agentrl.base.user_code import printable
from agentrl.errors import UserError

_SAID_ELSEWHERE = {
    "model": "--model gives the model",
    "messages": "the case gives the messages",
    "tools": "the case gives the tools",
    "stream": "answers are not streamed",
    "n": "--repeats gives the number of attempts",
    "temperature": "set evaluation.sampling.temperature, or --request temperature=null for a server that does not accept a temperature",
    "top_p": "set evaluation.sampling.top_p",
    "max_tokens": "limits.turn_tokens gives the number of tokens",
    "max_completion_tokens": "limits.turn_tokens gives the number of tokens; --tokens-name max_completion_tokens sends it under this name",
}
"""Request keys that are set elsewhere -> where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options for the requests to an endpoint, in addition to its model and key."""

    tokens_name: str = "max_tokens"  # request key of the token limit of a turn
    keys: Mapping[str, Any] = field(default_factory=dict)  # additional keys of each request
    without_temperature: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # name -> reference to the value

    @classmethod
    def parse(cls, requested: Sequence[str], headers: Sequence[str], tokens_name: str) -> RequestOptions:
        """Parses command-line options. Raises `UserError`.

        Args:
            requested: KEY=VALUE, with JSON or text as the value; `temperature=null` sends no temperature.
            headers: NAME=REFERENCE.
        """
        keys = {key: _json_or_text(value) for key, value in (_pair("--request", text, "reasoning_effort=low") for text in requested)}
        without = "temperature" in keys and keys["temperature"] is None
        for key in [key for key in keys if key in _SAID_ELSEWHERE and not (without and key == "temperature")]:
            raise UserError(f"--request {key} is not allowed: {_SAID_ELSEWHERE[key]}", fix=f"remove --request {key}")
        keys = {key: value for key, value in keys.items() if key != "temperature"}
        if problem := next(secrets.literal_secret_errors(keys, "--request"), ""):
            raise UserError(problem, fix="set headers by reference: --header NAME=env:VARIABLE")
        references = dict(_pair("--header", text, "api-key=env:THEIR_KEY") for text in headers)
        return cls(tokens_name=tokens_name or "max_tokens", keys=keys, without_temperature=without, headers=references)

    @property
    def summary(self) -> str:
        """A summary of the options, for the policy's name; empty without options."""
        return ", ".join(
            [*(f"{key}={json.dumps(value)}" for key, value in self.keys.items()), *(["no temperature"] if self.without_temperature else [])]
        )


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    key, parted, value = text.partition("=")
    if not parted or not key.strip():
        raise UserError(f"{option} {printable(text, 80)} contains no =", fix=f"write it like {option} {example}")
    return key.strip(), value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
