"""Imports of tiny models of real classes, from folders and GGUF files."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.agent.chat import load_chat
from agentrl.agent.template import probe_tokenizer, read_template
from agentrl.errors import UserError
from agentrl.model import import_model, importing
from agentrl.model.importing import RECORD
from agentrl.records import Message
from agentrl.testing.tiny_model import make_model, make_tokenizer
from agentrl.version.model_folder import check_model
from tests.forking import tried

pytestmark = pytest.mark.usefixtures("forked_trials")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(0, layers=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("do as you like")
    return folder


@pytest.fixture(scope="module")
def imported(source: Path) -> Path:
    """The folder that an import of `source` wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.agent.template._try", tried)
        import_model(str(source), source.with_name("imported"), chat_template="hermes")
    return source.with_name("imported")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy of the source for a test to damage."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_an_imported_folder_passes_all_checks(source: Path, imported: Path) -> None:
    check_model(imported)
    before, after = load_file(source / "model.safetensors"), load_file(imported / "model.safetensors")
    assert before.keys() == after.keys() and "lm_head.weight" not in after, "tied embeddings stay tied"
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (imported / "chat_template.jinja").read_text() == read_template("hermes", Path())
    assert "chat_template" not in json.loads((imported / "tokenizer_config.json").read_text())
    assert (imported / "LICENSE").read_text() == "do as you like"
    record = json.loads((imported / RECORD).read_text())
    assert record["model"] == {"type": "qwen3", "parameters": sum(tensor.numel() for tensor in after.values()), "dtype": "float32"}
    assert record["chat_template"]["name"] == "hermes" and record["chat_template"]["shows_tools"]
    assert set(record["files"]) == {path.name for path in imported.iterdir()} - {RECORD}
    assert str(source.parent) not in json.dumps(record), "a record contains no path of this machine"


