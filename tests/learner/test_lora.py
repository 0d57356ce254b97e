"""Adapters: gradients equal the plain computation, a disabled adapter leaves the base policy, a published one is the full update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from agentrl.config import LoraConfig
from agentrl.errors import UserError
from agentrl.learner import lora
from agentrl.learner.forest import register
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.learner.token_scorer import TokenScorer
from agentrl.version.adapters import merge_folder
from tests.learner.building import VOCABULARY, tiny_config, write_policy
from tests.learner.test_forest import CPU, _gap, _model, _samples

CONFIG = LoraConfig(rank=3, alpha=5.0)
SCALE = 5.0 / 3.0


def attach_adapter(model: transformers.Qwen3ForCausalLM, config: LoraConfig = CONFIG) -> dict[str, tuple[Tensor, Tensor]]:
    """Attaches a non-zero adapter; returns A and B of each weight, by the weight's name without an adapter."""
    dtype = model.dtype
    lora.attach(model, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for path, layer in lora._adapted(model):
        a, b = (getattr(layer, part)["default"].weight for part in ("lora_A", "lora_B"))
        with torch.no_grad():
            b.copy_(0.1 * torch.randn(b.shape, generator=generator, dtype=dtype))
        pairs[f"{path}.weight"] = (a, b)
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("logits_at_once", [2**25, 7 * VOCABULARY])
def test_adapter_gradients_follow_from_the_merged_weights(ranks: int, logits_at_once: int) -> None:
    """W' = W + s B A, hence dL/dA = s Bᵀ dL/dW' and dL/dB = s dL/dW' Aᵀ, with dL/dW' of a plain model, one sequence at a time.

    Two ranks are two shares of the batch, whose gradients are summed.
    """
    plain, model = _model("qwen3", "sdpa"), _model("qwen3", register())
    pairs = attach_adapter(model)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            plain.get_parameter(name).add_(SCALE * b @ a)
    scorer, samples = TokenScorer(model, logits_at_once=logits_at_once), _samples(1)
    for rank in range(ranks):
        for rows in plan_micro_batches(samples, rank=rank, ranks=ranks, max_tokens=200):
            batch = build_micro_batch(rows, CPU)
            logprobs, _ = scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 0.7)
            (logprobs[batch.expand] * batch.advantages).sum().backward()
    for row in samples:
        ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[mask, 0]
        (expected * torch.tensor([value for value, trained in zip(row.advantages, row.loss_mask, strict=True) if trained])).sum().backward()
    for name, (a, b) in pairs.items():
        slope = plain.get_parameter(name).grad
        assert _gap(a.grad, SCALE * b.T @ slope) < 1e-10, name
        assert _gap(b.grad, SCALE * slope @ a.T) < 1e-10, name
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in model.named_parameters() if ".lora_" in name
    }


@pytest.mark.slow
def test_a_disabled_adapter_leaves_the_base_policy() -> None:
    base, model = _model("qwen3", register()), _model("qwen3", register())
    attach_adapter(model)
    batch = build_micro_batch(tuple(_samples(2)), CPU)
    inputs = (batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
    before, _ = TokenScorer(model)(*inputs)
    with torch.no_grad(), lora.disabled(model):
        disabled, _ = TokenScorer(model)(*inputs)
        assert torch.equal(disabled, TokenScorer(base)(*inputs)[0])
    after, _ = TokenScorer(model)(*inputs)
    assert torch.equal(after, before)
    assert not torch.equal(after, disabled)
    after.sum().backward()
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    assert adapters and all(parameter.grad is not None for parameter in adapters)


@pytest.mark.slow
def test_peft_and_the_merge_read_a_published_adapter_alike(tmp_path: Path) -> None:
    from peft import PeftModel

    base, version, merged = (tmp_path / name for name in ("base", "version", "merged"))
    write_policy(base, tiny_config())
    model = transformers.Qwen3ForCausalLM.from_pretrained(base)
    config = LoraConfig(rank=3, alpha=5.0)
    pairs = attach_adapter(model, config)
    assert len(pairs) == 2 * 7
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    for folder in (version, merged):
        folder.mkdir()
        lora.save(folder, trained, config, base="base")
    assert (version / "adapter_config.json").read_bytes() == (merged / "adapter_config.json").read_bytes()
    merge_folder(base, version, merged / "model.safetensors")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (merged / name).unlink()
    (merged / "config.json").write_bytes((base / "config.json").read_bytes())

    ids = torch.arange(40)[None] % VOCABULARY
    with torch.no_grad():
        expected = model(ids).logits
        assert (transformers.Qwen3ForCausalLM.from_pretrained(merged)(ids).logits - expected).abs().max() < 1e-5
        peft = PeftModel.from_pretrained(transformers.Qwen3ForCausalLM.from_pretrained(base), version)
        assert torch.equal(peft(ids).logits, expected)
        assert (transformers.Qwen3ForCausalLM.from_pretrained(base)(ids).logits - expected).abs().max() > 1e-2
    adapter_config = json.loads((version / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["inference_mode"]) == (3, 5.0, True)
    assert adapter_config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.slow
def test_a_layer_that_cannot_be_merged_raises() -> None:
    pytest.importorskip("peft")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32))
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.c_attn of this model is not a plain linear layer"):
        lora.attach(model, CONFIG, seed=0)


def test_the_seed_determines_the_adapter_and_keeps_the_random_state() -> None:
    pytest.importorskip("peft")
    adapters = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(tiny_config())
        expected = torch.get_rng_state()
        lora.attach(model, CONFIG, seed=seed)
        assert torch.equal(torch.get_rng_state(), expected)
        adapters.append(torch.cat([parameter.flatten() for name, parameter in model.named_parameters() if ".lora_A" in name]))
    assert torch.equal(adapters[0], adapters[1])
    assert not torch.equal(adapters[0], adapters[2])
