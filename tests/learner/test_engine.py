"""The numbers of an update do not depend on how it is spread over ranks, micro-batches and ZeRO stages, nor on a crash in between."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner import preloaded
from tests.learner.building import random_group, recipe, write_run

pytestmark = pytest.mark.deepspeed
UNLIKE = {"update_s", "tokens_per_s", "tokens_computed"}  # depend on the clock, or on how samples meet in a micro-batch
SCENARIOS = {  # two ranks before one, which continues what they leave
    4: ["teams-2"],
    2: [
        *("objective-3-256", "stage-0", "stage-1", "stage-2", "stage-3", "stage-2-3", "resume-0", "resume-2", "resume-3"),
        *("poisoned-0", "poisoned-2", "source-3", "ppo-2", "ppo-3", "ppo-2-3", "shared-0", "shared-2", "shared-3", "shared-2-3"),
        *("resume-1", "cross-3-2", "cross-2-3", "cross-2-0", "cross-0-3", "cross-1-2"),
        *("crossppo-3-0", "crossppo-2-3", "crossppo-0-2", "odd-2"),
        *("stage-0-lora", "stage-1-lora", "resume-2-lora", "resume-3-lora", "stage-2-lora", "stage-3-lora"),
        *("stage-1-offload", "stage-2-offload", "stage-3-offload", "exact-0", "ulysses-0", "ulysses-2", "ulysses-3", "ulysses-3-lora"),
    ],
    1: [
        *("objective-0-256", "objective-2-16384", "stage-0", "stage-1", "stage-2", "stage-3", "stage-2-3", "resume-0", "resume-2"),
        *("poisoned-0", "poisoned-2", "poisoned-3", "ppo-0", "ppo-0-3", "shared-0", "shared-3", "shared-0-3"),
        *("reshape-0", "reshape-2", "reshape-3", "cross-3-0", "cross-0-2", "crossppo-0-3", "odd-0", "refused-2", "hostile-0", "hostile-2"),
        *("stage-0-lora", "stage-1-lora", "stage-2-lora", "stage-3-lora", "resume-0-lora", "reshape-2-lora", "reshape-3-lora"),
        *("poisoned-2-lora", "stage-1-offload", "stage-2-offload", "stage-3-offload", "resume-2-offload", "resume-3-offload"),
        *("poisoned-2-offload", "poisoned-3-offload", "entropy-0"),
    ],
}


RESUMED = [(1, "resume-0-lora"), (2, "resume-2-lora"), (2, "resume-3-lora"), (1, "resume-2-offload"), (1, "resume-3-offload")]
POISONED = [
    *((1, f"poisoned-{variant}") for variant in ("0", "2", "3", "2-lora", "2-offload", "3-offload")),
    *((2, f"poisoned-{variant}") for variant in ("0", "2")),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, host: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Every scenario, each made once, in one process group for each number of ranks."""
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, recipe(), [random_group(index, size=5) for index in range(6)])
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for ranks, names in SCENARIOS.items():
        out = run_dir / f"out{ranks}"
        out.mkdir()
        command = preloaded.command(host, ranks, "tests.learner.script", str(run_dir), str(out), *names)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        for name in names:
            found[ranks, name] = torch.load(out / f"{name}.pt")
    return found


def _gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


MATRIX = [(ranks, stage, variant) for variant in ("plain", "lora", "offload") for ranks in (1, 2) for stage in range(4)]


