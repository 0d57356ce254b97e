"""Loads the Hugging Face model for training, optionally with Liger's fused GPU kernels (https://arxiv.org/abs/2410.10989).

Liger computes RMSNorm, SwiGLU and rotary positions in one pass over memory and keeps less data for the backward pass. Liger's output head
is not used, because it stages logits in float16 on Hopper and accumulates the weight's gradient in bfloat16 on other GPUs. `token_scorer`
uses float32.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.base.installation import install_command
from agentrl.base.media import image_token
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.learner import forest
from agentrl.learner.token_scorer import TokenScorer, ValuedScorer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 1e-3}
"""Largest accepted change in a logprob, in nats. Small changes are expected, because the kernels round in a different order."""


def load_model(folder: Path, recipe: Recipe, device: torch.device) -> Any:
    """Loads the Hugging Face model in `folder` for training, with the recipe's dtype, kernels and gradient checkpointing, and without
    dropout. Raises the errors of `use_liger_kernels` if the recipe selects Liger's kernels."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    attention: str | dict[str, str] = forest.register()
    kind, dtype = AutoModelForCausalLM, _DTYPES[recipe.policy.dtype]
    if image_token(folder) is not None:
        kind, attention = AutoModelForImageTextToText, {"text_config": forest.NAME, "vision_config": "sdpa"}
    lm = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention, use_safetensors=True, trust_remote_code=False).to(device)
    _disable_dropout(lm)
    if recipe.learner.kernels == "liger":
        use_liger_kernels(lm)
    chosen = recipe.learner.gradient_checkpointing
    if chosen or (chosen is None and device.type == "cuda"):
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    return lm


def _disable_dropout(lm: Any) -> None:
    """Disables dropout: the behaviour policy samples without it, and logprobs are compared with the behaviour policy's."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0


def make_scorer(lm: Any, recipe: Recipe) -> TokenScorer:
    """Returns the module that the engine trains: the language model, plus a value head if the recipe's critic shares the model's trunk."""
    if recipe.critic is not None and recipe.critic.shared:
        return ValuedScorer(lm, detach=recipe.critic.trunk == "detached")
    return TokenScorer(lm)


def use_liger_kernels(lm: Any) -> None:
    """Replaces a Hugging Face model's layers with Liger's kernels, in place, and checks that the model's logprobs stay the same.

    Some replacements affect every model of this type in the process. Raises `UserError` if there is no GPU, if the package is missing, if
    Liger does not support the model type, or if logprobs differ by more than `TOLERANCE`.
    """
    if lm.device.type != "cuda":
        raise UserError("learner.kernels=liger needs a GPU", fix="learner.kernels=torch")
    _replace(lm)


def _replace(lm: Any) -> None:
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise UserError(f"learner.kernels=liger: {error}", fix=f"{install_command('gpu')}, or set learner.kernels=torch") from error
    if lm.config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"learner.kernels=liger: Liger has no kernels for model type {lm.config.model_type!r}", fix="learner.kernels=torch")
    before = _logprobs(lm)
    patches._apply_liger_kernel_to_instance(model=lm, cross_entropy=False, fused_linear_cross_entropy=False)  # all others are on by default
    gap = (_logprobs(lm) - before).abs().max().item()
    if not gap <= TOLERANCE[lm.dtype]:
        raise UserError(
            f"learner.kernels=liger: logprobs of this model differ by {gap:.3g} nats with Liger's kernels", fix="learner.kernels=torch"
        )


@torch.no_grad()
def _logprobs(lm: Any) -> Tensor:
    """Returns the float32 logprobs [T-1] of a fixed token sequence."""
    vocabulary = lm.config.get_text_config().vocab_size
    ids = (torch.arange(64, device=lm.device) * 7919 % vocabulary)[None]
    logprobs: Tensor = lm(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
