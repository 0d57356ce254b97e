"""Compares the token values of the view with the metrics that the learner reported for its steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentrl.view.source import RunSource
from agentrl.view.training import recorded_tokens, train_group


def assert_tokens_agree_with_metrics(run: Path) -> int:
    """For each step: number of trained tokens, mean entropy, share of clipped tokens, mean KL and extremes of the ratio.

    The masks and behaviour logprobs are recomputed from the store. The learner's values come from its records. Returns the token count.
    """
    source, compared = RunSource(run, run_id="run", name="run"), 0
    assert source.refresh() == []
    for step in source.metrics.steps:
        tokens = [pair for entry in source.store().entries(step=step - 1) for pair in _tokens(source, step, entry.index)]
        metrics = source.metrics.row(step)
        assert len(tokens) == metrics["tokens_trained"]
        ratios = [math.exp(learner - behaviour) for learner, behaviour, _, _ in tokens]
        totals = {
            "entropy": sum(entropy for _, _, entropy, _ in tokens) / len(tokens),
            "clip_fraction": sum(clipped for _, _, _, clipped in tokens) / len(tokens),
            "kl_behaviour": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(tokens),
            "ratio_max": max(ratios),
            "ratio_min": min(ratios),
        }
        assert totals == pytest.approx({name: metrics[name] for name in totals}, rel=1e-4, abs=1e-7), f"step {step}"
        compared += len(tokens)
    source.close()
    return compared


def _tokens(source: RunSource, step: int, index: int) -> list[tuple[float, float, float, bool]]:
    """Learner's logprob, behaviour logprob, entropy and clip of each trained token of a group."""
    entry, group = source.store().entry(index), source.group(index)
    assert entry is not None
    training, tokens = train_group(source, entry, group), list[tuple[float, float, float, bool]]()
    assert training.notes == ()
    for samples in training.samples.values() if entry.use is not None and entry.use.tokens_trained else ():
        for sample in samples:
            record, why = recorded_tokens(source, step, training, sample)
            assert record is not None, why
            behaviour = [value for value, trained in zip(sample.logprobs, sample.loss_mask, strict=True) if trained]
            tokens += zip(record.logprobs, behaviour, record.entropies, record.clipped, strict=True)
    return tokens
