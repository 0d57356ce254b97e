"""A real vLLM server ends completions at stop sequences and holds them to a grammar; what it says of its tokens is right in both cases."""

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
ASKED = CompletionRequest(model="policy", system=(), messages=(), shape=SHAPE)
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": SHAPE}}


async def test_a_completion_ends_at_a_stop_sequence(served: Served) -> None:
    tokenizer = make_tokenizer()
    for letter in range(20):  # greedily, so that the same tokens come again
        prompt = [*PROMPT, letter]
        free = await served.generate(prompt, max_tokens=100, temperature=0.0)
        texts = [tokenizer.decode([token]) for token in free.token_ids]
        place = next(
            (at for at in range(4, len(texts)) if texts[at].isascii() and texts[at].isalnum() and texts[at] not in texts[:at]), None
        )
        if place is not None:
            break
    assert place is not None
    made = await served.generate(prompt, max_tokens=100, temperature=0.0, stop=("no such text", texts[place]))
    assert made.finish_reason == "stop" and free.token_ids[: len(made.token_ids)] == made.token_ids
    assert 0 <= len(made.token_ids) - 1 - place <= 8, "later only where it stands behind half a character"
    [version] = {span.version for span in made.versions}
    expected = token_logprobs(served.models[version], (*prompt, *made.token_ids))[len(prompt) - 1 :]
    assert made.logprobs == pytest.approx(expected, abs=1e-3)


def allowed(made: str, ids: tuple[int, ...], end: int) -> list[set[int]]:
    """The tokens that a constraint allows at each place of a completion, by the library alone."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer(), vocab_size=VOCABULARY, stop_token_ids=[end])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(made))
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    found = []
    for token in ids:
        matcher.fill_next_token_bitmask(mask)
        found.append({one for one in range(VOCABULARY) if int(mask[0, one // 32]) >> (one % 32) & 1})
        assert matcher.accept_token(token)
    return found


def logits_of(served: Served, made: Completion) -> Tensor:
    import torch

    [version] = {span.version for span in made.versions}
    with torch.no_grad():
        logits: Tensor = served.models[version](torch.tensor([[*PROMPT, *made.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    return logits


@pytest.mark.parametrize("forced", [False, True], ids=["JSON", "a call"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_tokens_that_must_spell_something_have_their_supports(served: Served, forced: bool, temperature: float) -> None:
    """Each is one of the likeliest tokens that the grammar allows, with its logprob among these: computed by other libraries."""
    import torch

    asked = replace(ASKED, tools=(LOOK,), shape=None, forced=("look",), single=True) if forced else ASKED
    spells, chat = "", Form("hermes")
    spells = constraint(asked, chat)  # type: ignore[arg-type]
    sampling = Sampling(temperature=temperature).constrained()
    given: Any = {"temperature": temperature, "top_k": sampling.top_k, "supports": True, "constraint": spells}
    tokenizer = make_tokenizer()
    for _ in range(3):
        made = await served.generate(PROMPT, max_tokens=400, stop_token_ids=(tokenizer.eos_token_id,), **given)
        assert made.finish_reason == "stop" and made.supports is not None
        text = tokenizer.decode(made.token_ids[:-1])
        found = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        found = found["arguments"] if forced else found
        assert found["name"] in ("width", "height") and 0 <= found["size"] <= 99 and set(found) <= {"name", "size", "sure"}
        logits = logits_of(served, made) / temperature
        for place, may in enumerate(allowed(spells, made.token_ids, tokenizer.eos_token_id)):
            row = made.supports.rows[place]
            likeliest = sorted(may, key=lambda token: -float(logits[place, token]))
            assert set(row) == set(likeliest[:CONSTRAINED_TOP_K]), place
            over = torch.tensor(row)
            expected = logits[place, made.token_ids[place]] - logits[place, over].logsumexp(-1)
            assert made.logprobs[place] == pytest.approx(float(expected), abs=1e-3)
