"""The shipped base policy: intact small files, and a tokenizer and template that match the tokens of rollouts."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent import load_tools
from agentrl.agent.chat import ChatFormat
from agentrl.agent.template import auto_tokenizer
from agentrl.records import Message, Split
from sandboxes.tables import Tables
from sandboxes.tables.demonstrations import call, demonstrate

FOLDER = Path(__file__).resolve().parents[2] / "recipes/models/tables-base"
SCHEMAS = [tool.schema for tool in load_tools(("python", "submit")).values()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return auto_tokenizer().from_pretrained(FOLDER)


@pytest.mark.parametrize("folder", [FOLDER, FOLDER.parent / "splitting-base"], ids=lambda folder: folder.name)
def test_files_are_small_and_match_their_hashes(folder: Path) -> None:
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    present = {path.name for path in folder.iterdir() if path.is_file()} - {"SHA256SUMS"}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert (folder / "model.safetensors").stat().st_size <= 5_000_000 and f"# {folder.name}\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("text", ["", " ", "a\n\n b", "'", "\\", "\\n", "ŝ\u200d👩", "\x00\x7f", "print(x['a (b)'])\\", "  x[ ["])
def test_decoding_restores_the_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(text=st.text())
def test_decoding_restores_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_markers_are_single_tokens(tokenizer: Any) -> None:
    for marker in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_quoted_name_has_the_same_tokens_in_a_question_and_in_a_program(tokenizer: Any) -> None:
    for name in ("sepal length (cm)", "od280/od315_of_diluted_wines", "Côte", "alpha_2", "A-17", "wine.json"):
        question = tokenizer.encode(f"Which '{name}' is it?", add_special_tokens=False)
        program = tokenizer.encode(f"print(x['{name}'])", add_special_tokens=False)
        alone = tokenizer.encode(name, add_special_tokens=False)
        for ids in (question, program):
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids)))


def test_rendering_another_message_only_appends(tokenizer: Any) -> None:
    calls = [{"type": "function", "function": {"name": "python", "arguments": {"code": 'print("é\\n")'}}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls * 2},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    for tools in (None, SCHEMAS):
        texts = [tokenizer.apply_chat_template(messages[:k], tools=tools, tokenize=False) for k in range(1, len(messages) + 1)]
        for shorter, longer in pairwise(texts):
            assert longer.startswith(shorter)
        opened = tokenizer.apply_chat_template(messages[:2], tools=tools, tokenize=False, add_generation_prompt=True)
        assert texts[2].startswith(opened)


def test_the_template_writes_a_call_as_the_demonstrations_do(tokenizer: Any) -> None:
    arguments = {"code": "print('é', \"q\")\n"}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": arguments}}],
    }
    user = {"role": "user", "content": "?"}
    opened = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    rendered = tokenizer.apply_chat_template([user, turn], tokenize=False)
    assert rendered == opened + call("python", **arguments) + "\n"


@pytest.mark.slow
def test_demonstrations_fit_the_token_budget(tokenizer: Any) -> None:
    chat, family = ChatFormat(tokenizer), Tables(seed=0)
    prompts, programs, totals = [], [], []
    for index in range(240):
        task = family.task(Split.HELDOUT, index)
        acts = demonstrate(task, Random(index), guess=0.0, misspelt=0.0, careful=1.0)
        prompts.append(len(chat.opening(task.prompt, SCHEMAS)))
        programs.append(len(tokenizer.encode(acts[0].completion, add_special_tokens=False)))
        delta = len(chat.tool_delta([str(acts[0].observation)]))
        totals.append(prompts[-1] + programs[-1] + delta + len(tokenizer.encode(acts[1].completion, add_special_tokens=False)))
        assert programs[-1] <= task.limits.turn_tokens and totals[-1] <= task.limits.episode_tokens
    assert sum(prompts) / len(prompts) < 80 and sum(totals) / len(totals) < 220


def test_completions_parse_back_to_the_calls_that_were_written(tokenizer: Any) -> None:
    chat, family = ChatFormat(tokenizer), Tables(seed=0)
    task = family.task(Split.TRAIN, 0)
    completion = call("python", code=family.gold(task))
    parsed = chat.parse(tokenizer.encode(completion, add_special_tokens=False))
    assert not parsed.errors and parsed.message == Message(role="assistant", content="", tool_calls=parsed.message.tool_calls)
    assert parsed.message.tool_calls[0].arguments == {"code": family.gold(task)}


@pytest.mark.slow
def test_the_model_loads_and_opens_with_a_tool_call(tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    assert model.dtype == torch.float32 and model.num_parameters() < 1_000_000
    prompt = ChatFormat(tokenizer).opening(Tables(0).task(Split.HELDOUT, 0).prompt, SCHEMAS)
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=160)[0, len(prompt) :]
    parsed = ChatFormat(tokenizer).parse(output.tolist())
    assert not parsed.errors and [c.name for c in parsed.message.tool_calls] == ["python"]
