from __future__ import annotations

import json
import shutil
import struct
from collections import namedtuple
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.model_folder import check_model
from agentrl.preflight import check, export_model, find_model, place_base_version
from agentrl.recipe import PolicyConfig, Recipe, TasksConfig

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)


MODEL_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 1}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(SAFETENSORS)
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


KIND = {"model_type": "qwen3", "num_attention_heads": 2}
WORDS = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
FITS = {**KIND, "max_position_embeddings": 1024, "vocab_size": 3}


@pytest.mark.parametrize(
    ("config", "tokenizer", "wrong"),
    [
        (FITS, WORDS, None),
        ({**FITS, "max_position_embeddings": 1023}, WORDS, r"max_model_len=1024, but .* context of 1023"),
        ({**FITS, "max_position_embeddings": 512, "rope_scaling": {"factor": 2.0}}, WORDS, None),
        ({**KIND, "text_config": {**FITS, "max_position_embeddings": 512}}, WORDS, "context of 512"),
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    (model_folder(tmp_path / "m") / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name} is not JSON"):
        find_model("m", tmp_path)


def test_a_full_disk_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(100, 100, 5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="only 5 MiB are free"):
        check(RECIPE, tmp_path, root=tmp_path)


def test_base_version_is_a_copy_and_the_export_a_clean_model_folder(tmp_path: Path) -> None:
    source, base = model_folder(tmp_path / "m"), tmp_path / "run" / "versions" / "000000"
    place_base_version(source, base)
    (source / "model.safetensors").write_text("changed later")
    assert (base / "model.safetensors").read_bytes() == SAFETENSORS
    (base / "probe.json").write_text("{}")
    for _ in range(2):
        export_model(base, tmp_path / "run" / "model", base=base)
    assert sorted(p.name for p in (tmp_path / "run" / "model").iterdir()) == MODEL_FILES


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
    assert sorted(p.name for p in (tmp_path / "base").iterdir()) == MODEL_FILES
