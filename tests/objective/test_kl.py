from __future__ import annotations

import pytest
import torch

from agentrl.objective.losses import k1, k2, k3, sequence_penalty


def _policies(seed: int = 0, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions over n outcomes, near each other: logits of pi with gradient, log-probabilities of the reference."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    reference = (logits + 0.2 * torch.randn(n, generator=g, dtype=torch.float64)).log_softmax(0)
    return logits.requires_grad_(), reference


def test_expectations_are_the_divergence() -> None:
    """Summed over all outcomes instead of sampled: k1 and k3 are KL(pi || ref) exactly, k2 nearly."""
    logits, reference = _policies()
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    for estimator, tolerance in ((k1, 1e-12), (k3, 1e-12), (k2, 0.1)):
        assert (logp.exp() * estimator(logp, reference)).sum().item() == pytest.approx(exact.item(), rel=tolerance)
    assert (k2(logp, reference) >= 0).all()
    assert (k3(logp, reference) >= 0).all()


def test_expected_gradients_as_a_loss() -> None:
    """As a loss on sampled tokens k2 descends KL(pi || ref), k1 does nothing, and k3 descends another divergence: KL(ref || pi)."""
    logits, reference = _policies()
    logp = logits.log_softmax(0)
    weight = logp.detach().exp()  # sampling: no gradient flows through it

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    reverse = gradient((logp.exp() * (logp - reference)).sum())
    forward = gradient((reference.exp() * (reference - logp)).sum())
    torch.testing.assert_close(gradient((weight * k2(logp, reference)).sum()), reverse)
    torch.testing.assert_close(gradient((weight * k1(logp, reference)).sum()), torch.zeros_like(reverse), atol=1e-15, rtol=0)
    torch.testing.assert_close(gradient((weight * k3(logp, reference)).sum()), forward)


def test_a_sequence_penalty_is_its_sum() -> None:
    behaviour, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.25])
    found = sequence_penalty(behaviour, reference, torch.tensor([2, 0, 2]), 4)
    assert found.tolist() == [-1.0, 0.0, 0.75, 0.0]
    assert sequence_penalty(*torch.zeros(2, 0), torch.zeros(0, dtype=torch.long), 2).tolist() == [0.0, 0.0]
