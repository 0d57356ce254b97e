"""A real vLLM server ends completions at stop sequences, and its tokens, logprobs and versions are those of what it gives."""

from __future__ import annotations

import pytest

from agentrl.testing.tiny_model import make_tokenizer, token_logprobs
from tests.serving.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]
PROMPT = list(b"How many rows are there? ")


async def test_a_completion_ends_at_a_stop_sequence(served: Served) -> None:
    made = await served.generate(PROMPT, max_tokens=900, stop=tuple("aeiou"))
    tokenizer = make_tokenizer()
    first = next(place for place, token in enumerate(made.token_ids) if tokenizer.decode([token]) in tuple("aeiou"))
    assert made.finish_reason == "stop" and len(made.token_ids) - first <= 8, "later only where it stands behind half a character"
    [version] = {span.version for span in made.versions}
    expected = token_logprobs(served.models[version], (*PROMPT, *made.token_ids))[len(PROMPT) - 1 :]
    assert made.logprobs == pytest.approx(expected, abs=1e-3)
