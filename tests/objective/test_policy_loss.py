"""The loss of a recipe against its formulas in plain Python, token by token, in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.config import ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.objective.losses import LossInput, check_surrogate, k1, k2, k3, loss_denominator, second_moment_reach, sequence_penalty
from agentrl.objective.policy_loss import PolicyLoss, TrainedTokens, combine_steps, policy_loss, summarize
from agentrl.records import Sample
from tests.strategies import examples

BASE = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES: list[dict[str, Any]] = [
    {},
    {"dual_clip": 1.5},
    {"off_policy": {"preset": "none"}, "dual_clip": 1.1},
    {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    {"loss": "cispo", "clip_low": 0.1},
]
CORRECTIONS: list[dict[str, Any]] = [
    {"off_policy": {"preset": "none"}},
    {"off_policy": {"cap": 1.5}},
    {"off_policy": {"preset": "mask", "floor": 0.8, "cap": 2}},
    {"off_policy": {"preset": "truncate_sequence"}},
    {"off_policy": {"preset": "mask_sequence", "cap": 2}},
    {"off_policy": {"preset": "second_moment"}},
    {"off_policy": {"preset": "second_moment", "cap": 1.4}},
]
TERMS: list[dict[str, Any]] = [
    {"kl": "k1", "kl_coef": 0.1},
    {"kl": "k2", "kl_coef": 0.2},
    {"kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.05},
]
AGGREGATIONS: list[dict[str, Any]] = [{"aggregation": name} for name in ("token_mean", "sequence_mean", "constant")]
EVERY = [*LOSSES, *CORRECTIONS, *TERMS, *AGGREGATIONS, {**LOSSES[3], **CORRECTIONS[4], **TERMS[2], **AGGREGATIONS[1]}]
EVERY.append({**LOSSES[1], **CORRECTIONS[2], **TERMS[1], **AGGREGATIONS[2]})


def build_objective(changes: dict[str, Any]) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({**BASE, **changes})


def draw(seed: int, n: int = 300, sequences: int = 9, *, proximal: bool = True) -> TrainedTokens:
    """Random tokens whose ratios reach past every bound; sequences of different lengths, their tokens scattered."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, n, generator=g, dtype=torch.float64)
    behaviour = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    centre = behaviour + 0.3 * noise[0] if proximal else behaviour
    sequence = torch.randint(sequences, (n,), generator=g).square() + 5  # arbitrary ids
    return TrainedTokens(
        logprobs=(centre + 0.5 * noise[1]).requires_grad_(),
        behaviour=behaviour,
        advantages=noise[2],
        sequence=sequence,
        proximal=centre if proximal else None,
        kl_reference=behaviour + 0.4 * noise[3],
        entropy=torch.rand(n, generator=g, dtype=torch.float64).requires_grad_(),
    )


def total_weight(tokens: TrainedTokens, objective: ObjectiveConfig) -> float:
    """The denominator, counted by hand."""
    sequences = len(set(tokens.sequence.tolist()))
    return {"token_mean": len(tokens.sequence), "sequence_mean": sequences, "constant": sequences * 40}[objective.aggregation]


def reach_by_hand(log_ratio: Tensor, at_most: float = 0.04) -> float:
    """Masks the most extreme token while the mean square of the rest is above the threshold; the largest remaining size."""
    sizes = np.sort(np.abs(log_ratio.detach().numpy().astype(np.float64)))
    masked = 0
    while masked < len(sizes) and np.mean(sizes[: len(sizes) - masked] ** 2) > at_most:
        masked += 1
    return float("inf") if not masked else float(sizes[-masked - 1]) if masked < len(sizes) else 0.0


def loss_of(tokens: TrainedTokens, objective: ObjectiveConfig, d: float, *, full: TrainedTokens | None = None) -> PolicyLoss:
    """The loss of `tokens`, which are a part of the batch `full`."""
    batch = full or tokens
    centre = batch.behaviour if batch.proximal is None else batch.proximal
    return policy_loss(tokens, objective, denominator=d, reach=reach_by_hand(centre - batch.behaviour))


