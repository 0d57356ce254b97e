"""What a loss may give, a built-in or a user's."""

from __future__ import annotations

import pytest
import torch

from agentrl.errors import PluginError
from agentrl.objective.losses import LossInput, check_surrogate

THREE, FLAGS = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
TOKENS = LossInput(
    log_ratio=THREE, logprobs=THREE, advantages=THREE, sequence=FLAGS.long(), clip_low=0.2, clip_high=0.2, dual_clip=None, cap=2.0
)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (None, "a NoneType"),
        ([THREE, FLAGS], "a list"),
        ((THREE, FLAGS, FLAGS), "a tuple of Tensor, Tensor, Tensor"),
        ((THREE, 5), "a tuple of Tensor, int"),
        ((5.0, FLAGS), "a tuple of float, Tensor"),
        ((THREE[:2], FLAGS), "shapes [2] and [3] for [3] tokens"),
        ((THREE, FLAGS[:2]), "shapes [3] and [2] for [3] tokens"),
        ((THREE, THREE), "types torch.float32 and torch.float32"),
        ((THREE.long(), FLAGS), "types torch.int64 and torch.bool"),
    ],
)
def test_invalid_results_of_a_loss_raise(made: object, wrong: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_surrogate(made, TOKENS, "mine:loss")
    assert str(caught.value).splitlines()[0] == f"objective.loss 'mine:loss' returned {wrong}"


def test_two_tensors_of_the_tokens_shape_pass() -> None:
    assert check_surrogate((THREE, FLAGS), TOKENS, "mine:loss") == (THREE, FLAGS)
