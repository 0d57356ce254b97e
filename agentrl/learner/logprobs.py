"""Logprobs and entropies of chosen tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from agentrl.errors import UserError
from agentrl.learner.forest import lay_out
from agentrl.learner.forest_attention import ForestLayout

LOGITS_AT_ONCE = 2**25  # float32 logits alive at a time: 128 MiB, and a few times that in the backward pass


class TokenScorer(nn.Module):
    """A causal language model that answers logprobs of chosen tokens instead of logits of all.

    Only the positions that are asked for go through the output head, in chunks; with more than one chunk the logits are computed
    again in the backward pass. This module, not the model, is what DeepSpeed wraps: the head's weight is a parameter of the
    module that uses it, so ZeRO-3 gathers it there once, however many chunks each rank needs.
    """

    def __init__(self, lm: Any, *, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.lm = lm
        self.head = LogprobHead(lm.get_output_embeddings(), logits_at_once)

    def forward(
        self, input_ids: Tensor, layout: ForestLayout, positions: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] and entropies [N, no gradient] in nats of the softmax of logits / temperature; float32, or float64 as the model.

        Args:
            input_ids: [1, T] tokens of a forest of sequences.
            layout: which of them continues which.
            positions: [N] index into [T] of the token that predicts.
            targets: [N] ids of the predicted tokens.
        """
        output = self.lm.base_model(input_ids=input_ids, position_ids=layout.positions[None], forest=layout, use_cache=False)
        logprobs, entropy = self.head(output.last_hidden_state[0, positions], targets, temperature)
        return logprobs, entropy


class LogprobHead(nn.Module):
    """The output head followed by log-softmax, chunked. Shares its parameters with the model it was taken from."""

    def __init__(self, linear: nn.Linear, logits_at_once: int) -> None:
        super().__init__()
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
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        logp = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def check_scorer(scorer: TokenScorer, *, tolerance: float) -> None:
    """Proves once that the scorer agrees with the model's own forward pass over the plain sequences, whatever the architecture does.

    Raises `UserError` for a model whose logits are not simply its output embedding times the last hidden state, or whose layers
    mix tokens in another way than attention (the samples of a batch are laid out without padding, shared prefixes once).
    """
    config = scorer.lm.config
    device = scorer.head.weight.device
    vocabulary = config.get_text_config().vocab_size
    rows = [tuple(token % vocabulary for token in row) for row in (range(16), (*range(9), *range(30, 40)), range(50, 61))]
    forest = lay_out(rows)
    layout, gap = ForestLayout(forest, device), 0.0
    with torch.no_grad():
        for row, path in zip(rows, forest.paths, strict=True):
            ids, at = torch.tensor([row], device=device), torch.from_numpy(path).to(device)
            reference = scorer.lm(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
            targets = ids[0, 1:]
            found, _ = scorer(torch.from_numpy(forest.token_ids)[None].to(device), layout, at[:-1], targets, 1.0)
            gap = max(gap, (found - reference.gather(-1, targets[:, None]).squeeze(-1)).abs().max().item())
    if not gap <= tolerance:
        raise UserError(
            f"model type {config.model_type!r} does more than attention and a plain output head (logprobs differ by {gap:.3g})",
            fix="use a model without recurrent layers, logit scaling or soft-capping, such as Qwen3 or Llama",
        )
