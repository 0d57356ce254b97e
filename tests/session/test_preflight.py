from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import namedtuple
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.running import load_recipe, run_folder
from agentrl.cluster import device
from agentrl.config import Part, PolicyConfig, Recipe, SamplingConfig, TasksConfig
from agentrl.errors import UserError
from agentrl.session.models import SAMPLING_FILE, copy_base_version, export_model, find_model
from agentrl.session.preflight import open_tasks, run_preflight
from agentrl.version.model_folder import check_model, check_safetensors
from tests.evaluation.suite_parts import make_case, make_suite

ROOT = Path(__file__).resolve().parents[2]
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
    with pytest.raises(UserError, match=r"policy\.model: there is no folder"):
        find_model(model, tmp_path)


def test_the_error_for_an_incomplete_model_folder_names_the_missing_files(tmp_path: Path) -> None:
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
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
FITS = {**KIND, "max_position_embeddings": 2048, "vocab_size": 3}


@pytest.mark.parametrize(
    ("config", "tokenizer", "error"),
    [
        (FITS, TOKENIZER, None),
        ({**FITS, "max_position_embeddings": 2047}, TOKENIZER, r"^policy\.max_model_len=2048, but .* context of 2047"),
        ({**FITS, "max_position_embeddings": 1024, "rope_scaling": {"factor": 2.0}}, TOKENIZER, None),
        ({**KIND, "text_config": {**FITS, "max_position_embeddings": 512}}, TOKENIZER, "context of 512"),
        ({**FITS, "quantization_config": {"quant_method": "gptq"}}, TOKENIZER, r"quantized \(gptq\)"),
        ({**FITS, "vocab_size": 2}, TOKENIZER, "has token id 2, but the model's vocabulary has only 2 tokens"),
        ({**FITS, "vocab_size": 2}, {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, "has token id 2"),
    ],
)
def test_a_model_that_does_not_fit_the_recipe_raises(
    config: dict[str, object], tokenizer: dict[str, object], error: str | None, tmp_path: Path
) -> None:
    folder = _described(tmp_path / "m", config, tokenizer)
    if error is None:
        check_model(folder, RECIPE)
    else:
        with pytest.raises(UserError, match=error):
            check_model(folder, RECIPE)


def test_truncation_to_more_than_the_vocabulary_raises(tmp_path: Path) -> None:
    folder = _described(tmp_path / "m", {**FITS, "vocab_size": 40}, TOKENIZER)
    check_model(folder, RECIPE.but("rollout.sampling.top_k=32"))
    with pytest.raises(UserError, match=r"top_k=33 does not truncate: .* a vocabulary of 40"):
        check_model(folder, RECIPE.but("rollout.sampling.top_k=33"))


def test_the_base_policy_fits() -> None:
    quickstart = RECIPE.model_copy(update={"policy": PolicyConfig(model="recipes/models/tables-base", max_model_len=512)})
    check_model(find_model("recipes/models/tables-base", ROOT), quickstart)


def test_the_error_names_truncated_and_invalid_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    cases = {
        SAFETENSORS[:-1]: r"is truncated: it has \d+ bytes instead of \d+",
        SAFETENSORS + b"x": "is damaged",
        SAFETENSORS[:20]: "not a safetensors file, or is truncated",
        b"": "not a safetensors file, or is truncated",
        SAFETENSORS[:8] + b"{" * len(HEADER) + bytes(8): "damaged header",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "Git LFS pointer",
    }
    for data, message in cases.items():
        file.write_bytes(data)
        with pytest.raises(UserError, match=message):
            find_model("m", tmp_path)
    file.unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(SAFETENSORS)
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors"):
        find_model("m", tmp_path)


@given(st.integers(0, len(SAFETENSORS) - 1))
def test_a_truncated_weight_file_never_passes(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(SAFETENSORS[:length])
        with pytest.raises(UserError):
            check_safetensors(path)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_the_error_names_a_missing_file(missing: str, tmp_path: Path) -> None:
    (model_folder(tmp_path / "m") / missing).unlink()
    with pytest.raises(UserError, match=f"lacks {missing}"):
        find_model("m", tmp_path)


def test_a_template_may_be_in_its_own_file_but_must_exist(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no chat template"):
        find_model("m", tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert find_model("m", tmp_path) == folder


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"model_type": "mamba", "state_size": 16}, r"'mamba' does more than attention .* \(it has no attention heads\)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"mamba_d_conv": 4}, "mamba_d_conv is set"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        ({"final_logit_softcapping": None, "logit_scale": 1.0}, None),
        ({"logit_scale": 0.0625}, "logit_scale=0.0625"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"auto_map": {"AutoModel": "mine.Mine"}}, "custom code"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "does not generate text"),
        ({"model_type": None}, "has no model_type"),
        ({"text_config": {"num_attention_heads": 2, "layer_types": ["conv"]}}, "layers of type conv"),
    ],
)
def test_a_model_type_that_the_learner_rejects_fails_before_the_start(config: dict[str, object], error: str | None, tmp_path: Path) -> None:
    folder = _described(tmp_path / "m", {**KIND, **config}, {})
    if config.get("model_type") == "mamba":
        (folder / "config.json").write_text(json.dumps(config))
    if error is None:
        check_model(folder, RECIPE)
    else:
        with pytest.raises(UserError, match=error):
            check_model(folder, RECIPE)


