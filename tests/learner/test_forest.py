"""A forest of prefixes gives the same numbers as one sequence at a time, with fewer tokens."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl.learner import forest as forest_module
from agentrl.learner.forest import ForestLayout, build_forest, register
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.learner.token_scorer import TokenScorer
from agentrl.records import Sample
from tests.learner.building import VOCABULARY, tiny_config

CPU = torch.device("cpu")
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(sequences)
def test_paths_restore_the_sequences_and_prefixes_are_stored_once(rows: list[list[int]]) -> None:
    forest = build_forest(rows)
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert len(forest.token_ids) == len(prefixes)
    for row, path in zip(rows, forest.paths, strict=True):
        assert forest.token_ids[path].tolist() == row
        assert forest.positions[path].tolist() == list(range(len(row)))


@given(sequences)
def test_intervals_are_the_descendants(rows: list[list[int]]) -> None:
    forest = build_forest(rows)
    pairs = {(int(a), int(b)) for path in forest.paths for n, b in enumerate(path) for a in path[: n + 1]}
    size = len(forest.token_ids)
    assert {(k, q) for k in range(size) for q in range(k, size) if q < forest.ends[k]} == pairs


class Norm(nn.Module):
    """Root-mean-square normalization in the dtype of its input; the models' own rounds to float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def _model(kind: str, attention: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        model: transformers.PreTrainedModel = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=VOCABULARY, attn_implementation=attention, **sizes)
        )
    else:
        sliding = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1} if kind == "qwen3 sliding" else {}
        model = transformers.Qwen3ForCausalLM(tiny_config(attn_implementation=attention, initializer_range=0.2, **sliding))
    model = model.double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, Norm(child.weight, child.variance_epsilon))
    return model


def _samples(seed: int) -> list[Sample]:
    """Groups that share a prompt, episodes of two turns that share more, one duplicate, one-token completions."""
    rng = random.Random(seed)
    samples = []
    for group in range(4):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(5, 25))]
        for number in range(6):
            completion = [rng.randrange(3) for _ in range(rng.choice([1, 3, 17, 30]))]
            tool, final = [rng.randrange(VOCABULARY)] * 4, [rng.randrange(2)]
            ids = [*prompt, *completion, *tool, *final]
            mask = [False] * len(prompt) + [True] * len(completion) + [False] * 4 + [True]
            samples.append(_sample(f"{group}-{number}", group, ids, mask, rng))
    return [*samples, _sample("twin", 3, list(samples[-1].token_ids), list(samples[-1].loss_mask), rng)]


def _sample(name: str, group: int, ids: list[int], mask: list[bool], rng: random.Random) -> Sample:
    advantage = rng.uniform(-2, 2)
    return Sample(
        episode_id=name,
        group_index=group,
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(0.0 for _ in ids),
        advantages=tuple(advantage if trained else 0.0 for trained in mask),
        versions=tuple(0 if trained else -1 for trained in mask),
    )


def _gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return ((first - second).abs().max() / second.abs().max()).item()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 sliding", "llama"])
@pytest.mark.parametrize("budget", [10_000, 120])
def test_logprobs_and_gradients_equal_the_plain_computation(kind: str, budget: int) -> None:
    plain, model = _model(kind, "sdpa"), _model(kind, register())
    scorer, samples, tokens = TokenScorer(model), _samples(1), 0
    for rows in plan_micro_batches(samples, rank=0, ranks=1, max_tokens=budget):
        batch = build_micro_batch(rows, CPU)
        tokens += batch.input_ids.shape[1]
        logprobs, _ = scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 0.7)
        trained_logprobs = logprobs[batch.expand]
        (trained_logprobs * batch.advantages).sum().backward()
        expected = []
        for row in rows:
            ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
            logits = plain(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7
            expected.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[mask, 0])
        (torch.cat(expected) * batch.advantages).sum().backward()
        assert _gap(trained_logprobs, torch.cat(expected)) < 1e-12
    assert tokens < 0.75 * sum(len(sample.token_ids) for sample in samples)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert _gap(ours.grad, theirs.grad) < 1e-10, name


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for recompute in (False, True):
        model = _model("qwen3", register()).train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch = build_micro_batch(tuple(_samples(3)), CPU)
        logprobs, _ = TokenScorer(model)(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
        (logprobs[batch.expand] * batch.advantages).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for stored, recomputed in zip(*gradients, strict=True):
        assert _gap(recomputed, stored) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_the_block_kernel_equals_the_branch_kernel(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, which CUDA uses, without a compiler. Its backward pass has no CPU implementation."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(forest_module, "_flex", lambda: flex_attention)
    layout = ForestLayout(build_forest([sample.token_ids for sample in _samples(2)]), CPU)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, layout.length, 16, dtype=torch.float64) for heads in (4, 2, 2))
    by_branch = forest_module._by_branch(query, key, value, layout, 0.3, window)
    assert _gap(by_branch, forest_module._by_block(query, key, value, layout, 0.3, window)) < 1e-12
