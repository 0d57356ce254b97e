"""Judges' servers that this process starts (`judge_servers` of a recipe). A judge names one here; whoever starts it says where it answers.

    Endpoint(url=served("small"), model="small")

A judge is written down before its server is started, and follows it when it is started again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import JudgeError, UserError


@dataclass(slots=True, kw_only=True)
class JudgeServer:
    """One server that is or will be started."""

    folder: Path  # of the model
    weights: str  # sha256 over its weight files
    reward_model: bool  # it gives numbers, not words
    url: str = ""  # http://HOST:PORT while it answers
    key: str = field(default="", repr=False)  # that requests to it carry
    refused: str = ""  # why it will not answer any more


class ServerStarting(Exception):
    """The server does not answer at the moment, and will again."""


@dataclass(frozen=True, slots=True)
class ServedUrl:
    """Where the server of a name answers: a `url` of an endpoint. Called before each request."""

    name: str

    def __call__(self) -> str:
        """Raises `ServerStarting` while it is being started, and `JudgeError` where nobody will start it."""
        known = _declared.get(self.name)
        if known is None:
            raise JudgeError(f"no server of the name {self.name!r} is started: the recipe has no judge_servers.{self.name}")
        if known.refused:
            raise JudgeError(known.refused)
        if not known.url:
            raise ServerStarting(f"the judge's server {self.name} is being started")
        return f"{known.url}/v1"

    @property
    def key(self) -> str:
        """The key of the running server; empty if there is none."""
        known = _declared.get(self.name)
        return "" if known is None else known.key

    @property
    def weights(self) -> str:
        """sha256 of the weights that it serves; empty before anybody has said which."""
        known = _declared.get(self.name)
        return "" if known is None else known.weights

    def server(self, *, reward_model: bool) -> JudgeServer:
        """What is known of it. Raises `UserError` where the recipe starts no such server, or one of another kind."""
        known = _declared.get(self.name)
        if known is None:
            there = f"; it has {', '.join(_declared)}" if _declared else ""
            raise UserError(
                f"a judge asks the server {self.name!r}, and no recipe here starts one of that name{there}",
                fix=f'add judge_servers={{"{self.name}": {{"model": FOLDER}}}} to the recipe; agentrl judge calibrate takes it by --recipe',
            )
        if known.reward_model != reward_model:
            told = "gives numbers, so that it judges as a RewardModel" if known.reward_model else "is a chat model, not a reward model"
            raise UserError(f"the model of judge_servers.{self.name} {told}", fix="name another model, or use the other kind of judge")
        return known


_declared: dict[str, JudgeServer] = {}
_named: set[str] = set()


def served(name: str) -> ServedUrl:
    """The server that the recipe calls `name` in its section `judges`."""
    _named.add(name)
    return ServedUrl(name)


def register_servers(servers: Mapping[str, JudgeServer]) -> None:
    """Says which servers are started in this process, in place of those of before."""
    _declared.clear()
    _declared.update(servers)


def registered_servers() -> Mapping[str, JudgeServer]:
    """Those that are started in this process, by name. Whoever starts them sets `url`, `key` and `refused`."""
    return _declared


def unused_servers() -> list[str]:
    """Declared servers that no judge has named so far."""
    return sorted(set(_declared) - _named)
