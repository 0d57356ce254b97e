from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.agent import template as template_module
from agentrl.agent.template import MAX_BYTES, SHIPPED_TEMPLATES, probe_template, probe_tokenizer, read_template
from agentrl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LATE = "{% if messages|length > 4 %}" + LOOPS + "{% endif %}"


def test_a_template_is_a_shipped_name_or_a_file(tmp_path: Path) -> None:
    for name in SHIPPED_TEMPLATES:
        assert "for message in messages" in read_template(name, tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert read_template("mine.jinja", tmp_path) == read_template(str(tmp_path / "mine.jinja"), Path("/")) == "{{ messages }}"
    (tmp_path / "hermes").write_text("a file of that name")
    assert read_template("./hermes", tmp_path) == "a file of that name" != read_template("hermes", tmp_path)


@pytest.mark.parametrize("name", ["herms", "absent/file.jinja", "a\0b", "x" * 5000, "."])
def test_an_unknown_template_is_reported_with_the_shipped_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither built in \(hermes, chatml, llama3, .*deepseek_v3\) nor a file"):
        read_template(name, tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff", "is not a chat template: 'utf-8'"), (b" \n", "is empty"), (b"x" * (MAX_BYTES + 1), "it has more than 256 KiB")],
)
def test_a_file_that_is_not_a_template_raises(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_template("mine.jinja", tmp_path)


@pytest.mark.slow
def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder may be a hostile model folder."""
    (tmp_path / "transformers.py").write_text("open('it_ran', 'w')")
    monkeypatch.chdir(tmp_path)
    probe_template("{{ messages }}")
    assert [path.name for path in tmp_path.iterdir()] == ["transformers.py"]


@pytest.mark.slow
def test_an_endless_template_is_stopped() -> None:
    """Uses the real child process; other tests use forked processes."""
    started = time.monotonic()
    _is_stopped(LOOPS)
    _is_stopped(LATE)
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    "text",
    [
        LOOPS,
        LATE,
        LATE.replace("> 4", "> 30"),
        "{% if tools %}" + LOOPS + "{% endif %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 2 * 10**6 }}",
    ],
)
def test_a_template_beyond_the_bounds_is_stopped(text: str) -> None:
    _is_stopped(text)


def _is_stopped(text: str) -> None:
    with pytest.raises(UserError, match=r"exceeds its limits \(0\.2 s of CPU time, 4 GiB and 1,048,576 characters"):
        probe_template(text, cpu_s=0.2)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("text", ["{{ raise_exception('no') }}", "\ud800{% if %}"])
def test_the_probe_ignores_errors_that_the_tokenizer_reports(text: str) -> None:
    probe_template(text)


def write_large_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of 262,000 tokens with 514,000 merges, the numbers of Gemma 3's."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters, alphabet = "etaoinshrdlu", sorted(ByteLevel.alphabet())
    words = ["".join(word) for size in range(2, 6) for word in itertools.product(letters, repeat=size)][: 262_000 - len(alphabet)]
    splits = ([word[:at], word[at:]] for at in (1, 2, 3) for word in words if at < len(word))
    end = {"content": "<|im_end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {token: number for number, token in enumerate((*alphabet, *words))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": list(itertools.islice(splits, 514_000))}
    data = {
        "version": "1.0",
        "added_tokens": [{"id": len(vocabulary), **end}],
        "normalizer": None,
        "pre_tokenizer": bytes_,
        "decoder": bytes_,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": read_template("hermes", folder)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


_LOADS_SLOWLY = """
import time
from agentrl.agent import template

load = template.auto_tokenizer().from_pretrained

class Slow:
    @staticmethod
    def from_pretrained(*given, **options):
        end = time.process_time() + 3.0
        while time.process_time() < end:
            pass
        return load(*given, **options)

template.auto_tokenizer = lambda: Slow
template._child()
"""


@pytest.mark.slow
def test_loading_a_large_vocabulary_does_not_count_as_the_templates_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_large_tokenizer(tmp_path))
    monkeypatch.setattr(template_module, "_CHILD", _LOADS_SLOWLY)
    probe_tokenizer(folder, cpu_s=3.0)
    child = "from agentrl.agent import template; template._LOAD_S = 0.1; template._child()"
    monkeypatch.setattr(template_module, "_CHILD", child)
    with pytest.raises(UserError, match=r"exceeds its limits \(60 s of CPU time to load it, then 2 s of CPU time"):
        probe_tokenizer(folder, cpu_s=2.0)


LOADED = """
import sys
import transformers.generation
from agentrl.agent.chat import load_chat

print(load_chat("recipes/models/tables-base").stop_token_ids)
assert "GenerationMixin" not in vars(transformers.generation), "the placeholder is removed"
print([name for name in ("sklearn", "pandas", "torch._inductor", "transformers.generation.utils") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_tokenizer_is_loaded_without_the_generation_code() -> None:
    result = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.splitlines()[1] == "[]", result.stdout + result.stderr


@pytest.mark.slow
def test_the_process_that_tests_a_tokenizer_writes_no_warnings_and_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import sys; from agentrl.agent import template; template._child(); sys.exit(sys.modules['torch'] is not None)"
    monkeypatch.setattr(template_module, "_CHILD", child)
    assert template_module._run_child(None, str(ROOT / "recipes/models/tables-base"), 30.0) == (0, "")