def test_an_unknown_model_type_is_reported_without_importing_transformers(tmp_path: Path) -> None:
    folder = _described(tmp_path / "m", {**KIND, "model_type": "no_such"}, {})
    recipe = RECIPE.model_copy(update={"policy": PolicyConfig(model=str(folder))})
    with pytest.raises(UserError, match="does not support the model type 'no_such'"):
        run_preflight(recipe, tmp_path, root=tmp_path)


@pytest.mark.slow
def test_failed_checks_import_nothing_heavy(tmp_path: Path) -> None:
    """Runs commands in one process that fail at every stage up to the last check before torch is needed."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "recipe.json").write_text("{}")
    (tmp_path / "syntax.py").write_text("recipe = (\n")
    (tmp_path / "family.py").write_text("class F:\n    def __init__(self, seed):\n        raise KeyError('gone')\n")
    model_folder(tmp_path / "m")
    q = "recipes/quickstart.py"
    commands = [
        [str(tmp_path / "syntax.py")],
        [q, "learner.lrr=1"],
        [q, "--run-dir", str(tmp_path / "held")],
        [q, "--run-dir", str(tmp_path / "none"), "--resume"],
        [q, "--run-dir", str(tmp_path / "run"), f"policy.model={tmp_path}/none"],
        [q, "--run-dir", str(tmp_path / "run"), f"tasks.family={tmp_path}/family.py:F"],
    ]
    code = f"""
import contextlib, io, json, sys
from agentrl.cli import main
runs = []
for command in {commands!r}:
    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            main(["train", *command])
        except SystemExit as error:
            runs.append([error.code, output.getvalue()])
print(json.dumps([runs, sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "vllm", "transformers", "deepspeed", "trl"}})]))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    errors, heavy = json.loads(result.stdout)
    assert heavy == []
    for (exit_code, text), expected in zip(
        errors,
        ["syntax.py:1: SyntaxError", "learner.lrr: unknown key", "already contains a run", "no run to resume", "no folder",
         "KeyError: 'gone'"],
        strict=True,
    ):  # fmt: skip
        assert exit_code == 2 and expected in text and "Traceback" not in text and len(text.splitlines()) <= 2, text
    assert "family.py:3" in errors[5][1] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_the_error_names_a_damaged_file(name: str, tmp_path: Path) -> None:
    (model_folder(tmp_path / "m") / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name} is not JSON"):
        find_model("m", tmp_path)


def test_a_full_disk_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(100, 100, 5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="only 5 MiB are free"):
        run_preflight(RECIPE, tmp_path, root=tmp_path)


