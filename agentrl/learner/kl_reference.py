"""The KL reference model: the run's initial weights, frozen."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from agentrl.config.recipe import Recipe
from agentrl.learner import lora
from agentrl.learner.engine import PolicyEngine, load_model, score_tokens
from agentrl.learner.packing import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.learner.token_scorer import TokenScorer


class ReferencePolicy:
    """Version 0, unsharded on every rank, without optimizer. Needs the memory of the weights; a collective only in teams.

    Args:
        folder: Hugging Face folder of version 0.
        recipe: `policy.dtype` and `rollout.temperature` are used.
    """

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks) -> None:
        self._temperature = recipe.rollout.temperature
        self._scorer = TokenScorer(load_model(folder, recipe, ranks.device)).eval().requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Returns logprobs [N] of the batch's trained tokens at the sampling temperature, over their supports."""
        return score_tokens(self._scorer, batch, self._temperature)[0]


class PolicyWithoutAdapter:
    """Version 0 if adapters are trained: the policy's base weights, without extra memory. A collective under ZeRO-3."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Returns what `ReferencePolicy.logprobs` does."""
        with lora.disabled(self._engine.lm):
            return self._engine.logprobs(batch)[0]


def kl_reference_for(engine: PolicyEngine) -> ReferencePolicy | PolicyWithoutAdapter:
    """Returns the KL reference model of an engine's policy."""
    if engine.recipe.learner.lora is not None:
        return PolicyWithoutAdapter(engine)
    return ReferencePolicy(engine.folder, engine.recipe, engine.ranks)
