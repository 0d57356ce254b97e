from __future__ import annotations

import asyncio
import math
import socket

import pytest

from agentrl.errors import ServingError
from agentrl.records import Completion, SamplingParams, VersionSpan
from agentrl.serving.client import TokenClient, generate_body, parse_completion
from agentrl.serving.weights import WeightsInService
from tests.serving.scripted_server import DROP, HANG, generated, scripted_server
from tests.waiting import until

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(9,))


async def generate(url: str, *, weights: WeightsInService | None = None, timeout_s: float = 60.0) -> Completion:
    client = TokenClient(url, weights=weights or WeightsInService(3))
    try:
        return await client.generate([1, 2], PARAMS, request_id="r1", timeout_s=timeout_s)
    finally:
        await client.close()


async def test_completion_of_a_well_formed_answer() -> None:
    weights = WeightsInService(3)
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    async with scripted_server(lambda call: generated([4, 5, 9], finish_reason="stop", weight_versions=spans)) as server:
        completion = await generate(server.url, weights=weights)
    assert completion == Completion(
        token_ids=(4, 5, 9),
        logprobs=(-0.5, -0.5, -0.5),
        versions=(VersionSpan(version=2, start=0, end=1), VersionSpan(version=3, start=1, end=3)),
        finish_reason="stop",
    )
    assert server.calls[0].path == "/inference/v1/generate"
    assert server.calls[0].body == generate_body([1, 2], PARAMS, "r1", weights.cache_salt)


MALFORMED = {
    "not the shape": {"choices": "none"},
    "no choice": {"choices": []},
    "no token": generated([]),
    "text for ids": generated([4], token_ids=["4"]),
    "too many tokens": generated(list(range(9))),
    "fewer logprobs than tokens": generated([4, 5], logprobs=generated([4])["choices"][0]["logprobs"]),
    "logprobs of other tokens": generated([4, 5], logprobs=generated([5, 4])["choices"][0]["logprobs"]),
    "no logprobs": generated([4], logprobs=None),
    "NaN on vLLM's wire": generated([4], logprobs={"content": [{"token_id": 4, "logprob": -9999.0}]}),
    "NaN": generated([4], logprobs={"content": [{"token_id": 4, "logprob": math.nan}]}),
    "null logprob": generated([4], logprobs={"content": [{"token_id": 4, "logprob": None}]}),
    "probability above one": generated([4], logprobs={"content": [{"token_id": 4, "logprob": 0.5}]}),
    "no spans": generated([4], weight_versions=None),
    "spans end early": generated([4, 5], weight_versions=[{"version": "3", "start": 0, "end": 1}]),
    "spans end late": generated([4], weight_versions=[{"version": "3", "start": 0, "end": 2}]),
    "gap between spans": generated(
        [4, 5, 6], weight_versions=[{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 2, "end": 3}]
    ),
    "a version of 5000 digits": generated([4], weight_versions=[{"version": "9" * 5000, "start": 0, "end": 1}]),
    "a version of 70 bits": generated([4], weight_versions=[{"version": str(1 << 70), "start": 0, "end": 1}]),
    "a token of 70 bits": generated([1 << 70], weight_versions=[{"version": "3", "start": 0, "end": 1}]),
    "empty span": generated([4], weight_versions=[{"version": "3", "start": 0, "end": 0}, {"version": "3", "start": 0, "end": 1}]),
    "weights without a number": generated([4], version="default"),
    "aborted": generated([4], finish_reason="abort"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_answers_are_serving_errors(case: str) -> None:
    with pytest.raises(ServingError):
        parse_completion(MALFORMED[case], PARAMS)


@pytest.mark.parametrize("answer", [(500, {"error": "boom"}), (503, {}), (200, b"<html>"), (200, b"")])
async def test_http_faults_are_serving_errors(answer: object) -> None:
    async with scripted_server(lambda call: answer) as server:
        with pytest.raises(ServingError):
            await generate(server.url)


async def test_deadline_passes() -> None:
    async with scripted_server(lambda call: HANG) as server:
        async with asyncio.timeout(60):  # the answer never comes
            with pytest.raises(ServingError, match=r"within 0\.2 s"):
                await generate(server.url, timeout_s=0.2)


async def test_a_request_that_was_received_is_not_sent_again() -> None:
    async with scripted_server(lambda call: DROP) as server:
        with pytest.raises(ServingError):
            await generate(server.url)
    assert len(server.calls) == 1


async def test_unreachable_server() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ServingError, match="cannot reach"):
            await generate(f"http://127.0.0.1:{closed.getsockname()[1]}")


async def test_tokens_of_a_version_on_probation_wait_for_its_acceptance() -> None:
    weights = WeightsInService(2)
    weights.begin_probation(3)
    async with scripted_server(lambda call: generated([4], version="3")) as server:
        request = asyncio.create_task(generate(server.url, weights=weights))
        await until(lambda: server.calls)
        await asyncio.sleep(0.1)
        assert not request.done()
        weights.accept(3)
        assert (await request).versions[0].version == 3


async def test_tokens_of_a_refused_version_are_void_and_older_ones_are_not() -> None:
    weights = WeightsInService(2)
    weights.begin_probation(3)
    async with scripted_server(lambda call: generated([4], version="3")) as server:
        request = asyncio.create_task(generate(server.url, weights=weights))
        await until(lambda: server.calls)
        await asyncio.sleep(0.1)
        weights.refuse()
        with pytest.raises(ServingError, match="refused"):
            await request
    async with scripted_server(lambda call: generated([4], version="2")) as server:
        await generate(server.url, weights=weights)


async def test_a_refused_version_may_try_again() -> None:
    weights = WeightsInService(2)
    weights.begin_probation(3)
    weights.refuse()
    weights.begin_probation(3)
    weights.accept(3)
    await weights.settle({3})
    assert weights.number == 3


def test_every_swap_makes_old_cached_prefixes_unreachable() -> None:
    weights = WeightsInService(0)
    salts = [weights.cache_salt]
    for act in (lambda: weights.begin_probation(1), weights.refuse, lambda: weights.begin_probation(1)):
        act()
        salts.append(weights.cache_salt)
    assert len(set(salts)) == 4


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate_body([], PARAMS, "r", "salt")
