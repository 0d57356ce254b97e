"""An update gives the same numbers on any number of ranks, in any micro-batches, at any ZeRO stage, and after a crash."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner import preloaded
from tests.learner.building import build_recipe, random_group, write_run

pytestmark = pytest.mark.deepspeed
VARYING = {"update_s", "tokens_per_s", "tokens_computed"}  # depend on the clock, or on the samples of a micro-batch
SCENARIOS = {  # two ranks before one, which resumes their checkpoints
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
    """The results of all scenarios, each run once, in one process group for each number of ranks."""
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, build_recipe(), [random_group(index, size=5) for index in range(6)])
    outputs: dict[tuple[int, str], dict[str, Any]] = {}
    for ranks, names in SCENARIOS.items():
        out = run_dir / f"out{ranks}"
        out.mkdir()
        command = preloaded.command(host, ranks, "tests.learner.script", str(run_dir), str(out), *names)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
        for name in names:
            outputs[ranks, name] = torch.load(out / f"{name}.pt")
    return outputs


def _gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


MATRIX = [(ranks, stage, variant) for variant in ("plain", "lora", "offload") for ranks in (1, 2) for stage in range(4)]


@pytest.mark.parametrize(("ranks", "stage", "variant"), [case for case in MATRIX if case[1] or case[2] != "offload"])
def test_ranks_and_zero_stages_give_the_same_update(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, stage: int, variant: str
) -> None:
    """Two updates with lr 1e-2 and a clip that binds; tolerance: float32 sums in another order, amplified by Adam's division.

    An update with everything offloaded is compared with one that stays on the device.
    """
    result = results[ranks, _name(stage, variant)]
    reference = results[1, _name(0, "lora" if variant == "lora" else "plain")]
    assert _gap(result["weights"], reference["weights"]) < 2e-4
    for ours, theirs in zip(result["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - VARYING:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key
    assert result["offloaded"] == (variant == "offload", variant == "offload" and stage == 3)


def _name(stage: int, variant: str) -> str:
    return f"stage-{stage}" if variant == "plain" else f"stage-{stage}-{variant}"


@pytest.mark.parametrize("case", ["0", "2", "3", "3-lora"])
def test_a_team_of_two_ranks_gives_the_same_update(results: dict[tuple[int, str], dict[str, Any]], case: str) -> None:
    result, reference = results[2, f"ulysses-{case}"], results[1, "stage-0-lora" if "lora" in case else "stage-0"]
    assert _gap(result["weights"], reference["weights"]) < 2e-4
    for ours, theirs in zip(result["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - VARYING:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key
    assert result["metrics"][0]["tokens_computed"] <= results[1, "stage-0"]["metrics"][0]["tokens_computed"], "none is computed twice"


def test_a_team_has_the_gradients_of_one_rank(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    gaps = results[2, "exact-0"]
    assert gaps.keys() == {"qwen3", "qwen3 sliding", "llama"}
    assert max(gaps.values()) < 1e-10, gaps


def test_minibatches_are_optimizer_steps_that_are_equal_on_two_ranks(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    one_rank, two_ranks = results[1, "stage-2-3"], results[2, "stage-2-3"]
    assert one_rank["metrics"][0]["optimizer_steps"] == 3
    assert _gap(one_rank["weights"], two_ranks["weights"]) < 1e-3
    assert _gap(one_rank["weights"], results[1, "stage-2"]["weights"]) > 1e-3


@pytest.mark.parametrize(("ranks", "name"), [(1, "resume-0"), (1, "resume-2"), (2, "resume-1"), (2, "resume-2"), (2, "resume-3"), *RESUMED])
def test_the_update_after_a_resume_is_bitwise_equal(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    result = results[ranks, name]
    assert _gap(result["weights"], result["resumed"]) == 0.0


@pytest.mark.parametrize(("ranks", "name"), [name for name in RESUMED if "lora" in name[1]])
def test_an_adapter_checkpoint_excludes_the_base_model(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    result = results[ranks, name]
    assert {saved.removeprefix("lm.") for saved in result["saved"]} == result["weights"].keys()
    assert all(".lora_" in saved for saved in result["saved"])


@pytest.mark.parametrize("case", ["0", "2", "3", "2-lora", "3-lora"])
def test_one_rank_resumes_the_checkpoint_of_two(results: dict[tuple[int, str], dict[str, Any]], case: str) -> None:
    result, reference = results[1, f"reshape-{case}"], results[2, f"resume-{case}"]
    assert _gap(result["weights"], reference["weights"]) < 1e-4
    assert result["checkpoints"] == ["000001"], "no other file or folder remains"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, f"cross-{pair}") for pair in ("3-2", "2-3", "2-0", "0-3", "1-2")] + [(1, f"cross-{pair}") for pair in ("3-0", "0-2")],
)
def test_another_zero_stage_resumes_a_checkpoint(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    """With the same number of ranks and with fewer. Weight decay creates two parameter groups, each with its options and step count."""
    result, reference = results[ranks, name], results[2, f"resume-{name[-1]}"]
    assert _gap(result["weights"], reference["weights"]) < 1e-4
    assert result["checkpoints"] == ["000001"], "no other file or folder remains"


@pytest.mark.parametrize(("ranks", "name"), [(2, "crossppo-3-0"), (2, "crossppo-2-3"), (2, "crossppo-0-2"), (1, "crossppo-0-3")])
def test_another_zero_stage_resumes_a_value_head(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    result, reference = results[ranks, name], results[2, f"shared-{name[-1]}"]
    assert _gap(result["weights"], reference["weights"]) < 1e-4
    assert _gap(result["heads"], reference["heads"][0]) < 1e-5


def test_an_unsuitable_checkpoint_raises_with_a_fix(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    errors = results[1, "refused-2"]
    assert "took no step; resume with the ranks and the learner.zero_stage" in errors["fresh"]
    assert "contains no critic; resume with the critic settings" in errors["no critic"]
    assert "it has no value.bias; resume with the model and the critic" in errors["no head"]
    assert "different parameter groups; resume with the learner.weight_decay and the critic" in errors["other groups"]


@pytest.mark.parametrize(("ranks", "name"), POISONED)
def test_a_nan_gradient_changes_nothing(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    """Weights and moments stay, the update is counted, and the next good update is the same as without it."""
    result = results[ranks, name]
    assert _gap(result["before"], result["after"]) == 0.0
    assert result["metrics"]["updates_left_out"] == 1
    assert result["metrics"]["optimizer_steps"] == 0
    assert _gap(result["after_next"], result["clean"]) == 0.0
    assert _gap(result["after_next"], result["before"]) > 0.0


@pytest.mark.parametrize(("ranks", "name"), [(1, "ppo-0"), (2, "ppo-2"), (2, "ppo-3")])
def test_ppo_updates_are_equal_on_all_ranks_and_stages(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    result, reference = results[ranks, name], results[1, "ppo-0"]
    assert _gap(result["before"], result["warmed"]) == 0.0, "only the critic is trained during its warm-up"
    assert _gap(result["weights"], result["warmed"]) > 1e-3
    assert _gap(result["weights"], result["resumed"]) == 0.0, "a resumed update is bitwise equal, including the critic"
    assert _gap(result["weights"], reference["weights"]) < 5e-4
    first, second = result["metrics"]
    assert first["optimizer_steps"] == 0 and second["optimizer_steps"] == 1
    assert first["value_mean"] == 0.0 and first["return_mean"] == pytest.approx(reference["metrics"][0]["return_mean"])
    for key in ("value_loss", "explained_variance", "advantage_std", "value_mean"):
        assert second[key] == pytest.approx(reference["metrics"][1][key], rel=5e-3, abs=1e-5), key


def test_critic_minibatches_are_steps_of_the_critic_only(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    one_rank, two_ranks, single = results[1, "ppo-0-3"], results[2, "ppo-2-3"], results[1, "ppo-0"]
    assert one_rank["metrics"][1]["optimizer_steps"] == 1
    assert one_rank["metrics"][0]["advantage_std"] == pytest.approx(single["metrics"][0]["advantage_std"])
    assert abs(one_rank["metrics"][1]["value_mean"] - single["metrics"][1]["value_mean"]) > 1e-3
    assert _gap(one_rank["weights"], two_ranks["weights"]) < 1e-3
    assert _gap(one_rank["weights"], one_rank["resumed"]) == 0.0


@pytest.mark.parametrize(("ranks", "name"), [(1, "shared-0"), (1, "shared-3"), (2, "shared-0"), (2, "shared-2"), (2, "shared-3")])
def test_updates_of_a_shared_trunk_are_equal_on_all_ranks_and_stages(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str
) -> None:
    result, reference = results[ranks, name], results[1, "shared-0"]
    assert _gap(result["before"], result["warmed"]) == 0.0, "the warm-up of the head does not change the trunk, not even by weight decay"
    assert _gap(result["weights"], result["warmed"]) == pytest.approx(1e-2, rel=0.02), "Adam's first step: the warm-up does not count"
    assert not any("value" in published for published in result["weights"])
    assert _gap(result["weights"], result["resumed"]) == 0.0
    assert _gap(*result["heads"]) == 0.0, "a resumed update is bitwise equal, including the head"
    assert _gap(result["weights"], reference["weights"]) < 5e-4
    assert _gap(result["heads"][0], reference["heads"][0]) < 5e-4
    first, second = result["metrics"]
    assert first["optimizer_steps"] == 0 and second["optimizer_steps"] == 1
    assert first["value_mean"] == 0.0 and abs(second["value_mean"]) > 1e-3
    for key in ("value_loss", "explained_variance", "advantage_std", "value_mean", "loss", "grad_norm"):
        assert second[key] == pytest.approx(reference["metrics"][1][key], rel=5e-3, abs=1e-5), key


def test_the_values_of_a_shared_trunk_are_computed_once_before_all_its_optimizer_steps(
    results: dict[tuple[int, str], dict[str, Any]],
) -> None:
    one_rank, two_ranks, single = results[1, "shared-0-3"], results[2, "shared-2-3"], results[1, "shared-0"]
    assert one_rank["metrics"][1]["optimizer_steps"] == 3
    assert _gap(one_rank["weights"], two_ranks["weights"]) < 1e-3
    assert one_rank["metrics"][0]["value_mean"] == 0.0
    assert _gap(one_rank["heads"][0], single["heads"][0]) > 1e-3


@pytest.mark.parametrize(("ranks", "name"), [(1, "odd-0"), (2, "odd-2")])
def test_edge_case_batches(results: dict[tuple[int, str], dict[str, Any]], ranks: int, name: str) -> None:
    result = results[ranks, name]
    for kind, empty in result["empty"].items():
        assert _gap(empty["before"], empty["after"]) == 0.0, kind
        assert (empty["metrics"]["optimizer_steps"], empty["metrics"]["updates_left_out"]) == (0, 0), kind
        assert "advantage_std" not in empty["metrics"] and "value_loss" not in empty["metrics"], kind
    short = result["short"]
    counts = {short["metrics"][name] for name in ("tokens_trained", "tokens_delivered")}
    assert counts == {short["samples"]} == {6}, "completions of one token, two of them in groups of one"
    assert short["metrics"]["optimizer_steps"] == 1 and short["metrics"]["grad_norm"] > 0
    assert _gap(short["before"], short["after"]) > 1e-3
    assert "contains token 5000, but the policy's vocabulary has 97" in result["unknown_token"]


def test_vllm_gets_full_tensors_and_the_tied_head(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    result = results[2, "source-3"]
    sent = dict(result["sent"])
    assert torch.equal(sent.pop("lm_head.weight"), sent["model.embed_tokens.weight"])
    assert _gap(sent, result["weights"]) == 0.0
    assert _gap(result["sent"], result["sent_again"]) == 0.0
    assert sorted(result["grouped"]) == sorted(result["sent"])


@pytest.mark.parametrize("name", ["gspo", "cispo", "reinforce++", "rloo"])
@pytest.mark.parametrize(("ranks", "scenario"), [(1, "objective-2-16384"), (2, "objective-3-256"), (4, "teams-2")])
def test_every_objective_gives_the_same_update_in_any_micro_batches_ranks_and_teams(
    results: dict[tuple[int, str], dict[str, Any]], ranks: int, scenario: str, name: str
) -> None:
    reference, result = results[1, "objective-0-256"][name], results[ranks, scenario][name]
    assert _gap(result["weights"], reference["weights"]) < 2e-4
    assert result["penalties"] == pytest.approx(reference["penalties"], rel=1e-4, abs=1e-5)
    for ours, theirs in zip(result["metrics"], reference["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - VARYING:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key


def test_the_kl_reference_model_stays_version_0(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    """Policy and KL reference model have the same weights before the first update only. Without a KL term there is no reference."""
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


def test_different_objectives_give_different_updates(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    weights = [results[1, "objective-0-256"][name]["weights"] for name in ("gspo", "cispo", "reinforce++", "rloo")]
    weights.append(results[1, "stage-0"]["weights"])
    assert all(_gap(first, second) > 1e-4 for at, first in enumerate(weights) for second in weights[:at])


@pytest.mark.parametrize("stage", [0, 2])
def test_checkpoint_files_run_no_code(results: dict[tuple[int, str], dict[str, Any]], stage: int) -> None:
    result = results[1, f"hostile-{stage}"]
    assert not result["ran"] and result["files"] >= 2
    assert {file for target, file in result["errors"] if target == stage} >= {"rng_00.pt", "state/mp_rank_00_model_states.pt"}
    for message in result["errors"].values():
        assert (
            "contains objects other than tensors and plain values" in message
            and "none of its code was run" in message
            and "system" in message
        )
        assert "resume from a checkpoint that this run wrote" in message and "weights_only" not in message