def by_hand(tokens: TrainedTokens, o: ObjectiveConfig, d: float) -> tuple[float, list[float], list[float]]:
    """Loss, its derivative by each logprob and by each entropy, from the formulas of docs/objectives.md."""
    pi, mu, adv, ref, ent = (
        getattr(tokens, name).detach().tolist() for name in ("logprobs", "behaviour", "advantages", "kl_reference", "entropy")
    )
    centre = mu if tokens.proximal is None else tokens.proximal.tolist()
    group = tokens.sequence.tolist()
    members = {name: [t for t, other in enumerate(group) if other == name] for name in group}
    reach = reach_by_hand(torch.tensor(centre, dtype=torch.float64) - torch.tensor(mu, dtype=torch.float64))
    loss, by_logprob, by_entropy, off = 0.0, [], [], o.off_policy.correction
    for t, a in enumerate(adv):
        mates = members[group[t]]
        rho = math.exp(sum(centre[j] - mu[j] for j in mates) if off.level == "sequence" else centre[t] - mu[t])
        if off.weights == "none":
            w = 1.0
        elif off.weights == "truncate":
            w = min(rho, off.cap)
        elif off.weights == "second_moment":
            w = min(rho, off.cap) if abs(centre[t] - mu[t]) <= reach else 0.0
        else:
            w = rho if off.floor <= rho <= off.cap else 0.0
        r = math.exp(pi[t] - centre[t])
        if o.loss.ref == "gspo":
            r = math.exp(sum(pi[j] - centre[j] for j in mates) / len(mates))
        bounded = min(max(r, 1 - o.clip_low), 1 + o.clip_high)
        if o.loss.ref == "cispo":
            value, slope = bounded * a * pi[t], bounded * a
        else:
            if off.weights != "none":
                r = min(r, off.cap)
            value, slope = (r * a, r * a) if r * a <= bounded * a else (bounded * a, 0.0)
            if o.dual_clip is not None and a < 0 and value < o.dual_clip * a:
                value, slope = o.dual_clip * a, 0.0
        gap = pi[t] - ref[t]
        divergence, steepness = {
            "none": (0.0, 0.0),
            "k1": (gap, 1.0),
            "k2": (gap * gap / 2, gap),
            "k3": (math.exp(-gap) - 1 + gap, 1 - math.exp(-gap)),
        }[o.kl]
        c = (1 / len(mates) if o.aggregation == "sequence_mean" else 1.0) / d
        loss += c * (-w * value + o.kl_coef * divergence - o.entropy_coef * ent[t])
        by_logprob.append(c * (-w * slope + o.kl_coef * steepness))
        by_entropy.append(-c * o.entropy_coef)
    return loss, by_logprob, by_entropy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("changes", EVERY, ids=str)
def test_value_and_gradient_equal_the_formulas(changes: dict[str, Any], proximal: bool) -> None:
    objective, tokens = build_objective(changes), draw(0, proximal=proximal)
    d = total_weight(tokens, objective)
    result = loss_of(tokens, objective, d)
    assert tokens.entropy is not None
    gradients = torch.autograd.grad(result.loss, (tokens.logprobs, tokens.entropy), materialize_grads=True)
    loss, by_logprob, by_entropy = by_hand(tokens, objective, d)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(gradients[0].numpy(), by_logprob, atol=1e-14)
    np.testing.assert_allclose(gradients[1].numpy(), by_entropy, atol=1e-14)


def _part(tokens: TrainedTokens, keep: Tensor) -> TrainedTokens:
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return TrainedTokens(**{name: None if value is None else value[keep] for name, value in values.items()})


@settings(max_examples=examples(60))
@given(st.sampled_from(EVERY), st.integers(0, 50), st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(1, 60))
def test_splitting_over_micro_batches_changes_nothing(changes: dict[str, Any], seed: int, homes: list[int], n: int) -> None:
    """Any division of the sequences over four micro-batches, some of them empty: the same loss, gradient and metrics."""
    objective, tokens = build_objective(changes), draw(seed, n)
    d = total_weight(tokens, objective)
    full = loss_of(tokens, objective, d)
    (gradient,) = torch.autograd.grad(full.loss, tokens.logprobs)
    numbers = sorted(set(tokens.sequence.tolist()))
    home_by_sequence = {number: homes[position] for position, number in enumerate(numbers)}
    home = torch.tensor([home_by_sequence[number] for number in tokens.sequence.tolist()])
    parts = [loss_of(_part(tokens, home == number), objective, d, full=tokens) for number in range(4)]
    (summed,) = torch.autograd.grad(torch.stack([part.loss for part in parts]).sum(), tokens.logprobs)
    torch.testing.assert_close(torch.stack([part.loss for part in parts]).sum(), full.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.stack([part.sums for part in parts]).sum(0), full.sums)
    torch.testing.assert_close(torch.stack([part.maxima for part in parts]).amax(0), full.maxima)


