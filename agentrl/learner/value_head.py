"""A value head on a language model's trunk: values of states alongside the logprobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.learner.forest_attention import ForestLayout
from agentrl.learner.token_scorer import LOGITS_AT_ONCE, TokenScorer


def value_head(lm: Any) -> nn.Linear:
    """One output per token. Its weights start at zero, so its first gradient does not reach the trunk."""
    head = nn.Linear(lm.config.get_text_config().hidden_size, 1, dtype=lm.dtype, device=lm.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def values_of(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Float32 values [U] of hidden states [U, H]; float64 as the model."""
    values: Tensor = head(hidden).squeeze(-1)
    return values if values.dtype == torch.float64 else values.float()


class ValuedScorer(TokenScorer):
    """A `TokenScorer` with a value head on the same trunk. The head is not part of the language model, so it is never published.

    Args:
        detach: stops the gradient of the values at the head.
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
        """Logprobs, entropies and values [U] of the states before the tokens that `positions` [U] predict; see `TokenScorer.forward`.

        Without `targets` it returns only the values, with gradient for the head: the trunk is frozen then. With `ahead` no values.
        """
        if targets is not None and ahead is not None:
            return super().forward(input_ids, layout, positions, targets, temperature, supports, ahead)
        hidden = self.hidden(input_ids, layout, positions, frozen=targets is None)
        if targets is None:
            return (values_of(self.value, hidden),)
        logprobs, entropy = self.head(hidden, targets, temperature, supports)
        return logprobs, entropy, values_of(self.value, hidden.detach() if self.detach else hidden)
