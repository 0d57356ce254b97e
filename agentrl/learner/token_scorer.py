"""Computes logprobs and entropies of selected tokens, and values if there is a value head, with bounded memory for logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl.errors import UserError
from agentrl.learner.forest import ForestLayout, build_forest
from agentrl.learner.images import ImageInputs, run_trunk
from agentrl.records.sampling import MAX_SUPPORT

LOGITS_AT_ONCE = 2**25  # float32 logits in memory at a time: 128 MiB, and a few times that in the backward pass

LIKELIEST = MAX_SUPPORT + 8
"""Number of most likely tokens in a probe: the largest support, plus some tokens that rounding may swap with the support's last ones."""


class TokenScorer(nn.Module):
    """A causal language model that returns logprobs of selected tokens instead of all logits.

    Only the requested positions pass through the output head, in chunks. If there are several chunks, the backward pass recomputes the
    logits. DeepSpeed wraps this module instead of the model, so ZeRO-3 gathers the head's weight once, however many chunks each rank needs.
    """

    def __init__(self, lm: Any, *, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.lm = lm
        self.images = ImageInputs.of(lm)
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
        """Returns logprobs [N] and entropies [N] of softmax(logits / temperature), in nats: float32, or float64 for a float64 model.

        Args:
            input_ids: [1, T] tokens of a forest of sequences, with tagged images (`agentrl.records.images`).
            layout: which token follows which.
            positions: [N] index into [T] of the predicting token.
            targets: [N] ids of the predicted tokens.
            supports: [N, K] ids of the tokens over which each softmax is computed; see `LogprobHead.forward`.
            ahead: temperature at which to also return logprobs [1, M] and ids [1, M] of the most likely tokens after the last of
                `positions`, over the whole vocabulary.
        """
        hidden = self.hidden(input_ids, layout, positions)
        scored: tuple[Tensor, ...] = self.head(hidden, targets, temperature, supports)
        return scored if ahead is None else (*scored, *self.head(hidden[-1:], None, ahead))

    def hidden(self, input_ids: Tensor, layout: ForestLayout, positions: Tensor, *, frozen: bool = False) -> Tensor:
        """Returns the trunk's last hidden states [N, H] at `positions`; without gradient if `frozen`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return run_trunk(self.lm, self.images, input_ids, layout)[positions]


class LogprobHead(nn.Module):
    """The output head followed by log-softmax, computed in chunks. Shares its parameters with the model."""

    def __init__(self, linear: nn.Linear, logits_at_once: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.rows = max(1, logits_at_once // linear.weight.shape[0])

    def forward(self, hidden: Tensor, targets: Tensor | None, temperature: float, supports: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns logprobs [N] of `targets` and entropies [N], with gradient.

        If `targets` is None, returns logprobs and ids [N, M] of the most likely tokens of the vocabulary.

        `supports` [N, K]: ids of the tokens that a target was drawn from, including the target, padded with -1. The softmax
        is over these tokens only, and only K rows of the head are computed. None or a row of -1 means the whole vocabulary.
        """
        if targets is None:
            best = _log_softmax(hidden, self.weight, self.bias, temperature, None).topk(min(LIKELIEST, self.weight.shape[0]), dim=-1)
            return best.values, best.indices
        if supports is None or not len(hidden):
            return self._score(hidden, targets, temperature, None)
        whole = supports[:, 0] < 0
        if not whole.any():
            return self._score(hidden, targets, temperature, supports)
        rows = [torch.nonzero(mask)[:, 0] for mask in (whole, ~whole)]
        scored = [
            self._score(hidden[at], targets[at], temperature, over)
            for at, over in zip(rows, (None, supports[rows[1]]), strict=True)
            if len(at)
        ]
        order = torch.cat(rows).argsort()
        logprobs, entropy = (torch.cat(parts)[order] for parts in zip(*scored, strict=True))
        return logprobs, entropy

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float, supports: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = self.rows
        if supports is not None:  # a row needs up to K rows of the weight, instead of V logits
            rows = max(1, rows * self.weight.shape[0] // (supports.shape[1] * self.weight.shape[1]))
        if supports is not None or len(hidden) > rows:
            logprobs, entropy = _Chunked.apply(hidden, self.weight, self.bias, targets, supports, temperature, rows)  # type: ignore[no-untyped-call]
            return logprobs, entropy
        logp = _log_softmax(hidden, self.weight, self.bias, temperature, None)
        return logp.gather(-1, targets[:, None]).squeeze(-1), _entropy(logp, None)


class _Chunked(torch.autograd.Function):
    """Processes a few rows at a time in the forward and in the backward pass, so that at most a few times `rows` x vocabulary floats are in
    memory at once.

    With z the logits divided by the temperature, p = softmax(z) over the whole vocabulary or a support, and H its entropy,

        d logprob / d z_j = [j = target] - p_j        d H / d z_j = -p_j (log p_j + H)

    Both derivatives are 0 outside the support. Tokens with supports are always processed by this function.
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
            support = None if supports is None else supports[at]
            logp = _log_softmax(hidden[at], weight, bias, temperature, support)
            logprobs.append(logp.gather(-1, _columns(targets[at], support)).squeeze(-1))
            entropies.append(_entropy(logp, support))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, targets, supports, entropy)
        ctx.weight, ctx.bias = weight, bias  # not saved by autograd: ZeRO-3 frees a parameter's memory and gathers it later
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, supports, entropy = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        to_hidden = torch.empty_like(hidden)
        to_weight, to_bias = (  # with adapters the head is not trained; skipping its gradient saves a third of the work
            torch.zeros(parameter.shape, dtype=gradients[0].dtype, device=parameter.device) if parameter is not None and wanted else None
            for parameter, wanted in ((weight, ctx.needs_input_grad[1]), (bias, ctx.needs_input_grad[2]))
        )
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            support = None if supports is None else supports[at]
            logp = _log_softmax(hidden[at], weight, bias, ctx.temperature, support)
            to_logprob, to_entropy = (gradient[at, None] for gradient in gradients)
            slope = logp.exp()
            if support is not None:
                logp.masked_fill_(support < 0, 0.0)
            logp.add_(entropy[at, None]).mul_(to_entropy).add_(to_logprob)
            slope.mul_(logp).neg_().scatter_add_(1, _columns(targets[at], support), to_logprob).div_(ctx.temperature)
            to_hidden[at] = _push_back(slope, hidden[at], weight, support, to_weight, to_bias)
        to_weight, to_bias = (None if total is None else total.to(weight.dtype) for total in (to_weight, to_bias))
        return to_hidden, to_weight, to_bias, None, None, None, None


def _push_back(
    slope: Tensor, hidden: Tensor, weight: Tensor, supports: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
) -> Tensor:
    """Returns the gradient of the hidden states, given that of the logits, [n, V] or [n, K]. Adds to the gradients of weight and bias."""
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
    slope = slope.to(weight.dtype)  # products in the model's dtype, as in its other layers
    if to_weight is not None and weight.dtype == to_weight.dtype:
        to_weight.addmm_(slope.T, hidden)
    elif to_weight is not None:  # the sum over chunks is float32
        to_weight.add_(slope.T @ hidden)
    return slope @ weight


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, supports: Tensor | None) -> Tensor:
    """Returns logprobs [N, V], or [N, K] over supports, padded with minus infinity; float32, or float64 for a float64 model."""
    logits = F.linear(hidden, weight, bias) if supports is None else _logits_inside(hidden, weight, bias, supports)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def _logits_inside(hidden: Tensor, weight: Tensor, bias: Tensor | None, supports: Tensor) -> Tensor:
    """Returns the logits [N, K] of the supports' tokens, padded with minus infinity. Computes one product per token."""
    inside = supports >= 0
    rows, ids = inside.nonzero()[:, 0], supports[inside]
    logits = torch.bmm(hidden[rows][:, None, :], F.embedding(ids, weight)[:, :, None]).flatten()
    logits = logits if bias is None else logits + bias[ids]
    return torch.full(supports.shape, -math.inf, dtype=logits.dtype, device=logits.device).masked_scatter(inside, logits)


def _columns(targets: Tensor, supports: Tensor | None) -> Tensor:
    """Returns the column [N, 1] of each target's logprob: its id, or its index in its support."""
    return targets[:, None] if supports is None else (supports == targets[:, None]).int().argmax(-1, keepdim=True)


def _entropy(logp: Tensor, supports: Tensor | None) -> Tensor:
    finite = logp if supports is None else logp.masked_fill(supports < 0, 0.0)
    return -(logp.exp() * finite).sum(-1)


TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest accepted difference between logprobs in `check_scorer`, in nats, by `policy.dtype`."""


def check_scorer(scorer: TokenScorer, *, tolerance: float) -> None:
    """Checks that the scorer agrees with the model's forward pass over plain sequences.

    Raises `UserError` if the model's logits are not its output embedding times the last hidden state, if its layers mix tokens by anything
    other than attention, or if it has special positions or attention for images. Samples are laid out without padding and with shared
    prefixes stored once, so no layer other than attention may mix tokens.
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
            f"model type {config.model_type!r} is not supported: it does more than attention and a plain output head"
            f" (logprobs differ by {gap:.3g})",
            fix="use a model without recurrent layers, logit scaling or soft-capping, such as Qwen3 or Llama",
        )
    if scorer.images is not None and not (gap := scorer.images.largest_gap(scorer.lm)) <= tolerance:
        raise UserError(
            f"model type {config.model_type!r} is not supported: it uses special positions or attention for images"
            f" (logprobs differ by {gap:.3g})",
            fix="use a model that places the features of images like tokens, such as SmolVLM (Idefics3)",
        )


def value_head(lm: Any) -> nn.Linear:
    """Returns a linear layer with one output. The layer's weights start at zero, so the first gradient does not reach the trunk."""
    head = nn.Linear(lm.config.get_text_config().hidden_size, 1, dtype=lm.dtype, device=lm.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def values_of(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns float32 values [U] of hidden states [U, H]; float64 for a float64 model."""
    values: Tensor = head(hidden).squeeze(-1)
    return values if values.dtype == torch.float64 else values.float()


class ValuedScorer(TokenScorer):
    """A `TokenScorer` with a value head on the same trunk. The head is not part of the language model, so it is never published.

    `detach` stops the gradient of the values at the head.
    """

    def __init__(self, lm: Any, *, detach: bool, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__(lm, logits_at_once=logits_at_once)
        self.value = value_head(lm)
        self.detach = detach

    def forward(
        self,
        input_ids: Tensor,
        layout: ForestLayout,
        positions: Tensor,
        targets: Tensor | None,
        temperature: float,
        supports: Tensor | None = None,
        ahead: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logprobs, entropies and values [U] of the states before the predicted tokens; see `TokenScorer.forward`.

        If `targets` is None, returns only the values, with gradient for the head only. If `ahead` is set, returns no values.
        """
        if targets is not None and ahead is not None:
            return super().forward(input_ids, layout, positions, targets, temperature, supports, ahead)
        hidden = self.hidden(input_ids, layout, positions, frozen=targets is None)
        if targets is None:
            return (values_of(self.value, hidden),)
        logprobs, entropy = self.head(hidden, targets, temperature, supports)
        return logprobs, entropy, values_of(self.value, hidden.detach() if self.detach else hidden)