@pytest.mark.parametrize("changes", EVERY, ids=str)
def test_no_trained_token_gives_a_differentiable_zero(changes: dict[str, Any]) -> None:
    """The loss on a rank that got none of the last samples."""
    tokens = _part(draw(1), torch.zeros(300, dtype=torch.bool))
    result = policy_loss(tokens, build_objective(changes), denominator=5)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert summarize(result.sums, result.maxima) == {}


@pytest.mark.parametrize("changes", EVERY, ids=str)
def test_one_token_completions_have_equal_token_and_sequence_losses(changes: dict[str, Any]) -> None:
    """With one token per sequence, sequence ratios equal token ratios and both means are equal."""
    objective = build_objective(changes)
    tokens = replace(draw(2, 20), sequence=torch.arange(20))
    preset, loss = objective.off_policy.preset.removesuffix("_sequence"), "clip" if objective.loss.ref == "gspo" else objective.loss
    aggregation = objective.aggregation.replace("sequence", "token")
    twin = objective.but({"off_policy.preset": preset, "loss": loss, "aggregation": aggregation})
    assert policy_loss(tokens, objective, denominator=20).loss.item() == pytest.approx(
        policy_loss(tokens, twin, denominator=20).loss.item(), abs=1e-14
    )


@pytest.mark.parametrize("d", [0, -1.0, math.nan])
def test_a_batch_without_tokens_raises(d: float) -> None:
    with pytest.raises(ValueError, match="denominator"):
        policy_loss(draw(0), build_objective({}), denominator=d)


def test_missing_inputs_raise() -> None:
    tokens = draw(0)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(replace(tokens, kl_reference=None), build_objective({"kl": "k3", "kl_coef": 0.1}), denominator=1)
    with pytest.raises(ValueError, match="gradient"):
        policy_loss(replace(tokens, entropy=torch.zeros(300)), build_objective({"entropy_coef": 0.1}), denominator=1)


@pytest.mark.parametrize("changes", [{}, {"loss": "gspo"}, {"loss": "cispo"}, {"dual_clip": 1.5}], ids=str)
def test_an_enormous_ratio_has_a_bounded_gradient(changes: dict[str, Any]) -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    tokens = TrainedTokens(
        logprobs=logprobs,
        behaviour=torch.tensor([-2000.0, -2000.0]),
        advantages=torch.tensor([1.0, -1.0]),
        sequence=torch.tensor([0, 1]),
    )
    policy_loss(tokens, build_objective(changes), denominator=1).loss.backward()
    assert logprobs.grad is not None
    expected = {"": [0.0, 2.0], "gspo": [0.0, 2.0], "cispo": [-1.3, 1.3]}[changes.get("loss", "")]
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0] if "dual_clip" in changes else expected)


