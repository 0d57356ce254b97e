"""What a person says of the requests to an endpoint that is evaluated: further keys and headers, and what it calls the bound on tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl import secrets
from agentrl.errors import UserError
from agentrl.usercode import printable

_SAID_ELSEWHERE = {
    "model": "--model names the model",
    "messages": "the case says what is asked",
    "tools": "the case says which tools there are",
    "stream": "answers are read whole",
    "n": "--repeats says how many attempts there are",
    "temperature": "set evaluation.temperature, or --request temperature=null for a server that takes none",
    "top_p": "set evaluation.top_p",
    "max_tokens": "limits.turn_tokens says how many tokens a turn may have",
    "max_completion_tokens": "limits.turn_tokens says how many; --tokens-name max_completion_tokens sends them under this name",
}
"""Keys of a request that have another place -> where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What a person says of the requests to an endpoint, beside its model and key."""

    tokens_name: str = "max_tokens"  # under which it is told how many tokens a turn may have
    keys: Mapping[str, Any] = field(default_factory=dict)  # further ones of each request
    without_temperature: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # name -> reference to the value

    @classmethod
    def of(cls, requested: Sequence[str], headers: Sequence[str], tokens_name: str) -> Requests:
        """As options give them: KEY=VALUE, JSON or text, and `temperature=null`; NAME=REFERENCE. Raises `UserError`."""
        keys = {key: _json_or_text(value) for key, value in (_pair("--request", text, "reasoning_effort=low") for text in requested)}
        without = "temperature" in keys and keys["temperature"] is None
        for key in [key for key in keys if key in _SAID_ELSEWHERE and not (without and key == "temperature")]:
            raise UserError(f"--request {key}: {_SAID_ELSEWHERE[key]}", fix="leave it out here")
        keys = {key: value for key, value in keys.items() if key != "temperature"}
        if found := next(secrets.literals(keys, "--request"), ""):
            raise UserError(found, fix="give headers by reference: --header NAME=env:VARIABLE")
        made = dict(_pair("--header", text, "api-key=env:THEIR_KEY") for text in headers)
        return cls(tokens_name=tokens_name or "max_tokens", keys=keys, without_temperature=without, headers=made)

    @property
    def told(self) -> str:
        """What tells such requests from others, for the policy's name; empty: nothing."""
        return ", ".join(
            [*(f"{key}={json.dumps(value)}" for key, value in self.keys.items()), *(["no temperature"] if self.without_temperature else [])]
        )


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    key, parted, value = text.partition("=")
    if not parted or not key.strip():
        raise UserError(f"{option} {printable(text, 80)}: there is no = in it", fix=f"such as {option} {example}")
    return key.strip(), value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
