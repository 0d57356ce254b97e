"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), with peft: W is frozen, and the layer computes W + alpha / rank * B A.

B starts at zero, so version 0 is the base policy. There is no dropout, because the behaviour policy samples without it. The model is
changed in place and keeps its class, so the forest attention and the output head still work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config.recipe import LoraConfig
from agentrl.errors import UserError
from agentrl.records import ADAPTER

_CONFIG = "adapter_config.json"
_NAME = "default"  # peft's default adapter name
_PREFIX = "base_model.model."  # prefix of tensor names in an adapter's file, for peft and vLLM


def attach(lm: Any, config: LoraConfig, *, seed: int) -> None:
    """Adds an adapter to a Hugging Face model. After that, only the adapter's matrices are trained. The same seed produces the
    same matrices.

    All linear layers except the output head are adapted; see Schulman et al. 2025, "LoRA Without Regret", thinkingmachines.ai/blog/lora.
    Raises `UserError` if the update of a layer cannot be merged.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(_peft_config(config), lm, adapter_name=_NAME)
    for path, layer in _adapted(lm):
        if type(layer.base_layer) is not nn.Linear:
            raise UserError(f"learner.lora: {path} of this model is not a plain linear layer", fix="remove learner.lora")
        layer.to(lm.dtype)  # peft keeps adapters of a bfloat16 model in float32, but the optimizer already has float32 masters


@contextmanager
def disabled(lm: Any) -> Iterator[None]:
    """Disables the adapter inside the context, for computations without gradient."""
    layers = [layer for _, layer in _adapted(lm)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def exclude_frozen_weights(module: nn.Module) -> None:
    """Limits the module's state dict to trained parameters.

    Loading this state dict leaves frozen parameters unchanged, and fails if a trained parameter is missing.
    """

    def saved(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in _frozen(owner):
            state.pop(prefix + name, None)

    def loaded(owner: nn.Module, incompatible: Any) -> None:
        frozen = _frozen(owner)
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in frozen]

    module.register_state_dict_post_hook(saved)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]


def save(folder: Path, weights: Mapping[str, Tensor], config: LoraConfig, *, base: str) -> None:
    """Writes an adapter in the format that peft and vLLM read: the trained matrices, under their names in the model, and the name of
    the `base` model.

    The weight file, whose hash is recorded, contains everything that merging needs.
    """
    from safetensors.torch import save_file

    tensors = {_PREFIX + name.replace(f".{_NAME}.", "."): tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt", "scaling": repr(config.alpha / config.rank)})
    described = _peft_config(config).to_dict()
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    described |= {"base_model_name_or_path": base, "inference_mode": True, "target_modules": sorted(layers)}
    (folder / _CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True))


def _peft_config(config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _adapted(lm: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and layer of every layer with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in lm.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield path, module


def _frozen(module: nn.Module) -> set[str]:
    """Returns all names of the parameters that are not trained. A tied parameter has several names."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