def test_a_masked_weight_of_infinity_is_zero_not_nan() -> None:
    tokens = TrainedTokens(
        logprobs=torch.zeros(2, requires_grad=True),
        behaviour=torch.tensor([-2000.0, 0.0]),
        advantages=torch.ones(2),
        sequence=torch.tensor([0, 1]),
        proximal=torch.zeros(2),
    )
    result = policy_loss(tokens, build_objective({"off_policy": {"preset": "mask"}}), denominator=1)
    assert result.loss.item() == -1.0
    assert summarize(result.sums, result.maxima)["truncated_fraction"] == 0.5


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(0, 3, width=32) | st.sampled_from([0.0, 0.25, 1.0]), max_size=30),
    st.lists(st.integers(0, 2), min_size=30, max_size=30),
    st.sampled_from([0.0, 0.001, 0.04, 1.0]),
)
def test_second_moment_mask_equals_numpy_on_any_number_of_ranks(sizes: list[float], homes: list[int], at_most: float) -> None:
    """The mean square of the unmasked tokens is at most the threshold; with one more size it is above. Equal sizes are treated alike."""
    values = torch.tensor(sizes, dtype=torch.float32) * (-1.0) ** torch.arange(len(sizes))
    sums: list[Tensor] = []

    def single_rank(value: Tensor) -> Tensor:
        sums.append(value)
        return value

    reach = second_moment_reach(values, single_rank, at_most=at_most)
    unmasked = sorted(size for size in sizes if size <= reach)
    masked = sorted(size for size in sizes if size > reach)
    assert not unmasked or math.fsum(size * size for size in unmasked) <= at_most * len(unmasked) * (1 + 1e-12)
    if masked:
        extended = [*unmasked, *[size for size in masked if size == masked[0]]]
        assert math.fsum(size * size for size in extended) > at_most * len(extended) * (1 - 1e-12)
    if len(set(sizes)) == len(sizes) and at_most:
        assert [size for size in sizes if size <= reach_by_hand(values, at_most)] == [size for size in sizes if size <= reach]
    home = torch.tensor(homes[: len(sizes)], dtype=torch.long)
    assert math.isclose(_reach_over_ranks([values[home == rank] for rank in range(3)], at_most), reach) or reach == math.inf


def _reach_over_ranks(parts: list[Tensor], at_most: float) -> float:
    """The result of ranks in threads, which must be equal."""
    barrier, slots = Barrier(len(parts)), dict[int, Tensor]()

    def run(rank: int) -> float:
        def add(value: Tensor) -> Tensor:
            slots[rank] = value
            barrier.wait(5)
            total = torch.stack([slots[number] for number in range(len(parts))]).sum(0)
            barrier.wait(5)
            return total

        return second_moment_reach(parts[rank], add, at_most=at_most)

    with ThreadPoolExecutor(len(parts)) as threads:
        (reach,) = set(threads.map(run, range(len(parts))))
    return reach


def test_second_moment_mask_drops_infinite_ratios_and_no_token_of_the_current_weights() -> None:
    assert second_moment_reach(torch.tensor([0.1, math.inf]), lambda value: value) < math.inf
    assert second_moment_reach(torch.zeros(5), lambda value: value) == math.inf
    tokens = replace(draw(6, 2), behaviour=torch.tensor([-math.inf, 0.0]), proximal=torch.zeros(2, dtype=torch.float64))
    result = loss_of(tokens, build_objective({"off_policy": {"preset": "second_moment"}}), 1)
    assert math.isfinite(result.loss.item())
    assert summarize(result.sums, result.maxima)["truncated_fraction"] == 0.5


@pytest.mark.parametrize("changes", [*CORRECTIONS, {"loss": "gspo"}, {"loss": "cispo"}], ids=str)
def test_effective_sample_size_uses_the_applied_weights(changes: dict[str, Any]) -> None:
    """The gradient of a token with advantage 1 and no clip is its weight, so the expected value follows from gradients."""
    objective = build_objective({"clip_low": 1.0, **changes})
    tokens = replace(draw(7), advantages=-torch.ones(300, dtype=torch.float64))  # a negative advantage is never clipped from above
    result = loss_of(tokens, objective, 1)
    if objective.loss.ref == "cispo":
        objective = build_objective({"clip_low": 1.0, "clip_high": 1e9, **changes})
        (weights,) = torch.autograd.grad(loss_of(tokens, objective, 1).loss, tokens.logprobs)
    else:
        (weights,) = torch.autograd.grad(result.loss, tokens.logprobs)
    expected = weights.sum() ** 2 / (300 * weights.square().sum())
    assert summarize(result.sums, result.maxima)["ess"] == pytest.approx(expected.item())


