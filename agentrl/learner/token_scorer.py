"""Logprobs and entropies of chosen tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl.errors import UserError
from agentrl.learner.forest import build_forest
from agentrl.learner.forest_attention import ForestLayout
from agentrl.records.sampling import MAX_SUPPORT

LOGITS_AT_ONCE = 2**25  # float32 logits alive at a time: 128 MiB, and a few times that in the backward pass

LIKELIEST = MAX_SUPPORT + 8
"""How many of the likeliest tokens are told of a distribution: any support, and some that a rounding may exchange with its last."""


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
        self,
        input_ids: Tensor,
        layout: ForestLayout,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        supports: Tensor | None = None,
        ahead: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Logprobs [N] and entropies [N] in nats of the softmax of logits / temperature; float32, or float64 as the model.

        Args:
            input_ids: [1, T] tokens of a forest of sequences.
            layout: which token continues which.
            positions: [N] index into [T] of the predicting token.
            targets: [N] ids of the predicted tokens.
            supports: [N, K] the tokens that each softmax is over; see `LogprobHead.forward`.
            ahead: also returns the logprobs [1, M] and ids [1, M] of the likeliest tokens after the last of `positions`, at this
                temperature and over the whole vocabulary.
        """
        hidden = self.hidden(input_ids, layout, positions)
        scored: tuple[Tensor, ...] = self.head(hidden, targets, temperature, supports)
        return scored if ahead is None else (*scored, *self.head(hidden[-1:], None, ahead))

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

    def forward(self, hidden: Tensor, targets: Tensor | None, temperature: float, supports: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of `targets` and entropies [N], both with gradient; without targets those of the likeliest tokens, and their ids.

        `supports` [N, K]: ids of the tokens that a target was drawn from, itself among them, and -1 beyond the last; a row of -1
        stands for the whole vocabulary, as None does. Logprob and entropy are then of the softmax over these tokens alone, and only
        their logits are computed: K rows of the head instead of all.
        """
        if targets is None:
            best = _log_softmax(hidden, self.weight, self.bias, temperature, None).topk(min(LIKELIEST, self.weight.shape[0]), dim=-1)
            return best.values, best.indices
        if supports is None or not len(hidden):
            return self._score(hidden, targets, temperature, None)
        whole = supports[:, 0] < 0
        if not whole.any():
            return self._score(hidden, targets, temperature, supports)
        parts = [torch.nonzero(one)[:, 0] for one in (whole, ~whole)]
        over = (None, supports[parts[1]])
        found = [self._score(hidden[at], targets[at], temperature, some) for at, some in zip(parts, over, strict=True) if len(at)]
        back = torch.cat(parts).argsort()
        logprobs, entropy = (torch.cat(some)[back] for some in zip(*found, strict=True))
        return logprobs, entropy

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float, supports: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = self.rows
        if supports is not None:  # what is alive for a row is up to K rows of the weight, instead of V logits
            rows = max(1, rows * self.weight.shape[0] // (supports.shape[1] * self.weight.shape[1]))
        if supports is not None or len(hidden) > rows:
            logprobs, entropy = _Chunked.apply(hidden, self.weight, self.bias, targets, supports, temperature, rows)  # type: ignore[no-untyped-call]
            return logprobs, entropy
        logp = _log_softmax(hidden, self.weight, self.bias, temperature, None)
        return logp.gather(-1, targets[:, None]).squeeze(-1), _entropy(logp, None)


class _Chunked(torch.autograd.Function):
    """Some rows at a time, forward and backward: at most a few times `rows` x vocabulary floats are alive at once, or `rows` x support
    x width where there are supports.

    With z the logits over temperature, p = softmax(z) over the whole vocabulary or a support, and H its entropy,

        d logprob / d z_j = [j = target] - p_j        d H / d z_j = -p_j (log p_j + H)

    which is 0 outside of the support, where p_j = 0. Tokens of supports always go this way, in one chunk where there are few.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        supports: Tensor | None,
        temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            some = None if supports is None else supports[at]
            logp = _log_softmax(hidden[at], weight, bias, temperature, some)
            logprobs.append(logp.gather(-1, _columns(targets[at], some)).squeeze(-1))
            entropies.append(_entropy(logp, some))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, targets, supports, entropy)
        ctx.weight, ctx.bias = weight, bias  # not saved by autograd: ZeRO-3 frees a parameter's memory and gathers it again
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, supports, entropy = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        to_hidden = torch.empty_like(hidden)
        to_weight, to_bias = (  # with adapters the head is not trained; skipping its gradient saves a third of the work
            torch.zeros(one.shape, dtype=gradients[0].dtype, device=one.device) if one is not None and wanted else None
            for one, wanted in ((weight, ctx.needs_input_grad[1]), (bias, ctx.needs_input_grad[2]))
        )
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            some = None if supports is None else supports[at]
            logp = _log_softmax(hidden[at], weight, bias, ctx.temperature, some)
            to_logprob, to_entropy = (gradient[at, None] for gradient in gradients)
            slope = logp.exp()
            if some is not None:
                logp.masked_fill_(some < 0, 0.0)
            logp.add_(entropy[at, None]).mul_(to_entropy).add_(to_logprob)
            slope.mul_(logp).neg_().scatter_add_(1, _columns(targets[at], some), to_logprob).div_(ctx.temperature)
            to_hidden[at] = _push_back(slope, hidden[at], weight, some, to_weight, to_bias)
        to_weight, to_bias = (None if total is None else total.to(weight.dtype) for total in (to_weight, to_bias))
        return to_hidden, to_weight, to_bias, None, None, None, None


