"""A bfloat16 model is trained in float32; otherwise its small updates would be rounded away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agentrl.supervised import select_demonstrations, select_preferences
from agentrl.testing.tiny_model import VOCABULARY, make_model, write_version
from tests.supervised.test_tune import groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights in bfloat16 and in float32."""
    root = tmp_path_factory.mktemp("model")
    write_version(root, 0, make_model(0, vocabulary=VOCABULARY))
    base = next(path.parent for path in root.rglob("config.json"))
    lm = transformers.AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16)
    folders = root / "half", root / "full"
    for folder, dtype in zip(folders, (torch.bfloat16, torch.float32), strict=True):
        shutil.copytree(base, folder)
        lm.to(dtype).save_pretrained(folder)
    return folders


def _trained(train: Callable[..., float], data: Any, model: Path, out: Path, kind: Any, **options: float) -> dict[str, torch.Tensor]:
    train(data, model, out, **{"epochs": 2, "lr": 1e-5, "batch": 8, "seed": 0, **options})
    return dict(kind.from_pretrained(out, dtype="auto").state_dict())


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_a_bfloat16_model_is_trained_in_float32_and_rounded_once(twins: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    from agentrl.supervised import tune

    train, kind, data, options = {
        "sft": (tune.train_sft, transformers.AutoModelForCausalLM, select_demonstrations(groups()), {}),
        "dpo": (tune.train_dpo, transformers.AutoModelForCausalLM, select_preferences(groups()), {"beta": 0.1}),
        "reward": (
            tune.train_reward_model,
            transformers.AutoModelForSequenceClassification,
            select_preferences(groups()),
            {"lr": 1e-3},
        ),  # a larger rate, so that it learns in two epochs
    }[method]
    half, full = (_trained(train, data, start, tmp_path / start.name, kind, **options) for start in twins)  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16} and {tensor.dtype for tensor in full.values()} == {torch.float32}
    assert all(torch.equal(half[name], full[name].to(torch.bfloat16)) for name in full)
    start = transformers.AutoModelForCausalLM.from_pretrained(twins[1]).state_dict()
    assert all(not torch.equal(tensor, start[name]) for name, tensor in full.items() if name in start), "training changed every weight"