def test_metrics_equal_numpy() -> None:
    tokens = draw(3, proximal=False)
    result: PolicyLoss = policy_loss(tokens, build_objective({}), denominator=1)
    metrics = summarize(result.sums, result.maxima, with_reference=True)
    log_ratio = (tokens.logprobs.detach() - tokens.behaviour).numpy()
    ratio, advantages = np.exp(log_ratio), tokens.advantages.numpy()
    weight = np.minimum(ratio, 2.0)
    assert tokens.entropy is not None and tokens.kl_reference is not None
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean())
    assert metrics["ratio_max"] == pytest.approx(ratio.max())
    assert metrics["ratio_min"] == pytest.approx(ratio.min())
    assert metrics["kl_behaviour"] == pytest.approx((ratio - 1 - log_ratio).mean())
    assert metrics["ess"] == pytest.approx(weight.sum() ** 2 / (weight**2).sum() / weight.size)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(log_ratio).max())
    assert metrics["entropy"] == pytest.approx(tokens.entropy.detach().numpy().mean())
    clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert metrics["clip_fraction"] == pytest.approx(clipped.mean())
    assert metrics["clip_fraction_low"] == pytest.approx((clipped & (ratio < 1)).mean())
    assert metrics["clip_fraction_high"] == pytest.approx((clipped & (ratio > 1)).mean())
    assert metrics["clip_fraction_low"] > 0 < metrics["clip_fraction_high"]
    assert metrics["mismatch_tokens"] == 0 and "mismatch_kl" not in metrics, "no token is known to be sampled by these weights"
    assert metrics["truncated_fraction"] == pytest.approx((ratio > 2).mean())
    gap = (tokens.kl_reference - tokens.logprobs.detach()).numpy()
    assert metrics["kl_reference"] == pytest.approx((np.exp(gap) - 1 - gap).mean())


@pytest.mark.parametrize("proximal", [True, False])
def test_the_mismatch_covers_tokens_of_the_same_weights(proximal: bool) -> None:
    tokens = draw(4, proximal=proximal)
    same = torch.arange(300) % 3 == 0
    parts = [
        policy_loss(_part(replace(tokens, on_policy=same), keep), build_objective({}), denominator=1)
        for keep in (tokens.sequence < 20, tokens.sequence >= 20)
    ]
    metrics = summarize(torch.stack([part.sums for part in parts]).sum(0), torch.stack([part.maxima for part in parts]).amax(0))
    ours = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    gap = (ours - tokens.behaviour)[same].numpy()
    assert metrics["mismatch_tokens"] == pytest.approx(1 / 3)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(gap) - 1 - gap).mean())


@pytest.mark.parametrize(
    "changes", [{"dual_clip": 1.2}, {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.01}, {"loss": "cispo", "clip_low": 0.1}]
)
def test_a_clipped_token_counts_on_the_side_of_its_ratio(changes: dict[str, Any]) -> None:
    objective, tokens = build_objective(changes), draw(5, proximal=False)
    result = policy_loss(tokens, objective, denominator=1)
    metrics = summarize(result.sums, result.maxima)
    gap = (tokens.logprobs.detach() - tokens.behaviour).numpy()
    if objective.loss.ref == "gspo":
        group = tokens.sequence.numpy()
        gap = np.array([gap[group == number].mean() for number in group])
    ratio, advantages = np.exp(gap), tokens.advantages.numpy()
    above, below = ratio > 1 + objective.clip_high, ratio < 1 - objective.clip_low
    if objective.loss.ref == "cispo":
        high, low = above, below
    else:
        high, low = above & (advantages > 0), below & (advantages < 0)
        if objective.dual_clip is not None:
            high = high | ((advantages < 0) & (ratio > objective.dual_clip))
    assert metrics["clip_fraction_high"] == pytest.approx(high.mean()) != 0
    assert metrics["clip_fraction_low"] == pytest.approx(low.mean()) != 0
    assert metrics["clip_fraction"] == pytest.approx(high.mean() + low.mean())


def test_ratio_extremes_if_all_ratios_are_on_one_side() -> None:
    for shift in (0.5, -0.5, 800.0):
        tokens = TrainedTokens(
            **{"logprobs": torch.zeros(3, dtype=torch.float64) + shift, "behaviour": torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)},
            **{"advantages": torch.ones(3), "sequence": torch.zeros(3, dtype=torch.long)},
        )
        result = policy_loss(tokens, build_objective({}), denominator=1)
        metrics = summarize(result.sums, result.maxima)
        assert metrics["ratio_min"] == pytest.approx(math.exp(shift - 0.2) if shift < 700 else math.inf)
        assert metrics["ratio_max"] == pytest.approx(math.exp(shift) if shift < 700 else math.inf)


