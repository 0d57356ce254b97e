"""The shipped targets, and targets of projects, which are given by reference."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from agentrl.errors import UserError
from agentrl.plugins.references import resolve
from tests.fuzz.target import Target

NAMES: Mapping[str, str] = {
    "frames": "responses of an exec server",
    "server": "requests of the host to an exec server: names, sizes, files",
    "archive": "the tar archive that a sandbox is restored from",
    "calls": "a completion: its tool calls, their arguments, outputs and records",
    "egress": "requests of a program to the proxy; entries of an allow-list",
    "gateway": "requests of an outside program to the gateway",
    "tasks": "a task folder: task.toml, runs.toml, image.toml, Dockerfile, tests",
    "grading": "answers, reports of tests and rewards, from judging to the score",
    "records": "records read back from JSON",
    "weights": "deltas and safetensors files of a version; the files of a model folder; the header of a GGUF file",
    "completions": "responses of the inference server",
    "judges": "responses of a judge's endpoint, their headers, and the agent's text in its prompt",
    "traces": "files of third-party agents: chat messages, spans, trajectories",
}
"""Name -> input. Each target is `target` in the module of that name in `tests.fuzz.targets`."""


def find(name: str) -> Target:
    """Returns the target with this name or reference (see `agentrl.plugins.references.resolve`). Raises `UserError`."""
    if name in NAMES:
        try:
            target = importlib.import_module(f"tests.fuzz.targets.{name}").target
        except ModuleNotFoundError as error:
            raise UserError(f"fuzz target {name} needs {error.name}, which is not installed", fix="run `make setup`") from None
    elif ":" in name:
        target = resolve(name)
    else:
        raise UserError(f"no fuzz target {name!r}", fix=f"use {', '.join(NAMES)}, or a reference such as fuzz.mine:target")
    if not isinstance(target, Target):
        raise UserError(f"{name!r} is a {type(target).__name__}, not a fuzz target", fix="make it an tests.fuzz.target.Target")
    return target
