"""Registry of the judge servers that this process starts (`judge_servers` in a recipe).

    Endpoint(url=served("small"), model="small")

A server is registered before it starts. A judge looks up the server's address before each request, so the server may restart at a different
address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import JudgeError, UserError


@dataclass(slots=True, kw_only=True)
class JudgeServer:
    """A judge server that this process has started or will start."""

    folder: Path  # model folder
    weights: str  # sha256 of its weight files
    reward_model: bool  # returns numbers, not text
    url: str = ""  # http://HOST:PORT while it responds
    key: str = field(default="", repr=False)  # API key that requests must contain
    refused: str = ""  # reason why it will not respond again


class ServerStarting(Exception):
    """The judge server is starting and does not respond yet."""


@dataclass(frozen=True, slots=True)
class ServedUrl:
    """A value for `Endpoint.url` that looks up the judge server with this name before each request."""

    name: str

    def __call__(self) -> str:
        """Returns the server's address.

        Raises `ServerStarting` while the server is starting, and `JudgeError` if there is no such server or it failed permanently.
        """
        server = _registered.get(self.name)
        if server is None:
            raise JudgeError(f"there is no judge server {self.name!r}: the recipe has no judge_servers.{self.name}")
        if server.refused:
            raise JudgeError(server.refused)
        if not server.url:
            raise ServerStarting(f"the judge server {self.name} is starting")
        return f"{server.url}/v1"

    @property
    def key(self) -> str:
        """The API key of the running server; empty if no server is running."""
        return _registered[self.name].key if self.name in _registered else ""

    @property
    def weights(self) -> str:
        """sha256 of the server's weights; empty before the server is registered."""
        return _registered[self.name].weights if self.name in _registered else ""

    def server(self, *, reward_model: bool) -> JudgeServer:
        """Returns the registered server.

        Raises `UserError` if the recipe does not start a server with this name, or if the server's model is a reward model and
        `reward_model` is False, or a chat model and `reward_model` is True.
        """
        server = _registered.get(self.name)
        if server is None:
            others = f"; its servers are {', '.join(_registered)}" if _registered else ""
            raise UserError(
                f"a judge uses the server {self.name!r}, but the recipe starts no server with that name{others}",
                fix=f'add judge_servers={{"{self.name}": {{"model": FOLDER}}}} to the recipe; for agentrl judge calibrate, pass --recipe',
            )
        if server.reward_model != reward_model:
            problem = (
                "is a reward model, which needs the judge RewardModel" if server.reward_model else "is a chat model, not a reward model"
            )
            raise UserError(f"the model of judge_servers.{self.name} {problem}", fix="use a different model or the other kind of judge")
        return server


_registered: dict[str, JudgeServer] = {}
_used: set[str] = set()


def served(name: str) -> ServedUrl:
    """Returns a value for `Endpoint.url` that refers to the server `name` of the recipe's `judge_servers`."""
    _used.add(name)
    return ServedUrl(name)


def register_servers(servers: Mapping[str, JudgeServer]) -> None:
    """Registers the judge servers of this process. Earlier registrations are removed."""
    _registered.clear()
    _registered.update(servers)


def registered_servers() -> Mapping[str, JudgeServer]:
    """Returns the registered servers by name. The code that starts the servers sets `url`, `key` and `refused` in them."""
    return _registered


def unused_servers() -> list[str]:
    """Returns the names of the registered servers to which no judge refers."""
    return sorted(set(_registered) - _used)