def _push_back(
    slope: Tensor, hidden: Tensor, weight: Tensor, supports: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
) -> Tensor:
    """From the gradient of some logits, [n, V] or [n, K], to that of the hidden states; adds to those of weight and bias."""
    if supports is not None:
        inside = supports >= 0
        rows, ids, slope = inside.nonzero()[:, 0], supports[inside], slope[inside]
        if to_bias is not None:
            to_bias.index_add_(0, ids, slope)
        if to_weight is not None:
            to_weight.index_add_(0, ids, slope[:, None] * hidden[rows].to(slope.dtype))
        back = torch.zeros(hidden.shape, dtype=slope.dtype, device=hidden.device)
        return back.index_add_(0, rows, slope[:, None] * F.embedding(ids, weight).to(slope.dtype)).to(hidden.dtype)
    if to_bias is not None:
        to_bias.add_(slope.sum(0))
    slope = slope.to(weight.dtype)  # products in the model's dtype, as everywhere else in it
    if to_weight is not None and weight.dtype == to_weight.dtype:
        to_weight.addmm_(slope.T, hidden)
    elif to_weight is not None:  # only the sum over chunks in float32
        to_weight.add_(slope.T @ hidden)
    return slope @ weight


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, supports: Tensor | None) -> Tensor:
    """[N, V], or [N, K] over supports with minus infinity beyond them, in float32, or float64 for a float64 model."""
    logits = F.linear(hidden, weight, bias) if supports is None else _logits_inside(hidden, weight, bias, supports)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def _logits_inside(hidden: Tensor, weight: Tensor, bias: Tensor | None, supports: Tensor) -> Tensor:
    """[N, K]: a product for each token that is in a support, however wide the widest is; minus infinity beyond."""
    inside = supports >= 0
    rows, ids = inside.nonzero()[:, 0], supports[inside]
    logits = torch.bmm(hidden[rows][:, None, :], F.embedding(ids, weight)[:, :, None]).flatten()
    logits = logits if bias is None else logits + bias[ids]
    return torch.full(supports.shape, -math.inf, dtype=logits.dtype, device=logits.device).masked_scatter(inside, logits)


def _columns(targets: Tensor, supports: Tensor | None) -> Tensor:
    """[N, 1] where each target's logprob is: at its id, or at its place in its support."""
    return targets[:, None] if supports is None else (supports == targets[:, None]).int().argmax(-1, keepdim=True)


def _entropy(logp: Tensor, supports: Tensor | None) -> Tensor:
    finite = logp if supports is None else logp.masked_fill(supports < 0, 0.0)
    return -(logp.exp() * finite).sum(-1)


TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""For `check_scorer`: nats by which a logprob may differ, by the dtype of `policy.dtype`."""


def check_scorer(scorer: TokenScorer, *, tolerance: float) -> None:
    """Checks once that the scorer agrees with the model's own forward pass over plain sequences, whatever the architecture.

    Raises `UserError` for a model whose logits are not simply its output embedding times the last hidden state, or whose layers
    mix tokens other than by attention (the samples of a batch are laid out without padding, shared prefixes once).
    """
    config = scorer.lm.config
    device = scorer.head.weight.device
    vocabulary = config.get_text_config().vocab_size
    rows = [tuple(token % vocabulary for token in row) for row in (range(16), (*range(9), *range(30, 40)), range(50, 61))]
    forest = build_forest(rows)
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
