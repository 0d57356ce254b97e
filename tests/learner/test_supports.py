"""Tokens drawn from a truncated distribution are scored over the support that they were drawn from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentrl.errors import LearnerError
from agentrl.learner.packing import build_micro_batch, check_vocabulary
from agentrl.learner.token_scorer import LogprobHead
from agentrl.records import Sample
from agentrl.records.sampling import Supports
from tests.strategies import examples

CPU = torch.device("cpu")
VOCABULARY, WIDTH, WIDEST = 23, 6, 5


def drawn(rows: int, seed: int, *, full: bool) -> tuple[Tensor, Tensor]:
    """Targets [N], and supports [N, K] around them, some of them the full vocabulary."""
    rng = random.Random(seed)
    table = []
    for number in range(rows):
        ids = rng.sample(range(VOCABULARY), 1 if number == 0 else rng.randint(1, WIDEST))
        table.append((rng.choice(ids), [] if full and rng.random() < 0.4 else ids))
    supports = torch.tensor([[*ids, *[-1] * (WIDEST - len(ids))] for _, ids in table])
    return torch.tensor([target for target, _ in table]), supports


def reference(hidden: Tensor, linear: nn.Linear, targets: Tensor, supports: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, a row at a time: log-softmax of the logits of the support."""
    logprobs, entropies = [], []
    for row, target, support in zip(hidden, targets.tolist(), supports.tolist(), strict=True):
        ids = [token for token in support if token >= 0] or list(range(VOCABULARY))
        logp = (linear(row)[ids] / temperature).log_softmax(-1)
        logprobs.append(logp[ids.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@settings(max_examples=examples(40))
@given(st.integers(1, 12), st.integers(0, 99), st.booleans(), st.booleans(), st.sampled_from([0.3, 1.0]), st.sampled_from([1, 40, 10**6]))
def test_the_softmax_and_its_gradient_are_over_the_support(
    rows: int, seed: int, full: bool, bias: bool, temperature: float, logits_at_once: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=bias).double()
    targets, supports = drawn(rows, seed, full=full)
    hidden = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, rows, dtype=torch.float64)
    results = []
    for score in (lambda states, ids, over: LogprobHead(linear, logits_at_once)(states, ids, temperature, over), None):
        hidden.grad = None
        linear.zero_grad()
        pair = score(hidden, targets, supports) if score else reference(hidden, linear, targets, supports, temperature)
        sum((part * weight).sum() for part, weight in zip(pair, weights, strict=True)).backward()
        results.append([*pair, hidden.grad, *(parameter.grad for parameter in linear.parameters())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("logits_at_once", [1, 10**6])
def test_autograd_agrees_with_finite_differences(logits_at_once: int) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(WIDTH, VOCABULARY).double()
    targets, supports = drawn(6, 1, full=True)
    head = LogprobHead(linear, logits_at_once)

    def score(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(head, {"weight": weight, "bias": bias}, (hidden, targets, 0.7, supports))

    inputs = (torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True), linear.weight, linear.bias)
    assert torch.autograd.gradcheck(score, inputs)


def test_a_support_of_the_full_vocabulary_equals_no_support() -> None:
    torch.manual_seed(2)
    linear = nn.Linear(WIDTH, VOCABULARY)
    head, hidden, targets = LogprobHead(linear, 10**6), torch.randn(4, WIDTH), torch.arange(4)
    for plain, over in zip(head(hidden, targets, 0.5), head(hidden, targets, 0.5, torch.arange(VOCABULARY).repeat(4, 1)), strict=True):
        torch.testing.assert_close(over, plain)


def test_chunks_of_a_bfloat16_head_give_the_gradients_of_one_chunk() -> None:
    linear = nn.Linear(WIDTH, VOCABULARY).to(torch.bfloat16)
    targets, supports = drawn(40, 3, full=False)
    gradients = []
    for logits_at_once in (10**6, 60):
        hidden = torch.randn(40, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        linear.zero_grad()
        logprobs, entropy = LogprobHead(linear, logits_at_once)(hidden, targets, 0.7, supports)
        (logprobs.sum() - entropy.sum()).backward()
        gradients.append([hidden.grad, linear.weight.grad, linear.bias.grad])
    for single, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, single, rtol=0.02, atol=0.03)


def sample(name: str, ids: tuple[int, ...], supports: list[tuple[int, ...]] | None) -> Sample:
    mask = (False, *(True for _ in ids[1:]))
    return Sample(
        episode_id=name,
        group_index=0,
        token_ids=ids,
        loss_mask=mask,
        logprobs=(0.0,) * len(ids),
        versions=tuple(0 if trained else -1 for trained in mask),
        advantages=(0.0,) * len(ids),
        supports=None if supports is None else Supports.from_rows([(), *supports]),
    )


def test_samples_share_a_prediction_only_with_its_support() -> None:
    """Samples with equal tokens share them in the forest; their supports may differ, for instance by version."""
    rows = (
        sample("a", (1, 2, 3), [(2, 5), (3,)]),
        sample("b", (1, 2, 3), [(5, 2), (3, 4)]),
        sample("c", (1, 2, 6), None),
    )
    batch = build_micro_batch(rows, CPU)
    assert batch.input_ids.shape[1] == 4
    assert batch.supports is not None
    predictions = [(int(batch.targets[at]), [token for token in batch.supports[at].tolist() if token >= 0]) for at in batch.expand.tolist()]
    assert predictions == [(2, [2, 5]), (3, [3]), (2, [2, 5]), (3, [3, 4]), (2, []), (6, [])]
    assert len(batch.targets) == 5  # the first token of "a" and "b" is one prediction
    assert build_micro_batch((rows[2],), CPU).supports is None


def test_a_support_outside_the_vocabulary_stops_the_learner() -> None:
    invalid = sample("a", (1, 2, 3), [(2, 5), (3, 500)])
    with pytest.raises(LearnerError, match="contains token 500, but the policy's vocabulary has 97"):
        check_vocabulary([invalid], 97)
    check_vocabulary([replace(invalid, supports=None)], 97)
