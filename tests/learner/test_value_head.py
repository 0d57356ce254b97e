"""Policy and critic on one trunk: loss and gradient equal the plain computation, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import pytest
import torch
from torch import Tensor, nn

from agentrl.config import CriticConfig, ObjectiveConfig, OffPolicyConfig
from agentrl.learner.forest import register
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.learner.token_scorer import ValuedScorer
from agentrl.objective.policy_loss import TrainedTokens, policy_loss
from agentrl.objective.values import VALUE_WEIGHT, value_loss
from agentrl.records import Sample
from tests.learner.building import estimate
from tests.learner.test_forest import CPU, _gap, _model, _samples

OBJECTIVE = ObjectiveConfig(advantage="gae", clip_low=0.2, clip_high=0.2, off_policy=OffPolicyConfig(preset="none"))
CRITIC = CriticConfig(trunk="shared", gamma=0.97, lam=0.9)


def _scorer(*, detach: bool = False) -> ValuedScorer:
    scorer = ValuedScorer(_model("qwen3", register()), detach=detach)
    assert not scorer.value.weight.any() and not scorer.value.bias.any()
    torch.manual_seed(1)
    nn.init.normal_(scorer.value.weight)
    nn.init.normal_(scorer.value.bias)
    return scorer


def _plain(model: nn.Module, head: nn.Linear, row: Sample) -> tuple[Tensor, Tensor]:
    """Logprobs and values [N] of one sequence's trained tokens, from the model's own forward pass."""
    ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logprobs = output.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[mask], head(output.hidden_states[-1][0, :-1])[mask, 0]


def _by_hand(rewards: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """GAE from its definition, a double sum: advantages and returns."""
    n, gamma, lam = len(values), CRITIC.gamma, CRITIC.lam
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [10_000, 120])
def test_one_forward_pass_gives_the_loss_and_gradient_of_the_plain_computation(budget: int) -> None:
    scorer, samples = _scorer(), [replace(sample, advantages=(), rewards=sample.advantages) for sample in _samples(1)]
    plain, head = _model("qwen3", "sdpa"), nn.Linear(32, 1).double()
    head.load_state_dict(scorer.value.state_dict())
    trained = sum(sum(sample.loss_mask) for sample in samples)
    actual_total, expected_total = 0.0, 0.0
    for rows in plan_micro_batches(samples, rank=0, ranks=1, max_tokens=budget):
        batch = build_micro_batch(rows, CPU)
        logprobs, _, values = scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
        logprobs, values = logprobs[batch.expand], values[batch.expand]
        old = values.detach() + torch.linspace(-0.5, 0.5, len(values), dtype=torch.float64)  # so that the value clip binds for some tokens
        advantages, returns = estimate(rows, old, CRITIC)
        behaviour = logprobs.detach() + torch.linspace(-0.4, 0.4, len(values), dtype=torch.float64)
        tokens = TrainedTokens(logprobs=logprobs, behaviour=behaviour, advantages=advantages, sequence=batch.sequence)
        critic_loss = value_loss(values, old, returns).sum() / trained
        loss = policy_loss(tokens, OBJECTIVE, denominator=trained).loss + VALUE_WEIGHT * critic_loss
        loss.backward()
        actual_total += loss.item()

        start, total = 0, torch.zeros((), dtype=torch.float64)
        for row in rows:
            logprob, value = _plain(plain, head, row)
            span = slice(start, start + len(logprob))
            start += len(logprob)
            rewards = list(compress(row.rewards, row.loss_mask))
            advantage, target = (torch.tensor(column, dtype=torch.float64) for column in _by_hand(rewards, old[span].tolist()))
            ratio = (logprob - behaviour[span]).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / trained
            clipped_value = old[span] + (value - old[span]).clamp(-0.2, 0.2)
            total = total + 0.1 * 0.5 * torch.maximum((value - target) ** 2, (clipped_value - target) ** 2).sum() / trained
        total.backward()
        expected_total += total.item()
    assert actual_total == pytest.approx(expected_total, rel=1e-12)
    for (name, ours), theirs in zip(scorer.lm.named_parameters(), plain.parameters(), strict=True):
        assert _gap(ours.grad, theirs.grad) < 1e-10, name
    for ours, theirs in zip(scorer.value.parameters(), head.parameters(), strict=True):
        assert _gap(ours.grad, theirs.grad) < 1e-10


@pytest.mark.parametrize("mode", ["detach", "warm-up"])
def test_a_detached_gradient_reaches_only_the_head(mode: str) -> None:
    scorer = _scorer(detach=mode == "detach")
    batch = build_micro_batch(tuple(_samples(2)), CPU)
    targets = batch.targets if mode == "detach" else None
    values = scorer(batch.input_ids, batch.layout, batch.positions, targets, 1.0)[-1]
    attached = _scorer()
    attached_values = attached(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)[-1]
    assert torch.equal(values, attached_values)
    values.square().sum().backward()
    attached_values.square().sum().backward()
    assert torch.equal(scorer.value.weight.grad, attached.value.weight.grad)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in scorer.lm.parameters())
    assert any(parameter.grad.any() for parameter in attached.lm.parameters())


def test_the_value_head_is_not_part_of_the_model() -> None:
    """Only the model's own parameters are published and sent to a server."""
    scorer = _scorer()
    assert {id(p) for p in scorer.value.parameters()}.isdisjoint(id(p) for p in scorer.lm.parameters())
    assert not any("value" in name and "proj" not in name for name in scorer.lm.state_dict())
