"""Losses and weights against TRL's own code: `GRPOTrainer._compute_loss`, and its source for the importance sampling correction."""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config import ObjectiveConfig
from agentrl.config.objective import Correction
from agentrl.objective.losses import Segments, importance_weights
from agentrl.objective.policy_loss import TrainedTokens, policy_loss

pytestmark = pytest.mark.slow

LENGTH = 32  # max_completion_length
# agentrl's settings, and the settings of GRPOTrainer that mean the same
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DAPO": ({}, {"loss_type": "bnpo"}),
    "GRPO": ({"aggregation": "sequence_mean", "kl": "k3", "kl_coef": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    "Dr. GRPO": ({"aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"dual_clip": 1.4}, {"loss_type": "bnpo", "delta": 1.4}),
    "GSPO": (
        {
            "loss": "gspo",
            "aggregation": "sequence_mean",
            "clip_low": 0.05,
            "clip_high": 0.06,
            "off_policy": {"preset": "truncate_sequence"},
        },
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    "CISPO": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "entropy bonus": ({"entropy_coef": 0.02}, {"loss_type": "bnpo", "entropy_coef": 0.02}),
}


class _Anything(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def _inputs(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (6, 11)
    behaviour = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    proximal = behaviour + 0.3 * torch.randn(shape, generator=g, dtype=torch.float64)
    mask = torch.rand(shape, generator=g) < 0.7
    mask[:, 0] = True
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        # beyond the clip, below agentrl's cap, which TRL does not have
        "logprobs": (proximal + 0.5 * torch.randn(shape, generator=g, dtype=torch.float64).tanh()).requires_grad_(),
        "reference": behaviour + 0.2 * torch.randn(shape, generator=g, dtype=torch.float64),
        "entropy": torch.rand(shape, generator=g, dtype=torch.float64).requires_grad_(),
        "advantages": torch.randn(6, generator=g, dtype=torch.float64),
        "mask": mask,
    }


def _trl(x: dict[str, Tensor], weight: Tensor, changes: dict[str, Any]) -> Tensor:
    from trl import GRPOTrainer

    options = {"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.3, "entropy_coef": 0.0} | changes
    delta = options.pop("delta", None)
    trainer = SimpleNamespace(
        **options,
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logprobs"], x["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False),
        max_completion_length=LENGTH,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda t: t, reduce=lambda t, reduction: t),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=options["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        _metrics={"train": _Anything()},
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros(6, 11, dtype=torch.long),
        "completion_mask": x["mask"].long(),
        "advantages": x["advantages"],
        "old_per_token_logps": x["proximal"],
        "ref_per_token_logps": x["reference"],
        "importance_sampling_ratio": weight,
        "num_items_in_batch": x["mask"].sum(),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def _tokens(x: dict[str, Tensor]) -> TrainedTokens:
    keep = x["mask"]
    rows = torch.arange(6)[:, None].expand(6, 11)
    return TrainedTokens(
        logprobs=x["logprobs"][keep],
        behaviour=x["behaviour"][keep],
        advantages=x["advantages"][:, None].expand(6, 11)[keep],
        sequence=rows[keep],
        proximal=x["proximal"][keep],
        kl_reference=x["reference"][keep],
        entropy=x["entropy"][keep],
    )


@pytest.mark.parametrize("name", PAIRS)
def test_losses_and_gradients_equal_trls(name: str) -> None:
    ours, theirs = PAIRS[name]
    objective = ObjectiveConfig.model_validate({"clip_low": 0.2, "clip_high": 0.3, **ours})
    x = _inputs(4)
    lag = (x["proximal"] - x["behaviour"]).masked_fill(~x["mask"], 0.0)
    weight = (lag if objective.off_policy.correction.level == "token" else lag.sum(-1, keepdim=True)).exp().clamp(max=2.0)
    expected = _trl(x, weight, theirs)
    sizes = {"token_mean": int(x["mask"].sum()), "sequence_mean": 6, "constant": 6 * LENGTH}
    actual = policy_loss(_tokens(x), objective, denominator=sizes[objective.aggregation]).loss
    assert actual.item() == pytest.approx(expected.item(), abs=1e-12)
    sources = (x["logprobs"], x["entropy"])
    for mine, other in zip(*(torch.autograd.grad(loss, sources, materialize_grads=True) for loss in (actual, expected)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_equal_trls(mode: str) -> None:
    """Runs the unchanged source lines of TRL that compute the weights."""
    from trl.trainer import grpo_trainer

    x = _inputs(5)
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    first = source.rindex("\n", 0, source.index("per_token_logps_diff = (old")) + 1
    body = source[first : source.index("# Compute the per-token log probabilities for the reference")]
    lowest = 0.6 if mode.endswith("mask") else None
    owner = SimpleNamespace(
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=lowest, vllm_importance_sampling_clip_max=1.4
    )
    inputs = {"self": owner, "old_per_token_logps": x["proximal"], "sampling_per_token_logps": x["behaviour"], "mask": x["mask"]}
    exec(textwrap.dedent(body.rstrip() + "\n"), vars(grpo_trainer) | inputs, namespace := {})
    expected = namespace["vllm_importance_sampling_ratio"].expand(6, 11)[x["mask"]]
    tokens = _tokens(x)
    assert tokens.proximal is not None
    level, _, weights = mode.partition("_")
    correction = Correction(True, weights, level, lowest or 0.0, 1.4)  # type: ignore[arg-type]
    actual, _ = importance_weights(tokens.proximal - tokens.behaviour, Segments.of(tokens.sequence), correction)
    torch.testing.assert_close(actual, expected)
