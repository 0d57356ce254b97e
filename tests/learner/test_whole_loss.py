"""From samples to gradient: minibatches, ranks, micro-batches, forests, chunked logprobs and loss, against one sequence at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.config import ObjectiveConfig
from agentrl.learner.forest import register
from agentrl.learner.packing import build_micro_batch, plan_micro_batches, split_minibatches
from agentrl.learner.token_scorer import TokenScorer
from agentrl.objective.losses import loss_denominator
from agentrl.objective.policy_loss import TrainedTokens, policy_loss
from agentrl.records import Batch, Sample
from tests.learner.test_forest import CPU, _model
from tests.objective.test_policy_loss import by_hand

TEMPERATURE, LENGTH = 0.7, 13
OBJECTIVES: list[dict[str, Any]] = [
    {"entropy_coef": 0.05},
    {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05},
    {"loss": "cispo", "aggregation": "constant", "clip_low": 1.0, "clip_high": 0.3},
    {"dual_clip": 1.5, "aggregation": "sequence_mean", "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.05},
    {"off_policy": {"preset": "mask", "cap": 2}, "kl": "k2", "kl_coef": 0.1},
    {"off_policy": {"preset": "truncate_sequence"}, "loss": "gspo", "aggregation": "constant"},
]


def _samples(rng: random.Random) -> tuple[Sample, ...]:
    """Samples that share prefixes, trained tokens included; each has its own masks, logprobs and advantages."""
    samples: list[Sample] = []
    for number in range(8):
        start = rng.choice(samples).token_ids if samples and rng.random() < 0.7 else tuple(rng.randrange(5) for _ in range(4))
        tokens = (*start[: rng.randint(1, len(start))], *(rng.randrange(5) for _ in range(rng.randint(1, 7))))
        mask = (False, *(rng.random() < 0.6 for _ in tokens[2:]), True)
        values = [(-4.6 + rng.uniform(-1, 1), rng.gauss(0, 1), rng.randint(0, 3)) if on else (0.0, 0.0, -1) for on in mask]
        logprobs, advantages, versions = zip(*values, strict=True)
        samples.append(
            Sample(
                **{"episode_id": str(number), "group_index": rng.randrange(3), "token_ids": tokens, "loss_mask": mask},
                **{"logprobs": logprobs, "advantages": advantages, "versions": versions},
            )
        )
    return tuple(samples)


def _tokens(logprobs: Tensor, entropy: Tensor, objective: ObjectiveConfig, **constants: Tensor) -> TrainedTokens:
    """Proximal policy and KL reference differ from the policy by a constant, so that both computations can derive them."""
    proximal = logprobs.detach() - 0.1 if objective.off_policy.recomputes(1) else None
    return TrainedTokens(logprobs=logprobs, entropy=entropy, proximal=proximal, kl_reference=logprobs.detach() + 0.2, **constants)


def _plain(model: nn.Module, rows: tuple[Sample, ...], objective: ObjectiveConfig) -> TrainedTokens:
    """Each sequence through the model's own forward pass."""
    outputs: list[tuple[Tensor, Tensor]] = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logp = (model(input_ids=ids, use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        on = torch.tensor(row.loss_mask[1:])
        outputs.append((logp.gather(-1, ids[0, 1:, None])[on, 0], -(logp.exp() * logp).sum(-1)[on]))
    trained = [(number, position) for number, row in enumerate(rows) for position, on in enumerate(row.loss_mask) if on]
    return _tokens(
        torch.cat([logprobs for logprobs, _ in outputs]),
        torch.cat([entropy for _, entropy in outputs]),
        objective,
        behaviour=torch.tensor([rows[number].logprobs[position] for number, position in trained]).double(),  # float32, as in a micro-batch
        advantages=torch.tensor([rows[number].advantages[position] for number, position in trained]).double(),
        sequence=torch.tensor([number for number, _ in trained]),
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
def test_the_gradient_of_a_step_equals_the_formulas_over_plain_sequences(changes: dict[str, Any], seed: int) -> None:
    rng, objective = random.Random(seed), ObjectiveConfig.model_validate(changes)
    ours, plain = _model("qwen3", register()), _model("qwen3", "sdpa")
    samples = _samples(rng)
    batch = Batch(step=3, samples=samples, denominator=sum(sum(sample.loss_mask) for sample in samples), group_indices=(0, 1, 2))
    ranks = rng.choice((1, 2, 3))
    for part in split_minibatches(batch, 2):
        total, weight = 0.0, loss_denominator(part.samples, objective.aggregation, length=LENGTH)
        for rows in (rows for rank in range(ranks) for rows in plan_micro_batches(part.samples, rank=rank, ranks=ranks, max_tokens=16)):
            micro = build_micro_batch(rows, CPU)
            scorer = TokenScorer(ours, logits_at_once=rng.choice((3 * 97, 2**25)))
            logprobs, entropy = scorer(micro.input_ids, micro.layout, micro.positions, micro.targets, TEMPERATURE)
            constants = {"behaviour": micro.behaviour, "advantages": micro.advantages, "sequence": micro.sequence}
            tokens = _tokens(logprobs[micro.expand], entropy[micro.expand], objective, **constants)
            result = policy_loss(tokens, objective, denominator=weight)
            result.loss.backward()
            total += result.loss.item()
        tokens = _plain(plain, part.samples, objective)
        sizes = {"token_mean": part.denominator, "sequence_mean": len(part.samples), "constant": len(part.samples) * LENGTH}
        expected, by_logprob, by_entropy = by_hand(tokens, objective, sizes[objective.aggregation])
        assert total == pytest.approx(expected, abs=1e-12)
        assert tokens.entropy is not None
        slopes = torch.tensor(by_logprob, dtype=torch.float64), torch.tensor(by_entropy, dtype=torch.float64)
        torch.autograd.backward((tokens.logprobs, tokens.entropy), slopes)
    largest = max(parameter.grad.abs().max().item() for parameter in plain.parameters())
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() < 1e-10 * largest, name
