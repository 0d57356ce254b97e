from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from agentrl.errors import RecipeError, UserError
from agentrl.preflight import check_model, export_model, find_model, open_run_folder, place_base_version
from agentrl.recipe import PolicyConfig, Recipe, TasksConfig, apply_overrides

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


def model_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize("model", ["./absent", "recipes/models/absent", "absent"])
def test_missing_model_folder(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.model: no folder"):
        find_model(model, tmp_path)


def test_incomplete_model_folder_names_what_is_missing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert find_model("m", tmp_path) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks \*\.safetensors"):
        find_model("m", tmp_path)


def _described(path: Path, config: dict[str, object], tokenizer: dict[str, object]) -> Path:
    folder = model_folder(path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


WORDS = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
FITS = {"max_position_embeddings": 1024, "vocab_size": 3}


@pytest.mark.parametrize(
    ("config", "tokenizer", "wrong"),
    [
        (FITS, WORDS, None),
        ({**FITS, "max_position_embeddings": 1023}, WORDS, r"max_model_len=1024, but .* context of 1023"),
        ({**FITS, "max_position_embeddings": 512, "rope_scaling": {"factor": 2.0}}, WORDS, None),
        ({"text_config": {**FITS, "max_position_embeddings": 512}}, WORDS, "context of 512"),
        ({**FITS, "quantization_config": {"quant_method": "gptq"}}, WORDS, r"quantized \(gptq\)"),
        ({**FITS, "vocab_size": 2}, WORDS, "knows token 2, but the model's vocabulary has 2"),
        ({**FITS, "vocab_size": 2}, {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, "knows token 2"),
    ],
)
def test_a_model_that_does_not_fit_the_recipe_is_refused(
    config: dict[str, object], tokenizer: dict[str, object], wrong: str | None, tmp_path: Path
) -> None:
    folder = _described(tmp_path / "m", config, tokenizer)
    if wrong is None:
        check_model(folder, RECIPE)
    else:
        with pytest.raises(UserError, match=wrong):
            check_model(folder, RECIPE)


def test_the_base_policy_fits() -> None:
    root = Path(__file__).resolve().parent.parent
    quickstart = RECIPE.model_copy(update={"policy": PolicyConfig(model="recipes/models/tables-base", max_model_len=512)})
    check_model(find_model("recipes/models/tables-base", root), quickstart)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        check_model(model_folder(tmp_path / "m"), RECIPE)


def test_a_run_folder_is_not_reused_by_accident(tmp_path: Path) -> None:
    run = tmp_path / "run"
    open_run_folder(RECIPE, run, resume=False)
    with pytest.raises(UserError, match="--resume"):
        open_run_folder(RECIPE, run, resume=False)
    open_run_folder(apply_overrides(RECIPE, ["steps=99", "learner.ranks=2", "learner.zero_stage=3"]), run, resume=True)
    with pytest.raises(RecipeError, match="differs from the run's own in: learner"):
        open_run_folder(apply_overrides(RECIPE, ["learner.lr=1e-4"]), run, resume=True)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"):
        open_run_folder(RECIPE, tmp_path / "none", resume=True)


def test_a_full_disk_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(100, 100, 5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="only 5 MiB are free"):
        open_run_folder(RECIPE, tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_base_version_is_a_copy_and_the_export_a_clean_model_folder(tmp_path: Path) -> None:
    source, base = model_folder(tmp_path / "m"), tmp_path / "run" / "versions" / "000000"
    place_base_version(source, base)
    (source / "model.safetensors").write_text("changed later")
    assert (base / "model.safetensors").read_text() == "model.safetensors"
    (base / "probe.json").write_text("{}")
    for _ in range(2):
        export_model(base, tmp_path / "run" / "model", base=base)
    assert sorted(p.name for p in (tmp_path / "run" / "model").iterdir()) == ["config.json", "model.safetensors", "tokenizer_config.json"]


def test_a_sharded_model_becomes_one_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = model_folder(tmp_path / "m")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text("{}")
    for number in (1, 2):
        save_file({f"layer{number}": torch.full((2,), float(number))}, source / f"model-0000{number}-of-00002.safetensors")
    place_base_version(find_model("m", tmp_path), tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    assert sorted(weights) == ["layer1", "layer2"] and weights["layer2"].tolist() == [2.0, 2.0]
    assert sorted(p.name for p in (tmp_path / "base").iterdir()) == ["config.json", "model.safetensors", "tokenizer_config.json"]
