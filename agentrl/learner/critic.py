"""The PPO critic, which estimates the expected return from each sampled token onward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config.recipe import CriticConfig, Recipe
from agentrl.learner.causal_lm import load_model
from agentrl.learner.engine import PolicyEngine, apply_gradient, deepspeed_config, make_optimizer
from agentrl.learner.forest import ForestLayout
from agentrl.learner.images import ImageInputs, run_trunk
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.learner.token_scorer import value_head, values_of
from agentrl.objective.values import value_loss

EPS = 1e-8


class ValueScorer(nn.Module):
    """The trunk of a causal language model with one output per token."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.trunk, self.images = lm.base_model, ImageInputs.of(lm)
        self.head = value_head(lm)

    def forward(self, input_ids: Tensor, layout: ForestLayout, positions: Tensor) -> Tensor:
        """Returns float32 values [U] of the states before the tokens that `positions` [U] predict; see `TokenScorer.forward`."""
        return values_of(self.head, run_trunk(self.trunk, self.images, input_ids, layout)[positions])


class Critic:
    """A separate value model in its own DeepSpeed engine, initialized from the trunk in `folder`. Every method is a collective."""

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks) -> None:
        import deepspeed

        assert recipe.critic is not None, "the recipe has no critic"
        self.ranks = ranks
        self.config: CriticConfig = recipe.critic
        self._steps = recipe.step_limit
        self._learner = recipe.learner.model_copy(update={"lr": self.config.lr})
        self.scorer = ValueScorer(load_model(folder, recipe, ranks.device))
        own = recipe.model_copy(update={"learner": self._learner})
        parameters: list[Tensor] = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(parameters, own)
        size = sum(parameter.numel() for parameter in parameters)
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.scorer, optimizer=self.optimizer, config=deepspeed_config(own, ranks, size), dist_init_required=False
        )

    def values(self, batch: MicroBatch) -> Tensor:
        """Returns values [N] of the states before the batch's trained tokens, with gradient."""
        values: Tensor = self.deepspeed(batch.input_ids, batch.layout, batch.positions)
        return values[batch.expand]

    def learn(self, batch: MicroBatch, returns: Tensor, old: Tensor, *, denominator: float) -> Tensor:
        """Adds the gradient of a micro-batch's value loss, and returns this rank's share of the loss, a float64 scalar."""
        loss = value_loss(self.values(batch), old, returns).sum() / denominator
        self.deepspeed.backward(loss * self.ranks.size)
        return loss.detach().double()

    def step(self, number: int) -> tuple[bool, float]:
        """Applies the accumulated gradient with the learning rate of step `number`. Returns whether the gradient was applied, which
        requires a finite norm, and the global norm before clipping."""
        return apply_gradient(self.deepspeed, self.optimizer, learning_rate(self._learner, self._steps, number))


class SharedCritic:
    """A value head on the policy's trunk, inside the policy's engine (`critic.trunk=shared` or `detached`). Every method is a collective.

    The policy's optimizer steps train the head too. `learn` and `step` are for the head's warm-up, during which the trunk is frozen: the
    trunk's weights stay bitwise the same, and its optimizer state stays that of a policy that has taken no step.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        assert engine.recipe.critic is not None, "the recipe has no critic"
        self.engine = engine
        self.config: CriticConfig = engine.recipe.critic

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logprobs, entropies and values [N] of the batch's trained tokens, from one forward pass, with gradient."""
        arguments = (batch.input_ids, batch.layout, batch.positions, batch.targets, self.engine.temperature, batch.supports)
        logprobs, entropy, values = self.engine.deepspeed(*arguments)
        return logprobs[batch.expand], entropy[batch.expand], values[batch.expand]

    def values(self, batch: MicroBatch) -> Tensor:
        """Returns values [N] of the states before the batch's trained tokens, with gradient for the head only."""
        (values,) = self.engine.deepspeed(batch.input_ids, batch.layout, batch.positions, None, self.engine.temperature)
        expanded: Tensor = values[batch.expand]
        return expanded

    def learn(self, batch: MicroBatch, returns: Tensor, old: Tensor, *, denominator: float) -> Tensor:
        """Adds the gradient of a micro-batch's value loss for the head only; see `Critic.learn`."""
        loss = value_loss(self.values(batch), old, returns).sum() / denominator
        self.engine.backward(loss)
        return loss.detach().double()

    def step(self, number: int) -> tuple[bool, float]:
        """Applies only the head's accumulated gradient. Returns whether the gradient was applied, and its global norm before clipping."""
        result = self.engine.step(number, head_alone=True)
        for state in self.engine.optimizer.state.values():
            if not state["exp_avg"].any():  # it has received no gradient yet, so its bias correction must not count this step
                state["step"] = state["step"] * 0
        return result


def advantage_moments(advantages: Sequence[Tensor], ranks: Ranks) -> tuple[float, float]:
    """Returns the mean and the standard deviation plus `EPS` of the advantages of all tokens on all ranks, for whitening. A collective.

    Whitening turns equal advantages into zeros. A single non-finite advantage makes both results non-finite, so the step is skipped.
    """
    _, mean, variance = _moments(advantages, ranks)
    return mean, math.sqrt(variance) + EPS


def critic_metrics(pairs: Sequence[tuple[Tensor | None, Tensor | None]], ranks: Ranks) -> dict[str, float]:
    """Returns the mean return, the mean value and the explained variance 1 - Var(R - V) / Var(R), which is 1 for a perfect critic, and is
    set to 0 if all returns are equal. Returns an empty dict if there are no tokens. A collective."""
    known = [(returns, values) for returns, values in pairs if returns is not None and values is not None]
    count, return_mean, variance = _moments([returns for returns, _ in known], ranks)
    _, value_mean, _ = _moments([values for _, values in known], ranks)
    _, _, residual = _moments([returns - values for returns, values in known], ranks)
    if not count:
        return {}
    return {"return_mean": return_mean, "value_mean": value_mean, "explained_variance": 1.0 - residual / variance if variance > 0 else 0.0}


def _moments(tensors: Sequence[Tensor], ranks: Ranks) -> tuple[float, float, float]:
    """Returns the number, the mean and the population variance of all elements on all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    for tensor in tensors:
        values = tensor.detach().double().cpu()
        sums += torch.stack((torch.tensor(values.numel(), dtype=torch.float64), values.sum(), values.square().sum()))
    count, total, squares = ranks.sum(sums).tolist()
    if not count:
        return 0.0, 0.0, 0.0
    mean = total / count
    return count, mean, max(squares / count - mean * mean, 0.0)
