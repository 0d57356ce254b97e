"""A real vLLM server ends completions at stop sequences and constrains them to a grammar. Its logprobs are correct in both cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from agentrl.gateway.constraint import constraint
from agentrl.gateway.request import CompletionRequest
from agentrl.records import Completion
from agentrl.records.sampling import CONSTRAINED_TOP_K, Sampling
from agentrl.testing.tiny_model import VOCABULARY, make_tokenizer, token_logprobs
from tests.gateway.test_constraints import Form
from tests.serving.conftest import Served

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]
PROMPT = list(b"How many rows are there? ")
SHAPE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["width", "height"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
REQUEST = CompletionRequest(model="policy", system=(), messages=(), shape=SHAPE)
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": SHAPE}}


async def test_a_completion_ends_at_a_stop_sequence(served: Served) -> None:
    tokenizer = make_tokenizer()
    for letter in range(20):  # greedy, so that the tokens repeat
        prompt = [*PROMPT, letter]
        free = await served.generate(prompt, max_tokens=100, temperature=0.0)
        texts = [tokenizer.decode([token]) for token in free.token_ids]
        index = next((i for i in range(4, len(texts)) if texts[i].isascii() and texts[i].isalnum() and texts[i] not in texts[:i]), None)
        if index is not None:
            break
    assert index is not None
    completion = await served.generate(prompt, max_tokens=100, temperature=0.0, stop=("no such text", texts[index]))
    assert completion.finish_reason == "stop" and free.token_ids[: len(completion.token_ids)] == completion.token_ids
    assert 0 <= len(completion.token_ids) - 1 - index <= 8, "later only after an incomplete character"
    [version] = {span.version for span in completion.versions}
    expected = token_logprobs(served.models[version], (*prompt, *completion.token_ids))[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def allowed(constraint_json: str, ids: tuple[int, ...], end: int) -> list[set[int]]:
    """The tokens that a constraint allows at each position of a completion, computed with the library only."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer(), vocab_size=VOCABULARY, stop_token_ids=[end])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(constraint_json))
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    allowed_sets = []
    for token in ids:
        matcher.fill_next_token_bitmask(mask)
        allowed_sets.append({token_id for token_id in range(VOCABULARY) if int(mask[0, token_id // 32]) >> (token_id % 32) & 1})
        assert matcher.accept_token(token)
    return allowed_sets


def logits_of(served: Served, completion: Completion) -> Tensor:
    import torch

    [version] = {span.version for span in completion.versions}
    with torch.no_grad():
        logits: Tensor = served.models[version](torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    return logits


@pytest.mark.parametrize("forced", [False, True], ids=["JSON", "a call"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_constrained_tokens_have_supports(served: Served, forced: bool, temperature: float) -> None:
    """Each support has the likeliest tokens that the grammar allows; logprobs are relative to it. Checked with other libraries."""
    import torch

    request = replace(REQUEST, tools=(LOOK,), shape=None, forced=("look",), single=True) if forced else REQUEST
    constraint_json = constraint(request, Form("hermes"))  # type: ignore[arg-type]
    sampling = Sampling(temperature=temperature).constrained()
    options: Any = {"temperature": temperature, "top_k": sampling.top_k, "supports": True, "constraint": constraint_json}
    tokenizer = make_tokenizer()
    for _ in range(3):
        completion = await served.generate(PROMPT, max_tokens=400, stop_token_ids=(tokenizer.eos_token_id,), **options)
        assert completion.finish_reason == "stop" and completion.supports is not None
        text = tokenizer.decode(completion.token_ids[:-1])
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        call = call["arguments"] if forced else call
        assert call["name"] in ("width", "height") and 0 <= call["size"] <= 99 and set(call) <= {"name", "size", "sure"}
        logits = logits_of(served, completion) / temperature
        for position, allowed_tokens in enumerate(allowed(constraint_json, completion.token_ids, tokenizer.eos_token_id)):
            row = completion.supports.rows[position]
            likeliest = sorted(allowed_tokens, key=lambda token: -float(logits[position, token]))
            assert set(row) == set(likeliest[:CONSTRAINED_TOP_K]), position
            support = torch.tensor(row)
            expected = logits[position, completion.token_ids[position]] - logits[position, support].logsumexp(-1)
            assert completion.logprobs[position] == pytest.approx(float(expected), abs=1e-3)
