"""No file is read by a reader that can run what the file names: no pickle, no YAML objects, no code of a model folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, imports_and_calls, sources

# Modules whose readers run what they read. marshal is left to the exec server, which reads its parent's own bytes with it.
RUNS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle", "torch.multiprocessing")
MAY = {
    ROOT / "agentrl/learner/universal_checkpoint.py": {"pickle"},  # the name of the error alone
    ROOT / "agentrl/sandbox/inside/spawn.py": {"marshal"},
}
FOLDERS = ("agentrl", "recipes", "rewards", "sandboxes")


def false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def wrong(path: Path) -> list[str]:
    found = []
    for node in imports_and_calls(path):
        if isinstance(node, ast.Call):
            found += wrong_call(node)
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno} imports {name}" for name in names if name in RUNS and name not in MAY.get(path, set())]
    return found


def wrong_call(node: ast.Call) -> list[str]:
    if not getattr(node.func, "attr", getattr(node.func, "id", "")).endswith(("load", "eval", "from_pretrained", "read_pickle")):
        return []
    found, name, given = [], ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}
    where = f"line {node.lineno}: {name}"
    if name == "torch.load" and not true(given.get("weights_only")):
        found.append(f"{where} without weights_only=True")
    if name in ("numpy.load", "np.load") and "allow_pickle" in given and not false(given["allow_pickle"]):
        found.append(f"{where} with pickles")
    if name.endswith(".from_pretrained") and not false(given.get("trust_remote_code")) and "gguf_file" not in given:
        found.append(f"{where} without trust_remote_code=False")
    weights = name.endswith(".from_pretrained") and not any(
        part in name for part in ("Tokenizer", "tokenizer", "AutoConfig", "AutoProcessor")
    )
    if weights and not (true(given.get("use_safetensors")) or any(word.arg is None for word in node.keywords)):
        found.append(f"{where} without use_safetensors=True")
    if name == "eval" or name.endswith(("read_pickle", "unsafe_load", "full_load")):
        found.append(where)
    return found


@pytest.mark.slow
def test_no_reader_runs_what_it_reads() -> None:
    assert {str(path): said for path in sources(*FOLDERS) if (said := wrong(path))} == {}


def test_the_test_sees_each_of_them(tmp_path: Path) -> None:
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
        assert wrong(path), text
