"""Options shared by several commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.evaluation.policies import version_folder

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
SandboxChoice = Annotated[str | None, typer.Option("--sandbox", help="auto, docker, bubblewrap or module:attr (overrides the recipe).")]


def model_override(model: str | None) -> tuple[str, ...]:
    """The recipe override for `--model`: a folder, a version of a run (RUN@VERSION), or a model id."""
    if model is None:
        return ()
    if (version := version_folder(model)) is not None:
        return (f"policy.model={json.dumps(str(version[1]))}",)
    return (f"policy.model={json.dumps(str(Path(model).resolve()) if Path(model).is_dir() else model)}",)