@pytest.mark.parametrize(("ranks", "stage", "variant"), [case for case in MATRIX if case[1] or case[2] != "offload"])
def test_ranks_and_zero_stages_give_the_same_update(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, stage: int, variant: str
) -> None:
    """Two updates with lr 1e-2 and a clip that binds; tolerance: float32 sums in another order, amplified by Adam's division.

    An update with everything put aside is compared with one that kept it on the device.
    """
    found = results[ranks, _name(stage, variant)]
    reference = results[1, _name(0, "lora" if variant == "lora" else "plain")]
    assert _gap(found["weights"], reference["weights"]) < 2e-4
    for ours, theirs in zip(found["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - UNLIKE:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key
    assert found["aside"] == (variant == "offload", variant == "offload" and stage == 3)


def _name(stage: int, variant: str) -> str:
    return f"stage-{stage}" if variant == "plain" else f"stage-{stage}-{variant}"


@pytest.mark.parametrize("case", ["0", "2", "3", "3-lora"])
def test_a_team_of_two_ranks_gives_the_same_update(results: dict[tuple[int, str], dict[str, Any]], case: str) -> None:
    found, reference = results[2, f"ulysses-{case}"], results[1, "stage-0-lora" if "lora" in case else "stage-0"]
    assert _gap(found["weights"], reference["weights"]) < 2e-4
    for ours, theirs in zip(found["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - UNLIKE:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key
    assert found["metrics"][0]["tokens_computed"] <= results[1, "stage-0"]["metrics"][0]["tokens_computed"], "none is computed twice"


def test_a_team_has_the_gradients_of_one_rank(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    found = results[2, "exact-0"]
    assert found.keys() == {"qwen3", "qwen3 sliding", "llama"}
    assert max(found.values()) < 1e-10, found


def test_minibatches_are_optimizer_steps_equal_on_two_ranks(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    one, two = results[1, "stage-2-3"], results[2, "stage-2-3"]
    assert one["metrics"][0]["optimizer_steps"] == 3
    assert _gap(one["weights"], two["weights"]) < 1e-3
    assert _gap(one["weights"], results[1, "stage-2"]["weights"]) > 1e-3


@pytest.mark.parametrize(("ranks", "name"), [(1, "resume-0"), (1, "resume-2"), (2, "resume-1"), (2, "resume-2"), (2, "resume-3"), *RESUMED])
def test_the_update_after_a_resume_is_bitwise_equal(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    found = results[ranks, name]
    assert _gap(found["weights"], found["again"]) == 0.0


@pytest.mark.parametrize(("ranks", "name"), [name for name in RESUMED if "lora" in name[1]])
def test_an_adapter_checkpoint_excludes_the_base_model(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    found = results[ranks, name]
    assert {saved.removeprefix("lm.") for saved in found["saved"]} == found["weights"].keys()
    assert all(".lora_" in saved for saved in found["saved"])


@pytest.mark.parametrize("case", ["0", "2", "3", "2-lora", "3-lora"])
def test_one_rank_resumes_the_checkpoint_of_two(results: dict[tuple[int, str], dict[str, Any]], case: str) -> None:
    found, reference = results[1, f"reshape-{case}"], results[2, f"resume-{case}"]
    assert _gap(found["weights"], reference["weights"]) < 1e-4
    assert found["left"] == ["000001"], "nothing is left beside the checkpoint"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, f"cross-{pair}") for pair in ("3-2", "2-3", "2-0", "0-3", "1-2")] + [(1, f"cross-{pair}") for pair in ("3-0", "0-2")],
)
def test_another_zero_stage_resumes_a_checkpoint(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    """With as many ranks and with fewer. Weight decay makes two groups of parameters, each with its options and its step count."""
    found, reference = results[ranks, name], results[2, f"resume-{name[-1]}"]
    assert _gap(found["weights"], reference["weights"]) < 1e-4
    assert found["left"] == ["000001"], "nothing is left beside the checkpoint"


@pytest.mark.parametrize(("ranks", "name"), [(2, "crossppo-3-0"), (2, "crossppo-2-3"), (2, "crossppo-0-2"), (1, "crossppo-0-3")])
def test_another_zero_stage_resumes_a_value_head(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    found, reference = results[ranks, name], results[2, f"shared-{name[-1]}"]
    assert _gap(found["weights"], reference["weights"]) < 1e-4
    assert _gap(found["heads"], reference["heads"][0]) < 1e-5


def test_an_unsuitable_checkpoint_raises_with_a_fix(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    said = results[1, "refused-2"]
    assert "made no step; resume with the ranks and the learner.zero_stage" in said["fresh"]
    assert "contains no critic; resume with the critic settings" in said["no critic"]
    assert "it has no value.bias; resume with the model and the critic" in said["no head"]
    assert "other parameter groups; resume with the learner.weight_decay and the critic" in said["other groups"]


@pytest.mark.parametrize(("ranks", "name"), POISONED)
def test_a_nan_gradient_changes_nothing(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    """Weights untouched, the update counted, and the next good one is what it would have been (moments were untouched too)."""
    found = results[ranks, name]
    assert _gap(found["before"], found["after"]) == 0.0
    assert found["metrics"]["updates_left_out"] == 1
    assert found["metrics"]["optimizer_steps"] == 0
    assert _gap(found["then"], found["clean"]) == 0.0
    assert _gap(found["then"], found["before"]) > 0.0


@pytest.mark.parametrize(("ranks", "name"), [(1, "ppo-0"), (2, "ppo-2"), (2, "ppo-3")])
def test_ppo_trains_critic_and_policy_alike_on_ranks_and_stages(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str
) -> None:
    found, reference = results[ranks, name], results[1, "ppo-0"]
    assert _gap(found["before"], found["warmed"]) == 0.0, "the critic warms up alone"
    assert _gap(found["weights"], found["warmed"]) > 1e-3
    assert _gap(found["weights"], found["again"]) == 0.0, "a resumed update is the same bit for bit, the critic's part included"
    assert _gap(found["weights"], reference["weights"]) < 5e-4
    first, second = found["metrics"]
    assert first["optimizer_steps"] == 0 and second["optimizer_steps"] == 1
    assert first["value_mean"] == 0.0 and first["return_mean"] == pytest.approx(reference["metrics"][0]["return_mean"])
    for key in ("value_loss", "explained_variance", "advantage_std", "value_mean"):
        assert second[key] == pytest.approx(reference["metrics"][1][key], rel=5e-3, abs=1e-5), key


def test_critic_minibatches_are_steps_of_the_critic_only(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    one, two, whole = results[1, "ppo-0-3"], results[2, "ppo-2-3"], results[1, "ppo-0"]
    assert one["metrics"][1]["optimizer_steps"] == 1
    assert one["metrics"][0]["advantage_std"] == pytest.approx(whole["metrics"][0]["advantage_std"])
    assert abs(one["metrics"][1]["value_mean"] - whole["metrics"][1]["value_mean"]) > 1e-3
    assert _gap(one["weights"], two["weights"]) < 1e-3
    assert _gap(one["weights"], one["again"]) == 0.0


@pytest.mark.parametrize(("ranks", "name"), [(1, "shared-0"), (1, "shared-3"), (2, "shared-0"), (2, "shared-2"), (2, "shared-3")])
def test_a_shared_trunk_trains_policy_and_head_alike_on_ranks_and_stages(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str
) -> None:
    found, reference = results[ranks, name], results[1, "shared-0"]
    assert _gap(found["before"], found["warmed"]) == 0.0, "a head that warms up leaves the trunk alone, weight decay included"
    assert _gap(found["weights"], found["warmed"]) == pytest.approx(1e-2, rel=0.02), "Adam's first step: the warm-up is not counted"
    assert not any("value" in published for published in found["weights"])
    assert _gap(found["weights"], found["again"]) == 0.0
    assert _gap(*found["heads"]) == 0.0, "a resumed update is the same bit for bit, the head included"
    assert _gap(found["weights"], reference["weights"]) < 5e-4
    assert _gap(found["heads"][0], reference["heads"][0]) < 5e-4
    first, second = found["metrics"]
    assert first["optimizer_steps"] == 0 and second["optimizer_steps"] == 1
    assert first["value_mean"] == 0.0 and abs(second["value_mean"]) > 1e-3
    for key in ("value_loss", "explained_variance", "advantage_std", "value_mean", "loss", "grad_norm"):
        assert second[key] == pytest.approx(reference["metrics"][1][key], rel=5e-3, abs=1e-5), key


def test_the_values_of_a_shared_trunk_are_taken_once_before_all_its_optimizer_steps(
    results: dict[tuple[int, str], dict[str, Any]],
) -> None:
    one, two, single = results[1, "shared-0-3"], results[2, "shared-2-3"], results[1, "shared-0"]
    assert one["metrics"][1]["optimizer_steps"] == 3
    assert _gap(one["weights"], two["weights"]) < 1e-3
    assert one["metrics"][0]["value_mean"] == 0.0
    assert _gap(one["heads"][0], single["heads"][0]) > 1e-3


@pytest.mark.parametrize(("ranks", "name"), [(1, "odd-0"), (2, "odd-2")])
def test_edge_case_batches(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    found = results[ranks, name]
    for kind, empty in found["empty"].items():
        assert _gap(empty["before"], empty["after"]) == 0.0, kind
        assert (empty["metrics"]["optimizer_steps"], empty["metrics"]["updates_left_out"]) == (0, 0), kind
        assert "advantage_std" not in empty["metrics"] and "value_loss" not in empty["metrics"], kind
    short = found["short"]
    counts = {short["metrics"][name] for name in ("tokens_trained", "tokens_delivered")}
    assert counts == {short["samples"]} == {6}, "completions of one token, two of them in groups of one"
    assert short["metrics"]["optimizer_steps"] == 1 and short["metrics"]["grad_norm"] > 0
    assert _gap(short["before"], short["after"]) > 1e-3
    assert "contains token 5000, but the policy's vocabulary has 97" in found["strange"]


def test_vllm_gets_full_tensors_and_the_tied_head(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    found = results[2, "source-3"]
    sent = dict(found["sent"])
    assert torch.equal(sent.pop("lm_head.weight"), sent["model.embed_tokens.weight"])
    assert _gap(sent, found["weights"]) == 0.0
    assert _gap(found["sent"], found["again"]) == 0.0
    assert sorted(found["grouped"]) == sorted(found["sent"])


@pytest.mark.parametrize("name", ["gspo", "cispo", "reinforce++", "rloo"])
@pytest.mark.parametrize(("ranks", "scenario"), [(1, "objective-2-16384"), (2, "objective-3-256"), (4, "teams-2")])
def test_every_objective_is_the_same_in_one_micro_batch_many_or_on_two_ranks_or_two_teams(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, scenario: str, name: str
) -> None:
    reference, found = results[1, "objective-0-256"][name], results[ranks, scenario][name]
    assert _gap(found["weights"], reference["weights"]) < 2e-4
    assert found["penalties"] == pytest.approx(reference["penalties"], rel=1e-4, abs=1e-5)
    for ours, theirs in zip(found["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - UNLIKE:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key


def test_the_kl_reference_model_stays_version_0(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    """Before the first update policy and reference are the same weights; after it they are not. Asked for by no KL term, none is there."""
    for name in ("gspo", "rloo"):
        first, second = results[1, "objective-0-256"][name]["metrics"]
        assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
        assert second["kl_reference"] > 1e-4
    assert "kl_reference" not in results[1, "stage-2"]["metrics"][0]
    first, second = results[1, "stage-3-lora"]["metrics"]
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9) and second["kl_reference"] > 1e-5
    assert results[1, "objective-0-256"]["cispo"]["penalties"] == {}
    penalties = results[1, "objective-0-256"]["reinforce++"]["penalties"]
    assert len(penalties) == 15
    assert any(penalties.values())


def test_an_entropy_weight_changes_from_the_first_to_the_last_step(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    weights = results[1, "entropy-0"]
    assert _gap(weights["changing"], weights["one by one"]) == 0.0
    assert _gap(weights["changing"], weights["constant"]) > 1e-4


def test_different_objectives_are_different_updates(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    made = [results[1, "objective-0-256"][name]["weights"] for name in ("gspo", "cispo", "reinforce++", "rloo")]
    made.append(results[1, "stage-0"]["weights"])
    assert all(_gap(one, other) > 1e-4 for at, one in enumerate(made) for other in made[:at])


@pytest.mark.parametrize("stage", [0, 2])
def test_checkpoint_files_run_no_code(results: dict[tuple[int, str], dict[str, Any]], stage: int) -> None:
    found = results[1, f"hostile-{stage}"]
    assert not found["ran"] and found["files"] >= 2
    assert {file for target, file in found["said"] if target == stage} >= {"rng_00.pt", "state/mp_rank_00_model_states.pt"}
    for message in found["said"].values():
        assert "contains more than tensors and plain values" in message and "none of its code was run" in message and "system" in message
        assert "resume from a checkpoint that this run has written" in message and "weights_only" not in message
