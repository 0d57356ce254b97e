from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from agentrl.errors import UserError
from agentrl.learner.logprobs import TokenScorer, check_head
from tests.learner.building import VOCABULARY, tiny_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [VOCABULARY * 3, 2**27])
def test_the_same_as_the_models_own_logits(tied: bool, logits_at_once: int) -> None:
    """Values, entropies and gradients in float64, chunked and not, at a temperature."""
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(tiny_config(tie_word_embeddings=tied)).double()
    ids = torch.randint(VOCABULARY, (3, 12))
    positions = torch.tensor([0, 5, 10, 12, 20, 34])
    targets = ids.flatten()[positions + 1]
    logits = lm(input_ids=ids).logits.flatten(0, 1)[positions].float() / 0.7
    reference = logits.log_softmax(-1)
    reference.gather(1, targets[:, None]).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()

    logprobs, entropy = TokenScorer(lm, logits_at_once=logits_at_once)(ids, positions, targets, 0.7)
    logprobs.sum().backward()
    torch.testing.assert_close(logprobs, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("logits_at_once", [VOCABULARY * 3, 2**27])
def test_entropy_carries_a_gradient_when_it_is_asked_for(logits_at_once: int) -> None:
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(tiny_config()).double()
    ids = torch.randint(VOCABULARY, (2, 12))
    positions = torch.tensor([0, 3, 5, 10, 14, 20])
    logits = lm(input_ids=ids).logits.flatten(0, 1)[positions].float() / 0.7
    torch.distributions.Categorical(logits=logits).entropy().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    targets = ids.flatten()[positions + 1]
    _, entropy = TokenScorer(lm, logits_at_once=logits_at_once, entropy_gradient=True)(ids, positions, targets, 0.7)
    entropy.sum().backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)  # logits are float32
    _, entropy = TokenScorer(lm)(ids, positions, targets, 0.7)
    assert not entropy.requires_grad


def test_padding_on_the_right_changes_nothing() -> None:
    torch.manual_seed(0)
    scorer = TokenScorer(Qwen3ForCausalLM(tiny_config(attn_implementation="sdpa")))
    ids = torch.randint(VOCABULARY, (1, 9))
    padded = torch.cat((ids, torch.zeros(1, 20, dtype=torch.long)), 1)
    positions = torch.arange(8)
    with torch.no_grad():
        plain, _ = scorer(ids, positions, ids[0, 1:], 1.0)
        wide, _ = scorer(padded, positions, ids[0, 1:], 1.0)
    torch.testing.assert_close(wide, plain)


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    class Capped(Qwen3ForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits * 3)
            return output

    torch.manual_seed(0)
    good = TokenScorer(Qwen3ForCausalLM(tiny_config()))
    nn.init.normal_(good.head.weight)
    check_head(good, tolerance=1e-3)
    capped = TokenScorer(Capped(tiny_config()))
    nn.init.normal_(capped.head.weight)
    with pytest.raises(UserError, match="changes its logits"):
        check_head(capped, tolerance=1e-3)
