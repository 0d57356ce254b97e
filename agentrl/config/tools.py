"""Settings for the sandboxes, tools and memory of agents (`sandbox`, `mcp`, `tools`, `memory`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agentrl.base import secrets
from agentrl.config.section import Section
from agentrl.plugins import parts


class SandboxConfig(Section):
    """The sandboxes: `sandbox`."""

    backend: parts.Backend = parts.Part("auto")
    """auto: docker if a daemon responds, else bubblewrap. cell: sandboxes in other pods (docs/cluster.md). There is no host backend."""
    max_open: int = Field(64, ge=1)
    """Sandboxes open at once."""


def _server_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", name):
        raise ValueError(f"{name[:80]!r} is not a server name: use 1 to 32 letters, digits, _ and -")
    return name


ServerName = Annotated[str, AfterValidator(_server_name)]


class MCPConfig(Section):
    """An MCP server: a program in the episode's sandbox (`command`), a program on this machine (`host_command`), or a `url`."""

    command: tuple[str, ...] = ()
    """Program and arguments, started in the sandbox of each episode that calls the server."""
    host_command: tuple[str, ...] = ()
    """Program and arguments, started on the host with the rights of the run, once per episode that calls the server."""
    url: str = Field("", pattern=r"^(https?://[^\s/?#@]+.*)?$")
    """HTTP address. Redirects are not followed."""
    env: dict[str, str] = Field({})
    """Environment of host_command; values are `env:NAME` or `file:/PATH`. PATH, HOME, TMPDIR and the locale are also set."""
    key_env: str = Field("", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable with the bearer token of `url`."""
    only: tuple[str, ...] = ()
    """Tools to offer. Empty: all, at most 64."""
    together: bool = False
    """Runs calls of one turn in parallel (`url` only)."""

    @model_validator(mode="after")
    def _one_place(self) -> MCPConfig:
        places = {"command": self.command, "host_command": self.host_command, "url": self.url}
        if len(set_keys := [name for name, value in places.items() if value]) != 1:
            raise ValueError(f"a server needs exactly one of command, host_command and url, got {' and '.join(set_keys) or 'none'}")
        if self.together and not self.url:
            raise ValueError("together does nothing with a program, which handles one call at a time: remove it")
        if self.url and self.env:
            raise ValueError("env does nothing with a url, because no program is started: remove it")
        if self.command and self.env:
            raise ValueError("env works only with host_command: the agent could read the environment of a program in its sandbox")
        if wrong := [name for name, value in self.env.items() if not secrets.is_reference(value)]:
            raise ValueError(f"env.{wrong[0]} is given by value, which recipe.json and the report would show: {secrets.HOW_TO_REFER}")
        if self.url and (urlsplit(self.url).query or urlsplit(self.url).fragment):
            raise ValueError("url has a query, which recipe.json and the report would show: set key_env to the variable with the token")
        if self.key_env and not self.url:
            raise ValueError("key_env does nothing without a url: give a program its variables with env")
        if any("\0" in word for word in (*self.command, *self.host_command)) or not all((self.command or self.host_command or ("-",))[:1]):
            raise ValueError("a command must start with the name of a program, and must not contain NUL")
        return self


class ToolConfig(Section):
    """Changes to one tool: limits, which replace the task's limits, and the descriptions that agents read."""

    timeout_s: float | None = Field(None, gt=0, le=3600)
    """Seconds per call."""
    output_chars: int | None = Field(None, ge=1)
    """Characters shown per call."""
    calls: int | None = Field(None, ge=1)
    """Calls per episode."""
    description: str = ""
    """What the tool does and when to use it. Empty: unchanged."""
    arguments: dict[str, str] = Field({})
    """Descriptions by argument name."""

    @model_validator(mode="after")
    def _changes_something(self) -> ToolConfig:
        if self == type(self).model_construct():
            raise ValueError("this section changes nothing: set timeout_s, output_chars, calls, description or arguments")
        return self


class MemoryConfig(Section):
    """Notes that agents write for later episodes of the run. docs/memory.md describes which agents can read them."""

    scope: Literal["family", "project"] = "family"
    """Tasks that share notes. family: those of one family. project: those with the same `project` in their data."""
    notes: int = Field(4, ge=1, le=64)
    """Notes per episode, over all its agents."""
    heldout_rounds: int = Field(1, ge=1, le=1000)
    """Rounds of an evaluation. An episode finds notes from earlier rounds of the same evaluation and split. 1: none."""