def test_the_base_version_is_a_copy_and_the_export_a_clean_model_folder(tmp_path: Path) -> None:
    source, base = model_folder(tmp_path / "m"), tmp_path / "run" / "versions" / "000000"
    copy_base_version(source, base)
    (source / "model.safetensors").write_text("changed later")
    assert (base / "model.safetensors").read_bytes() == SAFETENSORS
    (base / "probe.json").write_text("{}")
    for _ in range(2):
        export_model(base, tmp_path / "run" / "model", base=base, sampling=SamplingConfig())
    assert sorted(p.name for p in (tmp_path / "run" / "model").iterdir()) == sorted([*MODEL_FILES, "probe.json", SAMPLING_FILE])


def test_a_sharded_model_becomes_one_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = model_folder(tmp_path / "m")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text("{}")
    for number in (1, 2):
        save_file({f"layer{number}": torch.full((2,), float(number))}, source / f"model-0000{number}-of-00002.safetensors")
    copy_base_version(find_model("m", tmp_path), tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    assert sorted(weights) == ["layer1", "layer2"] and weights["layer2"].tolist() == [2.0, 2.0]
    assert sorted(p.name for p in (tmp_path / "base").iterdir()) == MODEL_FILES


class Own:
    """A family whose tasks have the fault in `gives`."""

    def __init__(self, *, seed: int = 0, gives: str = "") -> None:
        self.gives = gives
        if gives == "exit at once":
            raise SystemExit("bye")

    def size(self, split: str) -> object:
        return {"text": "many", "none": 0, "none held out": 0 if split == "heldout" else None}.get(self.gives)

    def task(self, split: str, index: int) -> object:
        if self.gives == "exit":
            raise SystemExit(0)
        return {"id": "1"}

    def gold(self, task: object) -> str:
        return ""


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        ("exit at once", r"cannot be opened: SystemExit: bye \(.*test_preflight.py:\d+\)"),
        ("exit", r"the first task .* is broken: SystemExit: 0 \("),
        ("dict", "the first task .* has type dict instead of Task"),
        ("text", r"size\(train\) returned str instead of a number"),
        ("none", "no tasks in split train"),
        ("none held out", "(?s)no tasks in split heldout.*fix: add some, or set evaluation.heldout=0"),
    ],
)
def test_a_family_without_a_valid_task_fails_before_anything_is_loaded(gives: str, message: str) -> None:
    tasks = TasksConfig(family=Part(f"{__file__}:Own", options={"gives": gives}))
    with pytest.raises(UserError, match=message):
        open_tasks(RECIPE.but(tasks=tasks), root=ROOT)


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        ({"max_position_embeddings": "many"}, {}),
        ({"quantization_config": "int4"}, {}),
        ({"architectures": 3}, {}),
        ({"text_config": [1]}, {}),
        ({"vocab_size": 3}, {"model": {"vocab": {"a": "b"}}}),
        ({"vocab_size": 3}, {"model": [], "added_tokens": {"id": 1}}),
    ],
)
def test_a_model_folder_with_wrong_types_raises(config: dict[str, object], tokenizer: dict[str, object], tmp_path: Path) -> None:
    folder = _described(tmp_path / "m", {**KIND, **config}, tokenizer)
    with pytest.raises(UserError, match=r"is a \w+, not a|contains a token without a valid id") as error:
        check_model(folder, RECIPE)
    assert "save_pretrained" in error.value.fix


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("verb", ["train", "eval", "sample"])
def test_without_training_the_gates_own_server_needs_no_gpu(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(device, "_installed", lambda distribution: distribution == "vllm")
    make_suite(tmp_path / "x", make_case("c"))
    root, recipe = load_recipe(ROOT / "recipes" / "quickstart.py", [])
    overrides = (f"gate.suite={json.dumps(str(tmp_path / 'x'))}", "gate.server=own", "device=auto")
    too_few = r"gate\.server=own with learner\.ranks=1 needs 2 GPUs, but only 1 is"
    expectation = nullcontext() if verb != "train" else pytest.raises(UserError, match=too_few)
    with (
        expectation,
        run_folder(root, Path("recipes/quickstart.py"), recipe, overrides, tmp_path / "run", verb=verb) as (_, _, checked),
    ):
        assert checked.plan.devices == {}
