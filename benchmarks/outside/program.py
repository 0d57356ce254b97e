"""Types that describe a third-party program and the protocols in which it requests completions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROTOCOLS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
"""Name of a protocol -> path of its requests."""

PROMPT = "test_area.py fails. Mend area.py, so that `python3 test_area.py` prints passed. Do not change the test."
LOOK, MEND = "cat area.py test_area.py", "sed -i 's/width + height/width * height/' area.py && python3 test_area.py"
"""Commands of a competent agent: read the files, repair the broken one and run the test."""

Says = Callable[[str, int], str]
"""The policy: the text of the prompt, and the number of tool results in it -> completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A protocol, streamed or not, and how the program is started to use it.

    `{prompt}`, `{model}` and `{base_url}` in arguments and `{model}`, `{base_url}` and `{key}` in variables are filled in
    (`agentrl.gateway.ExternalProgram`). The task is also on the standard input.
    """

    protocol: str  # a key of PROTOCOLS
    stream: bool
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)  # path in the working directory -> file of this repository

    @property
    def column(self) -> str:
        return column(self.protocol, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program at an exact version. The sandbox shows the folder of its environment read-only at `/opt`."""

    name: str
    version: str
    install: Callable[[Path], list[str]]  # folder -> the command that installs the program into it
    ways: tuple[Way, ...]
    says: Says
    environment_of: str = ""  # the program whose installed environment it shares
    models: tuple[str, ...] = ("policy",)  # names that the program may request
    prints: str = ""  # text that its standard output must contain
    features: str = ""  # what the session uses, for the table
    absent: Mapping[str, str] = field(default_factory=dict)  # column -> why the program has no such way

    @property
    def environment(self) -> str:
        return self.environment_of or self.name


def column(protocol: str, stream: bool) -> str:
    return f"{protocol}-streamed" if stream else protocol


COLUMNS = tuple(column(protocol, stream) for protocol in PROTOCOLS for stream in (False, True))


def call(name: str, **arguments: Any) -> str:
    """A tool call in the form that the policy writes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pip(*packages: str) -> Callable[[Path], list[str]]:
    """Installs wheels for the sandbox's Python, which is 3.11."""

    def command(folder: Path) -> list[str]:
        wheels = ["--only-binary", ":all:", "--python-version", "3.11"]
        return [sys.executable, "-m", "pip", "install", "--quiet", *wheels, "--target", str(folder / "lib"), *packages]

    return command


def npm(*packages: str) -> Callable[[Path], list[str]]:
    def command(folder: Path) -> list[str]:
        return ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]

    return command
