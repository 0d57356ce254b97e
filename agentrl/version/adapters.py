"""Merges low-rank adapters into their base weights: W + scaling * B A, one tensor at a time.

An adapter's file is in peft's format (https://huggingface.co/docs/peft/developer_guides/checkpoint), with the scaling in its metadata, so
one hash covers everything that determines the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.records import ADAPTER
from agentrl.version.weight_files import tensor_shapes

Shape = tuple[int, ...]
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter file that has been checked against the model's tensor shapes."""

    path: Path
    scaling: float
    layers: frozenset[str]  # names in the model, without ".weight"

    def merge(self, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's tensors with the adapter merged. Sums are computed in at least float32, and are rounded once, to the weight's
        dtype."""
        with safe_open(self.path, framework="pt", device="cpu") as file:
            for name, weight in tensors:
                layer = name.removesuffix(".weight")
                if layer not in self.layers:
                    yield name, weight
                    continue
                exact = torch.promote_types(weight.dtype, torch.float32)
                a, b = (file.get_tensor(f"{_PREFIX}{layer}{part}").to(device, exact) for part in (_A, _B))
                yield name, torch.addmm(weight.to(device, exact), b, a, alpha=self.scaling).to(weight.dtype)


def read_adapter(path: Path, model: Mapping[str, Shape]) -> Adapter:
    """Returns the adapter in a file. Raises `ValueError` if the file is not a plain LoRA adapter with a scaling in its metadata, or does
    not fit a model with tensors of these shapes."""
    shapes = tensor_shapes([path])
    layers = {name.removeprefix(_PREFIX).removesuffix(_A) for name in shapes if name.startswith(_PREFIX) and name.endswith(_A)}
    if not layers or len(shapes) != 2 * len(layers):
        raise ValueError(f"{path} is not a plain LoRA adapter: it contains tensors other than pairs of lora_A and lora_B")
    for layer in sorted(layers):
        a, b, weight = shapes[f"{_PREFIX}{layer}{_A}"], shapes.get(f"{_PREFIX}{layer}{_B}"), model.get(f"{layer}.weight")
        if b is None or len(a) != 2 or len(b) != 2 or a[0] != b[1] or weight != (b[0], a[1]):
            raise ValueError(f"adapter of {layer}: A {a} and B {b} do not fit the model's weight {weight}")
    return Adapter(path=path, scaling=_scaling(path), layers=frozenset(layers))


def merge_folder(base: Path, version: Path, target: Path) -> None:
    """Writes the weights of `base`, merged with the adapter of `version`, to the file `target`. Raises the errors of `read_adapter`."""
    from safetensors.torch import save_file

    files = sorted(base.glob("*.safetensors"))
    adapter = read_adapter(version / ADAPTER, tensor_shapes(files))
    save_file(dict(adapter.merge(read_tensors(files), torch.device("cpu"))), target, metadata={"format": "pt"})


def is_zero_adapter(path: Path) -> bool:
    """Whether an adapter leaves its base unchanged: in each layer, A or B is zero, as before the first update."""
    with safe_open(path, framework="pt", device="cpu") as file:
        layers = [name.removesuffix(_B) for name in file.keys() if name.endswith(_B)]  # noqa: SIM118 - a handle is not a mapping
        return all(not file.get_tensor(layer + _B).any() or not file.get_tensor(layer + _A).any() for layer in layers)


def read_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the tensor of every entry in the safetensors files, mapped into memory one at a time."""
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                yield name, file.get_tensor(name)


def _scaling(path: Path) -> float:
    with safe_open(path, framework="pt", device="cpu") as file:
        written = (file.metadata() or {}).get("scaling", "")
    try:
        scaling = float(written)
    except ValueError:
        scaling = math.nan
    if not math.isfinite(scaling):
        raise ValueError(f"{path} has no valid adapter scaling in its metadata")
    return scaling
