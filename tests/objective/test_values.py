from __future__ import annotations

import pytest
import torch

from agentrl.objective.values import rows_of, value_loss


def test_the_value_clip_bounds_the_gain() -> None:
    shift = 3.0  # of all values, which changes no loss
    old = torch.tensor([shift] * 5, dtype=torch.float64)
    returns = shift + torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    values = (shift + torch.tensor([0.1, 0.9, 0.5, 2.0, -0.9], dtype=torch.float64)).requires_grad_()
    loss = value_loss(values, old, returns)
    expected = [0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2, 0.5, 0.5 * 0.8**2]
    assert loss.tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, 1.0, 0.0]), "0 where the clip holds, the error elsewhere"


def test_rows_restore_the_tokens() -> None:
    tokens = torch.arange(1.0, 7.0)
    rows, mask = rows_of(tokens, torch.tensor([7, 7, 7, 2, 9, 9]))
    assert rows.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert torch.equal(rows[mask], tokens)
    empty, none = rows_of(torch.empty(0), torch.empty(0, dtype=torch.long))
    assert empty.shape == (0, 0) and none.shape == (0, 0)
