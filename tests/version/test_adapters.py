"""Checks of an adapter file before it is merged into a served model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.version.adapters import is_zero_adapter, read_adapter

SHAPES = {"model.q.weight": (4, 6), "model.norm.weight": (6,)}
GOOD = {"base_model.model.model.q.lora_A.weight": torch.ones(2, 6), "base_model.model.model.q.lora_B.weight": torch.ones(4, 2)}


def write(folder: Path, tensors: dict[str, torch.Tensor], scaling: str | None = "0.5") -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt", **({} if scaling is None else {"scaling": scaling})})
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adapted_layers_are_merged_and_others_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in GOOD.items()}
    adapter = read_adapter(write(tmp_path, tensors, "0.3"), SHAPES)
    weight, norm = torch.randn(4, 6).to(dtype), torch.randn(6).to(dtype)
    original = weight.clone()
    merged = dict(adapter.merge([("model.q.weight", weight), ("model.norm.weight", norm)], torch.device("cpu")))
    a, b = (tensor.double() for tensor in tensors.values())
    exact = original.double() + 0.3 * b @ a
    assert merged["model.norm.weight"] is norm
    assert merged["model.q.weight"].dtype == dtype
    assert torch.equal(weight, original), "the base weights are mapped from a file and must not change"
    rounding = exact.abs() * torch.finfo(dtype).eps + torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 10
    assert ((merged["model.q.weight"].double() - exact).abs() <= rounding).all()


@pytest.mark.parametrize(
    ("changes", "scaling", "message"),
    [
        ({"base_model.model.model.q.lora_B.weight": None}, "1", "not a plain LoRA adapter"),
        ({"base_model.model.model.q.lora_magnitude_vector": torch.ones(4)}, "1", "not a plain LoRA adapter"),
        (dict.fromkeys(GOOD), "1", "not a plain LoRA adapter"),
        ({"base_model.model.model.q.lora_A.weight": torch.ones(3, 6)}, "1", "do not fit"),
        ({"base_model.model.model.q.lora_A.weight": torch.ones(2, 5)}, "1", "do not fit"),
        ({"base_model.model.model.q.lora_A.weight": torch.ones(2, 6, 1)}, "1", "do not fit"),
        ({}, None, "no valid adapter scaling"),
        ({}, "nan", "no valid adapter scaling"),
        ({}, "a lot", "no valid adapter scaling"),
    ],
)
def test_an_adapter_that_does_not_fit_raises_with_the_layers_name(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], scaling: str | None, message: str
) -> None:
    tensors = {name: tensor for name, tensor in {**GOOD, "x": None, **changes}.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        read_adapter(write(tmp_path, tensors or {"other": torch.ones(1)}, scaling), SHAPES)


def test_an_unknown_layer_raises_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter of model\.q: .* weight None"):
        read_adapter(write(tmp_path, GOOD), {})


def test_is_zero_adapter_detects_small_changes(tmp_path: Path) -> None:
    a, b = GOOD
    assert is_zero_adapter(write(tmp_path, {**GOOD, b: torch.zeros(4, 2)})) and is_zero_adapter(
        write(tmp_path, {**GOOD, a: torch.zeros(2, 6)})
    )
    little = torch.zeros(4, 2)
    little[3, 1] = 1e-30
    assert not is_zero_adapter(write(tmp_path, {**GOOD, b: little})) and not is_zero_adapter(write(tmp_path, GOOD))
