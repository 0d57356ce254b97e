"""Logprobs and entropies of chosen tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from agentrl.errors import UserError

LOGITS_AT_ONCE = 2**27  # float32 logits alive at a time: 512 MiB, and a few times that in the backward pass


class TokenScorer(nn.Module):
    """A causal language model that answers logprobs of chosen tokens instead of logits of all.

    Only the positions that are asked for go through the output head, in chunks; with more than one chunk the logits are computed
    again in the backward pass. This module, not the model, is what DeepSpeed wraps: the head's weight is a parameter of the
    module that uses it, so ZeRO-3 gathers it there once, however many chunks each rank needs.
    """

    def __init__(self, lm: Any, *, logits_at_once: int = LOGITS_AT_ONCE, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.head = LogprobHead(lm.get_output_embeddings(), logits_at_once, entropy_gradient)

    def forward(self, input_ids: Tensor, positions: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Float32 logprobs [N] and entropies [N, with a gradient if `entropy_gradient`] in nats of the softmax of logits / temperature.

        Args:
            input_ids: [B, T], padded on the right.
            positions: [N] index into the flattened [B * T] of the token that predicts.
            targets: [N] ids of the predicted tokens.
        """
        hidden = self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        logprobs, entropy = self.head(hidden.flatten(0, 1)[positions], targets, temperature)
        return logprobs, entropy


class LogprobHead(nn.Module):
    """The output head followed by log-softmax, chunked. Shares its parameters with the model it was taken from."""

    def __init__(self, linear: nn.Linear, logits_at_once: int, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.entropy_gradient = entropy_gradient
        self.weight = linear.weight
        self.bias = linear.bias
        self.rows = max(1, logits_at_once // linear.weight.shape[0])

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if len(hidden) <= self.rows:
            return self._score(hidden, targets, temperature)
        logprobs, entropies = [], []
        for part, wanted in zip(torch.split(hidden, self.rows), torch.split(targets, self.rows), strict=True):
            scored = checkpoint(self._score, part, wanted, temperature, use_reentrant=False)
            logprobs.append(scored[0])
            entropies.append(scored[1])
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, self.weight, self.bias).float()
        if temperature != 1.0:
            logits = logits / temperature
        logp = logits.log_softmax(-1)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def check_head(scorer: TokenScorer, *, tolerance: float) -> None:
    """Proves once that the scorer and the model's own forward pass agree, whatever the architecture does to its logits.

    Raises `UserError` for a model whose logits are not simply its output embedding times the last hidden state.
    """
    config = scorer.lm.config
    device = scorer.head.weight.device
    ids = torch.arange(16, device=device)[None] % config.get_text_config().vocab_size
    with torch.no_grad():
        reference = scorer.lm(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        targets = ids[0, 1:]
        found, _ = scorer(ids, torch.arange(15, device=device), targets, 1.0)
    gap = (found - reference.gather(-1, targets[:, None]).squeeze(-1)).abs().max().item()
    if not gap <= tolerance:
        raise UserError(
            f"model type {config.model_type!r} changes its logits after the output head (logprobs differ by {gap:.3g})",
            fix="use a model without logit scaling or soft-capping, such as Qwen3 or Llama",
        )