@pytest.mark.slow
def test_the_same_import_again_does_nothing(source: Path, imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_make", None)
    second = import_model(str(source), imported, chat_template="hermes")
    assert not second.fresh and second.record["model"]["type"] == "qwen3"


@pytest.mark.slow
def test_an_existing_folder_is_replaced_only_with_force(source: Path, imported: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(imported, tmp_path / "there"))
    (target / "config.json").write_text("{}")
    with pytest.raises(UserError, match="contains a different model, or a modified one\n  fix: choose a different folder, or use --force"):
        import_model(str(source), target, chat_template="hermes")
    assert import_model(str(source), target, dtype="bfloat16", force=True).fresh
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert not load_chat(str(target)).shows_tools(), "the model's own template"


def test_force_removes_nothing_but_models(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path)
    for target, reason in (
        (tmp_path, "is not a model folder"),
        (tmp_path / "thesis.txt", "is not a folder"),
        (tmp_path / "link", "is not a folder"),
        (source, "contains the source"),
        (source.parent, "contains the source"),
    ):
        with pytest.raises(UserError, match=reason):
            import_model(str(source), target, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_force_removes_nothing_but_the_files_of_a_model(source: Path, imported: Path, tmp_path: Path) -> None:
    for name in ("thesis.txt", "package.json", "src/main.py"):
        target = Path(shutil.copytree(imported, tmp_path / Path(name).stem))
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("years of work")
        with pytest.raises(UserError, match=f"does not delete: '{name.partition('/')[0]}'"):
            import_model(str(source), target, force=True)
        assert (target / name).read_text() == "years of work"


def test_the_current_folder_is_not_replaced(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", "..", "../empty"):
        with pytest.raises(UserError, match="is the current folder"):
            import_model(str(source), Path(name), force=True)


@pytest.mark.slow
def test_a_concurrent_import_into_the_same_folder_raises(source: Path, tmp_path: Path) -> None:
    """Both would write into the same temporary folder, and the result would be neither model."""
    errors = []

    def import_again(stage: str) -> None:
        with pytest.raises(UserError, match="another import is writing") as error:
            import_model(str(source), tmp_path / "model", dtype="bfloat16")
        errors.append(error)

    assert import_model(str(source), tmp_path / "model", on_stage=import_again).fresh and len(errors) >= 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "neither a temporary folder nor a lock remains"


def test_an_unwritable_target_raises(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "model", Path("/proc/model")):
        with pytest.raises(UserError, match="fix: correct the problem, or choose a different"):
            import_model(str(source), target)


def test_a_licence_is_recorded_as_one_plain_line() -> None:
    assert importing._plain("mit\x1b[2J\n\nor\u202e" + "x" * 5000) == "mit[2J or" + "x" * 91


def test_a_failed_import_leaves_no_files(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", vocab_size=100)
    with pytest.raises(UserError, match="vocabulary has only 100"):
        import_model(str(folder), tmp_path / "made" / "model")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_full_disk_raises_before_the_weights_are_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(100, 100, 5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs \d+ MiB, but only 5 MiB are free"):
        import_model(str(source), tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "it cannot be loaded exactly"),
        ({"num_hidden_layers": 10**9}, "has 1000000000 layers, but the files contain 24 tensors"),
        ({"hidden_size": 10**7}, "it cannot be loaded exactly|no model can be built"),
        ({"num_hidden_layers": 1}, "contain the unused tensors model.layers.1"),
        ({"model_type": "mamba2", "state_size": 16}, "does more than attention"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "requires custom code, which agentrl never runs"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"are quantized \(gptq\) and cannot be trained"),
        ({"model_type": "nobody_knows", "architectures": []}, "transformers cannot read config.json"),
    ],
)
def test_a_configuration_that_does_not_match_its_weights_raises(changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", layer_types=None, **changes)
    with pytest.raises(UserError, match=reason):
        import_model(str(folder), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_missing_layer_raises(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["elsewhere"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"the files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        import_model(str(folder), tmp_path / "model")


LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "has no chat template"),
        ("{{ raise_exception('never') }}", "cannot render messages of user, assistant, tool, tool: TemplateError: never"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end an assistant turn with '<|im_end|>'".replace("|", r"\|")),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "does not show tool outputs",
        ),
        ("{% for m in messages %}<|turn|>{{ m.content }}<|im_end|>{% endfor %}", r"writes '<\|turn\|>', which this tokenizer splits"),
        pytest.param(LOOPS, "exceeds its limits", marks=pytest.mark.slow),
        pytest.param("{% if messages|length > 4 %}" + LOOPS + "{% endif %}", "exceeds its limits", marks=pytest.mark.slow),
    ],
)
def test_a_template_that_cannot_be_extended_raises(
    template: str, reason: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "probe_tokenizer", lambda folder, text: probe_tokenizer(folder, text, cpu_s=0.5))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=reason) as error:
        import_model(str(folder), tmp_path / "model")
    assert "policy." not in str(error.value), "an import has command-line options, but no recipe"


def test_prompts_of_an_imported_model_have_no_system_message(imported: Path) -> None:
    chat = load_chat(str(imported))
    ids = chat.opening([Message(role="user", content="1 + 1?")], [])
    assert make_tokenizer().decode(list(ids)) == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n", (
        "the template adds no system message"
    )


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


A_THOUSAND = replacing({"String": "a"}, "a" * 1000)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "rule",
    [
        A_THOUSAND,
        {
            "type": "Sequence",
            "normalizers": [replacing({"String": "a"}, "a" * 5)] * 3,
            "decoders": [replacing({"Regex": "a"}, "a" * 5)] * 3,
        },
        replacing({"String": ""}, "a"),
        replacing({"Regex": "a*"}, "b"),
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 99}], "decoders": [A_THOUSAND]},
    ],
)
def test_an_expanding_tokenizer_raises(part: str, rule: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """It raises before any library reads the tokenizer: three such rules would use up all memory."""
    edit(folder / "tokenizer.json", **{part: rule})
    with pytest.raises(UserError, match=f"tokenizer.json: its {part} turns one character into more than 64, or replaces an empty match"):
        import_model(str(folder), tmp_path / "model")


@pytest.mark.slow
def test_a_tokenizer_that_crashes_its_library_raises(folder: Path) -> None:
    """A panic of the library is no `Exception` and ends its process, so the tokenizer is tried in a child process."""
    edit(folder / "tokenizer.json", normalizer=replacing({"String": ""}, "a"))
    with pytest.raises(UserError, match=r"cannot be used: |exceeds its limits"):
        load_chat(str(folder))
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [A_THOUSAND] * 3})
    with pytest.raises(UserError, match="exceeds its limits"):
        probe_tokenizer(str(folder))
