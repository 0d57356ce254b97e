"""Sums over sequences equal a plain loop, and use operations whose order of additions does not depend on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.config import ObjectiveConfig
from agentrl.objective.losses import Segments, sequence_penalty, sum_segments
from agentrl.objective.policy_loss import policy_loss
from tests.objective.test_policy_loss import draw, total_weight

# Operations that torch's documentation of use_deterministic_algorithms lists as adding in any order on CUDA.
ANY_ORDER = ("index_add", "scatter_add", "scatter_reduce", "cumsum", "put", "histc")


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-1e6, 1e6)), max_size=60))
def test_sums_are_those_of_a_loop_bit_for_bit(pairs: list[tuple[int, float]]) -> None:
    index, values = torch.tensor([n for n, _ in pairs], dtype=torch.long), torch.tensor([v for _, v in pairs], dtype=torch.float64)
    expected = [0.0] * 7
    for number, value in pairs:
        expected[number] += value
    assert sum_segments(values, index, 7).tolist() == expected


def test_a_segments_sum_is_independent_of_others() -> None:
    """Scattered segments of 1 to 5,000 tokens. Each has the same sum, to the last bit, if it is summed alone."""
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 2, 40, 700, 5000]))[torch.randperm(5743, generator=generator)]
    values = torch.randn(5743, dtype=torch.float64, generator=generator)
    together = Segments.of(index).sum(values)
    for number in range(5):
        mask = index == number
        alone = Segments.of(index[mask]).sum(values[mask])
        assert torch.equal(together[mask], alone)


class Recorder(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1},
        {"off_policy": {"preset": "mask_sequence"}},
        {"loss": "cispo", "aggregation": "constant", "clip_low": 1.0, "kl": "k3", "kl_coef": 0.1},
    ],
)
def test_losses_add_in_a_fixed_order(changes: dict[str, Any]) -> None:
    """A resumed update can then be bitwise equal on CUDA too. The test checks the operations, because CI may have no GPU."""
    objective = ObjectiveConfig.model_validate(changes)
    tokens = draw(0)
    with Recorder() as recorder:
        policy_loss(tokens, objective, denominator=total_weight(tokens, objective)).loss.backward()
        sequence_penalty(tokens.behaviour, tokens.behaviour - 0.1, torch.arange(len(tokens.sequence)) % 7, 7)
    assert "segment_reduce" in recorder.names
    nondeterministic = {name for name in recorder.names for listed in ANY_ORDER if name.rstrip("_") == listed}
    assert not nondeterministic
