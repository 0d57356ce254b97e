"""A request that is cut off on a real server keeps its tokens exactly as sampled, and can be continued."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.records import CUT
from agentrl.testing.tiny_model import token_logprobs
from tests.serving.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def test_a_cut_request_keeps_its_tokens(served: Served) -> None:
    prompt = list(range(60, 70))
    for timeout_s in (0.05, 0.1, 0.2, 0.4):  # depends on the speed of the machine
        cut = await served.generate(prompt, max_tokens=1000, timeout_s=timeout_s)
        if cut.finish_reason == CUT and cut.token_ids:
            break
    assert cut.finish_reason == CUT and 0 < len(cut.token_ids) < 1000
    assert sum(span.end - span.start for span in cut.versions) == len(cut.token_ids) == len(cut.logprobs)
    rest = await served.generate([*prompt, *cut.token_ids], max_tokens=5)
    all_ids = (*prompt, *cut.token_ids, *rest.token_ids)
    expected = token_logprobs(served.models[cut.versions[0].version], all_ids)[len(prompt) - 1 :]
    assert [*cut.logprobs, *rest.logprobs] == pytest.approx(expected, abs=1e-3)


async def test_requests_cut_at_once_keep_the_server_healthy(served: Served) -> None:
    completions = await asyncio.gather(*(served.generate([1, 2, 3], max_tokens=1000, timeout_s=0.001 * number) for number in range(1, 33)))
    assert {completion.finish_reason for completion in completions} <= {CUT, "stop", "length"}
    assert len((await served.generate([1, 2, 3], max_tokens=4)).token_ids) > 0
