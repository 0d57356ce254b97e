from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from agentrl.errors import UserError
from agentrl.learner.forest_attention import register
from agentrl.learner.logprobs import TokenScorer, check_scorer
from agentrl.learner.packing import text
from tests.learner.building import VOCABULARY, tiny_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [VOCABULARY * 3, 2**27])
def test_the_same_as_the_models_own_logits(tied: bool, logits_at_once: int) -> None:
    """Values, entropies and gradients in float64, chunked and not, at a temperature."""
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(tiny_config(tie_word_embeddings=tied, attn_implementation=register())).double()
    ids = torch.randint(VOCABULARY, (1, 36))
    positions = torch.tensor([0, 5, 10, 12, 20, 34])
    targets = ids[0, positions + 1]
    logits = lm(input_ids=ids).logits[0, positions] / 0.7
    reference = logits.log_softmax(-1)
    reference.gather(1, targets[:, None]).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()

    scorer = TokenScorer(lm, logits_at_once=logits_at_once)
    logprobs, entropy = scorer(*text(ids[0].tolist(), ids.device), positions, targets, 0.7)
    logprobs.sum().backward()
    torch.testing.assert_close(logprobs, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


class Capped(Qwen3ForCausalLM):
    """Changes its logits after the output head."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits * 3)
        return output


class Shifting(Qwen3ForCausalLM):
    """Mixes neighbouring tokens outside of attention, as recurrent and convolutional layers do."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0] + inputs[0].roll(1, dims=1),))


@pytest.mark.parametrize("kind", [Capped, Shifting])
def test_a_model_that_does_more_than_attention_and_a_head_is_refused(kind: type[Qwen3ForCausalLM]) -> None:
    torch.manual_seed(0)
    config = tiny_config(attn_implementation=register(), initializer_range=0.2)
    good = TokenScorer(Qwen3ForCausalLM(config))
    nn.init.normal_(good.head.weight)
    check_scorer(good, tolerance=1e-3)
    bad = TokenScorer(kind(config))
    nn.init.normal_(bad.head.weight)
    with pytest.raises(UserError, match="does more than attention"):
        check_scorer(bad, tolerance=1e-3)
