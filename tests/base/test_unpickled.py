"""No file is read by a reader that can run code from the file: no pickle, no YAML objects, no code of a model folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, imports_and_calls, sources

# Modules whose readers can run code from their input. Only the exec server uses marshal, for bytes from its parent.
RUNS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle", "torch.multiprocessing")
ALLOWED = {
    ROOT / "agentrl/learner/universal_checkpoint.py": {"pickle"},  # only the name of its error
    ROOT / "agentrl/sandbox/inside/spawn.py": {"marshal"},
}
FOLDERS = ("agentrl", "recipes", "rewards", "sandboxes")


def is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def find_unsafe_readers(path: Path) -> list[str]:
    errors = []
    for node in imports_and_calls(path):
        if isinstance(node, ast.Call):
            errors += find_unsafe_calls(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        errors += [f"line {node.lineno} imports {name}" for name in names if name in RUNS and name not in ALLOWED.get(path, set())]
    return errors


def find_unsafe_calls(node: ast.Call) -> list[str]:
    if not getattr(node.func, "attr", getattr(node.func, "id", "")).endswith(("load", "eval", "from_pretrained", "read_pickle")):
        return []
    errors, name, keywords = [], ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    where = f"line {node.lineno}: {name}"
    if name == "torch.load" and not is_true(keywords.get("weights_only")):
        errors.append(f"{where} without weights_only=True")
    if name in ("numpy.load", "np.load") and "allow_pickle" in keywords and not is_false(keywords["allow_pickle"]):
        errors.append(f"{where} with pickles")
    if name.endswith(".from_pretrained") and not is_false(keywords.get("trust_remote_code")) and "gguf_file" not in keywords:
        errors.append(f"{where} without trust_remote_code=False")
    weights = name.endswith(".from_pretrained") and not any(
        part in name for part in ("Tokenizer", "tokenizer", "AutoConfig", "AutoProcessor")
    )
    if weights and not (is_true(keywords.get("use_safetensors")) or any(keyword.arg is None for keyword in node.keywords)):
        errors.append(f"{where} without use_safetensors=True")
    if name == "eval" or name.endswith(("read_pickle", "unsafe_load", "full_load")):
        errors.append(where)
    return errors


@pytest.mark.slow
def test_no_reader_runs_code_from_its_input() -> None:
    assert {str(path): errors for path in sources(*FOLDERS) if (errors := find_unsafe_readers(path))} == {}


def test_every_unsafe_reader_is_detected(tmp_path: Path) -> None:
    for number, text in enumerate(
        (
            "import pickle",
            "from yaml import load",
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "np.load(path, allow_pickle=True)",
            "AutoTokenizer.from_pretrained(folder)",
            "AutoModel.from_pretrained(folder, trust_remote_code=False)",
            "AutoModel.from_pretrained(folder, trust_remote_code=True, use_safetensors=True)",
            "eval(text)",
        )
    ):
        (path := tmp_path / f"{number}.py").write_text(text)
        assert find_unsafe_readers(path), text
