"""Options that several commands have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.evaluation.policies import version_folder

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
SandboxChoice = Annotated[str | None, typer.Option("--sandbox", help="auto, docker, bubblewrap or module:attr (overrides the recipe).")]


def model_override(named: str | None) -> tuple[str, ...]:
    """The override for what `--model` names: a folder, a version of a run (RUN@VERSION), or an id. None: no override."""
    if named is None:
        return ()
    if (found := version_folder(named)) is not None:
        return (f"policy.model={json.dumps(str(found[1]))}",)
    return (f"policy.model={json.dumps(str(Path(named).resolve()) if Path(named).is_dir() else named)}",)
