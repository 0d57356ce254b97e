"""The arguments passed to Liger and the errors raised. Liger's kernels need a GPU, so a fake package replaces them here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from agentrl.errors import UserError
from agentrl.learner import causal_lm
from tests.learner.building import tiny_config


def install_fake_liger(monkeypatch, wrong_by: float, supported: str = "qwen3") -> list[dict[str, Any]]:
    """Replaces Liger by a package whose norms are wrong by a factor; returns the calls that it gets."""
    calls: list[dict[str, Any]] = []

    def apply_kernels(model: Any, **options: Any) -> None:
        calls.append(options)
        norm = model.base_model.norm
        original = norm.forward
        norm.forward = lambda states: original(states) * (1.0 + wrong_by)

    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.__dict__.update(MODEL_TYPE_TO_APPLY_LIGER_FN={supported: apply_kernels}, _apply_liger_kernel_to_instance=apply_kernels)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    return calls


@pytest.fixture
def lm():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(tiny_config())


def test_matching_kernels_are_used_and_the_output_head_stays(lm, monkeypatch):
    calls = install_fake_liger(monkeypatch, wrong_by=1e-6)
    before = lm.forward.__func__
    causal_lm._replace(lm)
    assert calls == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert lm.forward.__func__ is before


@pytest.mark.parametrize("wrong_by", [0.5, float("nan")])
def test_differing_kernels_raise(lm, monkeypatch, wrong_by):
    install_fake_liger(monkeypatch, wrong_by)
    with pytest.raises(UserError, match=r"logprobs of this model differ by(.|\n)*fix: learner\.kernels=torch"):
        causal_lm._replace(lm)


def test_a_model_type_without_kernels_raises(lm, monkeypatch):
    install_fake_liger(monkeypatch, wrong_by=0.0, supported="llama")
    with pytest.raises(UserError, match="no kernels for model type 'qwen3'"):
        causal_lm._replace(lm)


def test_a_missing_package_or_gpu_raises(lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"liger_kernel(.|\n)*fix: pip install"):
        causal_lm._replace(lm)
    with pytest.raises(UserError, match=r"needs a GPU"):
        causal_lm.use_liger_kernels(lm)
