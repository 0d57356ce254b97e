from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.objective.losses import policy_loss, summarize

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "is_cap": 2.0}


def _inputs(seed: int, shape: tuple[int, int] = (6, 11), spread: float = 0.8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    proximal = behaviour + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return {
        "logprobs": (behaviour + spread * noise).requires_grad_(),
        "behaviour": behaviour,
        "proximal": proximal,
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "mask": torch.rand(shape, generator=generator) < 0.7,
    }


def _numpy_loss(x: dict[str, Any], proximal: bool, denominator: float) -> tuple[float, np.ndarray]:
    """The docstring's formula and its derivative, token by token, in plain Python."""
    p, mu, a = (x[name].detach().numpy() for name in ("logprobs", "behaviour", "advantages"))
    centre = x["proximal"].numpy() if proximal else mu
    total, gradient = 0.0, np.zeros_like(p)
    for at in zip(*np.nonzero(x["mask"].numpy()), strict=True):
        w = min(np.exp(centre[at] - mu[at]), 2.0)
        r = min(np.exp(p[at] - centre[at]), 2.0)
        clipped = min(max(r, 0.8), 1.3)
        total -= w * min(r * a[at], clipped * a[at]) / denominator
        if r * a[at] <= clipped * a[at]:
            gradient[at] = -w * r * a[at] / denominator
    return total, gradient


@pytest.mark.parametrize("with_proximal", [False, True])
def test_loss_and_gradient_against_the_closed_form(with_proximal: bool) -> None:
    x = _inputs(0, (40, 50))
    proximal = x["proximal"] if with_proximal else None
    result = policy_loss(x["logprobs"], x["behaviour"], x["advantages"], x["mask"], denominator=123, proximal=proximal, **CLIP)
    result.loss.backward()
    loss, gradient = _numpy_loss(x, with_proximal, 123)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert x["logprobs"].grad is not None
    np.testing.assert_allclose(x["logprobs"].grad.numpy(), gradient, atol=1e-14)


def test_splitting_into_micro_batches_changes_nothing() -> None:
    x = _inputs(1)
    denominator = int(x["mask"].sum())

    def loss(rows: slice) -> Any:
        return policy_loss(*(x[name][rows] for name in ("logprobs", "behaviour", "advantages", "mask")), denominator=denominator, **CLIP)

    whole = loss(slice(None))
    parts = [loss(slice(0, 1)), loss(slice(1, 5)), loss(slice(5, 6))]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), abs=1e-14)
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums)
    torch.testing.assert_close(torch.stack([part.maxima for part in parts]).amax(0), whole.maxima)


def test_masked_positions_are_inert_even_when_they_hold_nan() -> None:
    x = _inputs(2)
    clean = policy_loss(x["logprobs"], x["behaviour"], x["advantages"], x["mask"], denominator=9, **CLIP)
    dirty = {name: x[name].detach().masked_fill(~x["mask"], float("nan")) for name in ("logprobs", "behaviour", "advantages")}
    dirty["logprobs"].requires_grad_()
    again = policy_loss(dirty["logprobs"], dirty["behaviour"], dirty["advantages"], x["mask"], denominator=9, **CLIP)
    again.loss.backward()
    assert again.loss.item() == clean.loss.item()
    assert dirty["logprobs"].grad is not None
    assert torch.equal(dirty["logprobs"].grad.nonzero(), (x["mask"] & (dirty["logprobs"].grad != 0)).nonzero())
    assert torch.isfinite(dirty["logprobs"].grad).all()


def test_an_enormous_ratio_has_a_bounded_gradient() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    behaviour = torch.tensor([-2000.0, -2000.0])
    result = policy_loss(logprobs, behaviour, torch.tensor([1.0, -1.0]), torch.ones(2), denominator=1, **CLIP)
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 2.0]


def test_no_trained_token_is_zero_loss_with_a_graph() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    result = policy_loss(logprobs, logprobs.detach(), torch.ones(3), torch.zeros(3), denominator=5, **CLIP)
    result.loss.backward()
    assert (result.loss.item(), logprobs.grad.tolist()) == (0.0, [0.0, 0.0, 0.0])  # type: ignore[union-attr]
    assert summarize(result.sums, result.maxima) == {}


def test_metrics_against_numpy() -> None:
    x = _inputs(3)
    entropy = torch.rand(x["mask"].shape, dtype=torch.float64)
    result = policy_loss(x["logprobs"], x["behaviour"], x["advantages"], x["mask"], denominator=1, entropy=entropy, **CLIP)
    found = summarize(result.sums, result.maxima)
    keep = x["mask"].numpy()
    log_ratio = (x["logprobs"].detach() - x["behaviour"]).numpy()[keep]
    ratio, advantages = np.exp(log_ratio), x["advantages"].numpy()[keep]
    weight = np.minimum(ratio, 2.0)
    assert found["ratio_mean"] == pytest.approx(ratio.mean())
    assert found["ratio_max"] == pytest.approx(ratio.max())
    assert found["kl_behaviour"] == pytest.approx((ratio - 1 - log_ratio).mean())
    assert found["ess"] == pytest.approx(weight.sum() ** 2 / (weight**2).sum() / weight.size)
    assert found["mismatch_max"] == pytest.approx(np.abs(log_ratio).max())
    assert found["entropy"] == pytest.approx(entropy.numpy()[keep].mean())
    clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert found["clip_fraction"] == pytest.approx(clipped.mean())
    assert found["truncated_fraction"] == pytest.approx((ratio > 2).mean())


def test_a_batch_without_tokens_has_no_loss() -> None:
    with pytest.raises(ValueError, match="denominator"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1), denominator=0, **CLIP)


@pytest.mark.slow
@pytest.mark.parametrize("with_proximal", [False, True])
def test_the_same_as_trl(with_proximal: bool) -> None:
    """TRL's own loss code (normalized by the batch's token count), with its vLLM importance sampling correction where decoupled."""
    from trl import GRPOTrainer

    x = _inputs(4)
    centre = x["proximal"] if with_proximal else x["behaviour"]
    x["logprobs"] = (centre + 0.4 * torch.randn(6, 11, dtype=torch.float64).tanh()).requires_grad_()  # past the clip, below the cap
    entropy = torch.zeros_like(x["behaviour"])
    weight = (x["proximal"] - x["behaviour"]).exp().clamp(max=2.0)
    metrics: dict[str, Any] = {"train": _Anything()}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logprobs"], entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="bnpo",
        epsilon_low=0.2,
        epsilon_high=0.3,
        args=SimpleNamespace(delta=None),
        use_vllm=with_proximal,
        vllm_importance_sampling_correction=with_proximal,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros(6, 11, dtype=torch.long),
        "completion_mask": x["mask"].long(),
        "advantages": x["advantages"],
        "old_per_token_logps": centre,
        "importance_sampling_ratio": weight,
    }
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    (their_gradient,) = torch.autograd.grad(theirs, x["logprobs"])
    result = policy_loss(
        x["logprobs"],
        x["behaviour"],
        x["advantages"],
        x["mask"],
        denominator=int(x["mask"].sum()),
        proximal=x["proximal"] if with_proximal else None,
        **CLIP,
    )
    (our_gradient,) = torch.autograd.grad(result.loss, x["logprobs"])
    assert result.loss.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(our_gradient, their_gradient)


class _Anything(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])
