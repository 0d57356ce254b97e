"""A run's exported model is sampled as in its evaluation, and evaluations with different sampling are not compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import PolicyConfig, Recipe, SamplingConfig, TasksConfig
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.policies import find_policy, recipe_for
from agentrl.session.models import SAMPLING_FILE, export_model
from tests.evaluation.suite_parts import make_case, make_suite


def model_of(folder: Path, **more: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    (folder / "model.safetensors").write_bytes(b"weights")
    for name, text in more.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def sampling_of(folder: Path, tmp_path: Path, *overrides: str) -> SamplingConfig:
    suite = make_suite(tmp_path / "suite", make_case("a"))
    return recipe_for(find_policy(str(folder)), [suite], overrides).evaluation.sampling


def test_the_exported_model_keeps_its_sampling_when_it_is_moved(tmp_path: Path) -> None:
    base = model_of(tmp_path / "run" / "versions" / "000000", agentrl_sampling_json='{"temperature": 1.0}')
    export_model(base, tmp_path / "run" / "model", base=base, sampling=SamplingConfig(temperature=0.0))
    moved = (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    assert sampling_of(moved, tmp_path) == SamplingConfig(temperature=0.0)
    assert sampling_of(moved, tmp_path, "evaluation.sampling.temperature=0.5").temperature == 0.5, "the user's override wins"
    assert json.loads((base / SAMPLING_FILE).read_text()) == {"temperature": 1.0}, "the version is unchanged"
    (moved / "config.json").unlink()


def test_a_version_has_the_same_sampling_by_folder_and_by_number(tmp_path: Path) -> None:
    version = model_of(tmp_path / "run" / "versions" / "000003")
    recipe = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F")).but(
        {"evaluation.sampling.temperature": 0.7, "evaluation.sampling.top_k": 20}
    )
    (tmp_path / "run" / "recipe.json").write_text(recipe.model_dump_json())
    suite = make_suite(tmp_path / "suite", make_case("a"))
    samplings = [recipe_for(find_policy(name), [suite]).evaluation.sampling for name in (str(version), f"{tmp_path / 'run'}@3")]
    assert samplings == [SamplingConfig(temperature=0.7, top_k=20)] * 2


def test_a_model_id_is_a_policy_and_a_mistyped_path_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--policy` accepts every model that `--model` accepts, but the message for a mistyped run must not be about the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    policy = find_policy("Qwen/Qwen3-0.6B")
    assert policy.served and recipe_for(policy, [make_suite(tmp_path / "suite", make_case("a"))]).policy.model == "Qwen/Qwen3-0.6B"
    for mistyped in ("runs/quikstart", "./Qwen/Qwen3-0.6B", "Qwen", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match="no such folder or version of a run"):
            find_policy(mistyped)


def test_a_third_party_model_uses_the_default_sampling(tmp_path: Path) -> None:
    assert sampling_of(model_of(tmp_path / "m"), tmp_path) == SamplingConfig()


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"temperature": "hot", "top_k": 0, "top_p": 1, "min_p": 0}', "[" * 100_000])
def test_an_invalid_sampling_record_raises(text: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, ValueError)):
        sampling_of(model_of(tmp_path / "m", agentrl_sampling_json=text), tmp_path)


def test_different_sampling_gives_no_verdict_unless_forced(tmp_path: Path) -> None:
    def save_evaluation(name: str, score: float, **sampling: Any) -> str:
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "supports": False} | sampling
        about = results.EvaluationInfo(
            suite="s", suite_sha256="a", cases=40, repeats=1, model="m", version=0, sha256=name, recipe="r", recipe_sha256="",
            sampling=settings, seed=0, threshold=1.0, agentrl="0", at="2026-11-25T00:00:00+00:00",
        )  # fmt: skip
        attempt = results.CaseAttempt(case="c", task_key="k", number=0, episode="e", score=score)
        results.save_results(
            tmp_path / name, results.SuiteResults(about=about, attempts=tuple(replace(attempt, case=f"c{n}") for n in range(40))), []
        )
        return str(tmp_path / name)

    def verdict_of(*arguments: str) -> tuple[str, Any]:
        printed, report = (CliRunner().invoke(app, ["compare", *arguments, *more]) for more in ((), ("--json",)))
        assert printed.exception is None and report.exception is None, printed.exception
        return next(line for line in printed.output.splitlines() if line.startswith("verdict")), json.loads(report.output)["verdict"]

    sampled, greedy, again = save_evaluation("sampled", 0.0), save_evaluation("greedy", 1.0, temperature=0.0), save_evaluation("again", 1.0)
    line, verdict = verdict_of(sampled, greedy)
    assert (
        verdict is None
        and "none because the sampling settings differ" in line
        and "temperature 1.0" in line
        and "temperature 0.0" in line
        and "better" not in line
    )
    assert verdict_of(sampled, greedy, "--across-sampling")[1] == "better" and verdict_of(sampled, again)[1] == "better"
    assert verdict_of(save_evaluation("cut", 1.0, top_k=20), again)[1] is None
