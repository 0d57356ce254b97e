from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from agentrl.errors import UserError
from agentrl.learner.forest import register
from agentrl.learner.packing import single_sequence
from agentrl.learner.token_scorer import LogprobHead, TokenScorer, check_scorer
from tests.learner.building import VOCABULARY, tiny_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [VOCABULARY * 3, 2**27])
def test_logprobs_equal_those_from_the_models_logits(tied: bool, logits_at_once: int) -> None:
    """Logprobs, entropies and the gradients of both in float64, chunked and not, at a temperature."""
    torch.manual_seed(0)
    lm = transformers.Qwen3ForCausalLM(tiny_config(tie_word_embeddings=tied, attn_implementation=register())).double()
    ids = torch.randint(VOCABULARY, (1, 36))
    positions = torch.tensor([0, 5, 10, 12, 20, 34])
    targets = ids[0, positions + 1]
    logits = lm(input_ids=ids).logits[0, positions] / 0.7
    reference = logits.log_softmax(-1)
    spread = -(reference.exp() * reference).sum(-1)
    (reference.gather(1, targets[:, None]).sum() + (spread * torch.arange(6)).sum()).backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()

    scorer = TokenScorer(lm, logits_at_once=logits_at_once)
    logprobs, entropy = scorer(*single_sequence(ids[0].tolist(), ids.device), positions, targets, 0.7)
    (logprobs.sum() + (entropy * torch.arange(6)).sum()).backward()
    torch.testing.assert_close(logprobs, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, spread)
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_chunks_of_a_bfloat16_head_give_the_gradients_of_one_chunk() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, VOCABULARY).to(torch.bfloat16)
    gradients = []
    for rows in (64, 5):
        hidden = torch.randn(64, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        linear.zero_grad()
        logprobs, entropy = LogprobHead(linear, rows * VOCABULARY)(hidden, torch.arange(64), 0.7)
        (logprobs.sum() - entropy.sum()).backward()
        gradients.append([hidden.grad, linear.weight.grad, linear.bias.grad])
    for single, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, single, rtol=0.02, atol=0.02)


class Capped:
    """Changes its logits after the output head."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits * 3)
        return output


class Shifting:
    """Mixes neighbouring tokens outside of attention, as recurrent and convolutional layers do."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0] + inputs[0].roll(1, dims=1),))


@pytest.mark.parametrize("kind", [Capped, Shifting])
def test_a_model_with_more_than_attention_and_a_head_raises(kind: type) -> None:
    torch.manual_seed(0)
    config = tiny_config(attn_implementation=register(), initializer_range=0.2)
    good = TokenScorer(transformers.Qwen3ForCausalLM(config))
    nn.init.normal_(good.head.weight)
    check_scorer(good, tolerance=1e-3)
    bad = TokenScorer(type("Bad", (kind, transformers.Qwen3ForCausalLM), {})(config))
    nn.init.normal_(bad.head.weight)
    with pytest.raises(UserError, match="does more than attention"):
        check_scorer(bad, tolerance=1e-3)
