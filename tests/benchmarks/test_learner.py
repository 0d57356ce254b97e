"""The learner's benchmark on a model folder: the group, its behaviour logprobs, tuning of the peer, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import learner, stored, updates

MODEL = "recipes/models/tables-base"


@pytest.fixture(scope="module")
def ours() -> learner.Ours:
    return learner.Ours(MODEL)


def test_a_group_shares_its_prompt_and_nothing_else() -> None:
    case = updates.group(300, 64, vocabulary=640)
    assert len(case.samples) == 8 and case.trained == 8 * 64
    prompts = {sample.token_ids[:300] for sample in case.samples}
    assert len(prompts) == 1 and len({sample.token_ids[300:] for sample in case.samples}) == 8
    assert max(max(sample.token_ids) for sample in case.samples) < 640


def test_the_shape_is_read_from_the_model_folder() -> None:
    expected = updates.Shape(hidden=128, layers=4, heads=4, kv_heads=2, mlp=384, width=32, vocabulary=640)
    assert updates.shape_of(MODEL) == expected == updates.shape_of("small")


@pytest.mark.slow
def test_behaviour_logprobs_are_the_models_and_both_loops_compute_the_same_update(ours: learner.Ours) -> None:
    guessed = updates.group(30, 8, vocabulary=640)
    case, plain = learner.on_policy(guessed, ours.scorer), learner.Padded(MODEL)
    for sample in case.samples:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            expected = plain.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.logprobs[30:]), expected[29:], atol=1e-4, rtol=1e-4)
        assert set(sample.logprobs[:30]) == {0.0}

    def strength(scored_case: updates.Case) -> Tensor:
        return learner.gradient(ours, scored_case).norm()

    learner.check_same_update([ours, plain], [case])
    assert strength(case) > 2 * strength(guessed), "ratios to guessed logprobs are clipped, so their gradients are 0"


@pytest.mark.parametrize(
    ("folder", "prompt", "error"), [("no/model", 300, "no model in"), (MODEL, 1000, "at most 1024 together"), (MODEL, 0, "at least 1")]
)
def test_a_missing_model_or_a_group_that_does_not_fit_is_an_error(folder: str, prompt: int, error: str) -> None:
    with pytest.raises(SystemExit, match=error):
        updates.folder_cases(folder, prompt, [64])


@pytest.mark.slow
def test_the_peer_is_timed_with_its_fastest_batch_on_each_case() -> None:
    """The clock advances least for batches of two, so they are the fastest. Gradients do not depend on the batch."""
    case, trl = updates.group(30, 8, vocabulary=640), learner.Trl(MODEL)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0 if trl.most != 2 else 0.5
        return now

    seconds_by_batch = trl.tune(case, clock, repeat=1)
    assert trl.most == 2 and trl.batch == "batches of 2"
    assert list(seconds_by_batch) == ["batches of 1", "batches of 2", "batches of 4", "batches of 8"]
    small = learner.gradient(trl, case)
    trl.most = None
    torch.testing.assert_close(small, learner.gradient(trl, case), atol=1e-5, rtol=1e-4)


def test_ratios_are_computed_within_each_repetition() -> None:
    seconds = {"agentrl": [1.0, 2.0, 4.0], "TRL GRPOTrainer": [3.0, 8.0, 8.0]}
    result = {"case": "c", "trained": 8, "tokens": dict.fromkeys(seconds, 64), "seconds": seconds, "bound": None, "batch": "batches of 2"}
    assert learner.ratios_to_ours(result, "TRL GRPOTrainer") == [3.0, 4.0, 2.0]
    assert "TRL GRPOTrainer, batches of 2 | 64 | 8.000 (3.000 to 8.000) | 1 | 3.00 (2.00 to 4.00)" in learner.table([result])


def test_the_page_is_written_from_all_stored_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    monkeypatch.setattr(learner, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"Before.\n\n{learner.BEGIN}\nold\n{learner.END}\n\nAfter.\n")
    seconds = {"agentrl": [1.0, 2.0], "TRL GRPOTrainer": [3.0, 8.0]}
    case = {"case": "c", "trained": 8, "tokens": dict.fromkeys(seconds, 64), "seconds": seconds, "bound": None, "batch": "batches of 2"}
    machine = {"cores": 2, "processor": "AMD EPYC", "memory_gib": 24, "gflops": 120, "busy_cores": 0.1}
    origin = {"command": "python benchmarks/learner.py", "machine": machine, "commit": "0123456789ab"}
    stored.keep("learner", origin, clock="wall", models={"small": [case]})
    stored.keep("learner-tables-base", origin, clock="cpu", models={"tables-base": [case]})
    learner.write_page()
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert text.count("3.50 (3.00 to 4.00)") == 2 and "Model `tables-base`" in text and "cpu time" in text
