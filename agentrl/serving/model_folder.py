"""What a model folder must hold to be served: checked before a server process is started, with the fix in the message."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import UserError


def check_model_folder(folder: Path) -> None:
    """Raises `UserError` unless `folder` is a Hugging Face model folder with weights, tokenizer and chat template."""
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist", fix="set policy.model to an existing folder or a Hugging Face model id")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json", fix="point policy.model at a folder written by save_pretrained()")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors weights", fix="save the model with safetensors (the save_pretrained() default)")
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} has no tokenizer", fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)")
    if not _has_chat_template(folder):
        raise UserError(
            f"the tokenizer in {folder} has no chat template, so conversations cannot be written as tokens",
            fix="use an instruction-tuned model, or set tokenizer.chat_template and save the tokenizer again",
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    try:
        return path.is_file() and bool(json.loads(path.read_text()).get("chat_template"))
    except ValueError:
        raise UserError(f"{path} is not JSON", fix="save the tokenizer again") from None
