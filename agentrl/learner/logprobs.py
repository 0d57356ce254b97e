"""Logprobs and entropies of chosen tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl.errors import UserError
from agentrl.learner.forest import lay_out
from agentrl.learner.forest_attention import ForestLayout

LOGITS_AT_ONCE = 2**25  # float32 logits alive at a time: 128 MiB, and a few times that in the backward pass


class TokenScorer(nn.Module):
    """A causal language model that returns logprobs of chosen tokens instead of logits of all.

    Only the requested positions go through the output head, in chunks; with more than one chunk the logits are not kept but
    recomputed in the backward pass. DeepSpeed wraps this module, not the model: the head's weight is a parameter of the module
    that uses it, so ZeRO-3 gathers it once, however many chunks each rank needs.
    """

    def __init__(self, lm: Any, *, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.lm = lm
        self.head = LogprobHead(lm.get_output_embeddings(), logits_at_once)

    def forward(
        self, input_ids: Tensor, layout: ForestLayout, positions: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] and entropies [N] in nats of the softmax of logits / temperature; float32, or float64 as the model.

        Args:
            input_ids: [1, T] tokens of a forest of sequences.
            layout: which token continues which.
            positions: [N] index into [T] of the predicting token.
            targets: [N] ids of the predicted tokens.
        """
        logprobs, entropy = self.head(self.hidden(input_ids, layout, positions), targets, temperature)
        return logprobs, entropy

    def hidden(self, input_ids: Tensor, layout: ForestLayout, positions: Tensor, *, frozen: bool = False) -> Tensor:
        """The trunk's last hidden states [N, H] at `positions`; without gradient when `frozen`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            output = self.lm.base_model(input_ids=input_ids, position_ids=layout.positions[None], forest=layout, use_cache=False)
        states: Tensor = output.last_hidden_state[0, positions]
        return states


class LogprobHead(nn.Module):
    """The output head followed by log-softmax, chunked. Shares its parameters with the model."""

    def __init__(self, linear: nn.Linear, logits_at_once: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.rows = max(1, logits_at_once // linear.weight.shape[0])

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of `targets` and entropies [N], both with gradient."""
        if len(hidden) > self.rows:
            logprobs, entropy = _Chunked.apply(hidden, self.weight, self.bias, targets, temperature, self.rows)  # type: ignore[no-untyped-call]
            return logprobs, entropy
        logp = _log_softmax(hidden, self.weight, self.bias, temperature)
        return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


class _Chunked(torch.autograd.Function):
    """Some rows at a time, forward and backward: at most a few times `rows` x vocabulary floats are alive at once.

    With z the logits over temperature, p = softmax(z) and H its entropy,

        d logprob / d z_j = [j = target] - p_j        d H / d z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for part, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logp = _log_softmax(part, weight, bias, temperature)
            logprobs.append(logp.gather(-1, wanted[:, None]).squeeze(-1))
            entropies.append(-(logp.exp().mul_(logp)).sum(-1))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, targets, entropy)
        ctx.weight, ctx.bias = weight, bias  # not saved by autograd: ZeRO-3 frees a parameter's memory and gathers it again
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, entropy = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        to_hidden = torch.empty_like(hidden)
        to_weight, to_bias = (  # with adapters the head is not trained; skipping its gradient saves a third of the work
            torch.zeros(one.shape, dtype=gradients[0].dtype, device=one.device) if one is not None and wanted else None
            for one, wanted in ((weight, ctx.needs_input_grad[1]), (bias, ctx.needs_input_grad[2]))
        )
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            logp = _log_softmax(hidden[at], weight, bias, ctx.temperature)
            to_logprob, to_entropy = (gradient[at, None] for gradient in gradients)
            slope = logp.exp()
            logp.add_(entropy[at, None]).mul_(to_entropy).add_(to_logprob)
            slope.mul_(logp).neg_().scatter_add_(1, targets[at, None], to_logprob).div_(ctx.temperature)
            if to_bias is not None:
                to_bias.add_(slope.sum(0))
            slope = slope.to(weight.dtype)  # products in the model's dtype, as everywhere else in it
            if to_weight is not None and weight.dtype == to_weight.dtype:
                to_weight.addmm_(slope.T, hidden[at])
            elif to_weight is not None:  # only the sum over chunks in float32
                to_weight.add_(slope.T @ hidden[at])
            to_hidden[at] = slope @ weight
        to_weight, to_bias = (None if total is None else total.to(weight.dtype) for total in (to_weight, to_bias))
        return to_hidden, to_weight, to_bias, None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[N, V] in float32, or float64 for a float64 model."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def check_scorer(scorer: TokenScorer, *, tolerance: float) -> None:
    """Checks once that the scorer agrees with the model's own forward pass over plain sequences, whatever the architecture.

    Raises `UserError` for a model whose logits are not simply its output embedding times the last hidden state, or whose layers
    mix tokens other than by attention (the samples of a batch are laid out without padding, shared prefixes once).
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
            logprobs, *_ = scorer(torch.from_numpy(forest.token_ids)[None].to(device), layout, at[:-1], targets, 1.0)
            gap = max(gap, (logprobs - reference.gather(-1, targets[:, None]).squeeze(-1)).abs().max().item())
    if not gap <= tolerance:
        raise UserError(
            f"model type {config.model_type!r} does more than attention and a plain output head (logprobs differ by {gap:.3g})",
            fix="use a model without recurrent layers, logit scaling or soft-capping, such as Qwen3 or Llama",
        )
