"""The divergence from the KL reference model, estimated from sampled tokens. d = log pi - log pi_ref, in nats.

Estimators: Schulman 2020 (joschu.net/blog/kl-approx.html). All arguments are [N], sampled tokens only.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentrl.objective.aggregate import sum_segments

Estimator = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased, of either sign. As a loss its expected gradient on pi's own tokens is zero, so it belongs in the reward."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative; its expected gradient on pi's own tokens is that of KL(pi || pi_ref)."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative, the term of GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4).

    Its expected gradient on pi's own tokens is that of the reverse divergence, KL(pi_ref || pi).
    """
    gap = reference - logprobs
    return gap.expm1() - gap  # for small gaps exp(gap) - 1 would lose all float32 digits


def kl_term(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns estimates [N] per token; the gradient flows through `logprobs` only."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, reference.detach())


def sequence_penalty(behaviour: Tensor, reference: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Returns k1 summed over each sequence, float64 [count]; `objective.kl=k1_reward` subtracts it, times its coefficient, from the score.

        s'_i = s_i - coef * sum_t (log mu(y_t) - log pi_ref(y_t))

    with mu the behaviour policy. Ouyang et al. 2022, arXiv:2203.02155; RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 4.
    `sequence` [N]: number of each token's sequence, in [0, count).
    """
    gap = k1(behaviour.double(), reference.double())
    return sum_segments(gap, sequence, count)