def test_metrics_of_several_steps_are_weighted_by_tokens() -> None:
    passes = [
        {"kl": 1.0, "ratio_max": 2.0, "ratio_min": 0.5, "nan": math.nan},
        {"kl": 4.0, "ratio_max": 3.0, "ratio_min": 0.9, "once": 7.0},
    ]
    assert combine_steps(passes, [200, 100]) == {"kl": 2.0, "ratio_max": 3.0, "ratio_min": 0.5, "once": 7.0}
    assert combine_steps([], []) == {}


def test_denominators_cover_the_step() -> None:
    def sample(trained: int, episode: str) -> Sample:
        mask = (False, *[True] * trained)
        zeros = (0.0,) * len(mask)
        return Sample(
            episode_id=episode,
            group_index=0,
            token_ids=(0,) * len(mask),
            loss_mask=mask,
            logprobs=zeros,
            advantages=zeros,
            versions=(0,) * len(mask),
        )

    samples = [sample(3, "a"), sample(1, "b"), sample(0, "c")]
    assert loss_denominator(samples, "token_mean", length=9) == 4.0
    assert loss_denominator(samples, "sequence_mean", length=9) == 2.0
    assert loss_denominator(samples, "constant", length=9) == 18.0
    assert loss_denominator([*samples, sample(2, "a")], "sequence_mean", length=9) == 2.0, "two trajectories of one rollout"
    assert loss_denominator([], "sequence_mean", length=9) == 0.0


# The valid results of a loss, built-in or user-supplied.
THREE, FLAGS = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
TOKENS = LossInput(
    log_ratio=THREE, logprobs=THREE, advantages=THREE, sequence=FLAGS.long(), clip_low=0.2, clip_high=0.2, dual_clip=None, cap=2.0
)


@pytest.mark.parametrize(
    ("result", "description"),
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
def test_invalid_results_of_a_loss_raise(result: object, description: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_surrogate(result, TOKENS, "mine:loss")
    assert str(caught.value).splitlines()[0] == f"objective.loss 'mine:loss' returned {description}"


def test_two_tensors_of_the_tokens_shape_pass() -> None:
    assert check_surrogate((THREE, FLAGS), TOKENS, "mine:loss") == (THREE, FLAGS)


def _policies(seed: int = 0, n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions over n outcomes, near each other: logits of pi with gradient, log-probabilities of the reference."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    reference = (logits + 0.2 * torch.randn(n, generator=g, dtype=torch.float64)).log_softmax(0)
    return logits.requires_grad_(), reference


def test_kl_estimators_have_the_divergence_as_expectation() -> None:
    """Summed over all outcomes instead of sampled: k1 and k3 equal KL(pi || ref), k2 approximates it."""
    logits, reference = _policies()
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    for estimator, tolerance in ((k1, 1e-12), (k3, 1e-12), (k2, 0.1)):
        assert (logp.exp() * estimator(logp, reference)).sum().item() == pytest.approx(exact.item(), rel=tolerance)
    assert (k2(logp, reference) >= 0).all()
    assert (k3(logp, reference) >= 0).all()


def test_expected_gradients_of_kl_estimators_as_a_loss() -> None:
    """As a loss on sampled tokens k2 descends KL(pi || ref), k1 does nothing, and k3 descends another divergence: KL(ref || pi)."""
    logits, reference = _policies()
    logp = logits.log_softmax(0)
    weight = logp.detach().exp()  # sampling: no gradient flows through it

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    reverse = gradient((logp.exp() * (logp - reference)).sum())
    forward = gradient((reference.exp() * (reference - logp)).sum())
    torch.testing.assert_close(gradient((weight * k2(logp, reference)).sum()), reverse)
    torch.testing.assert_close(gradient((weight * k1(logp, reference)).sum()), torch.zeros_like(reverse), atol=1e-15, rtol=0)
    torch.testing.assert_close(gradient((weight * k3(logp, reference)).sum()), forward)


def test_a_sequence_penalty_is_the_sum_over_its_tokens() -> None:
    behaviour, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.25])
    penalties = sequence_penalty(behaviour, reference, torch.tensor([2, 0, 2]), 4)
    assert penalties.tolist() == [-1.0, 0.0, 0.75, 0.0]
    assert sequence_penalty(*torch.zeros(2, 0), torch.zeros(0, dtype=torch.long), 2).tolist() == [0.0, 0.0]
