"""Constrains an answer to one of several actions."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.gateway.constraint import structural_tag


def choice_constraint(choices: Sequence[str], *, thinks_first: bool) -> str:
    """Returns a constraint that restricts an answer to one of `choices`. `thinks_first`: whether the model reasons before it answers."""
    texts = [{"type": "const_string", "value": choice} for choice in choices]
    return structural_tag(texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}, thinks_first=thinks_first)
