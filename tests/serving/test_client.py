from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterable

import pytest

from agentrl.errors import ServingError
from agentrl.records import CUT, Completion, SamplingParams, VersionSpan
from agentrl.records.sampling import TIES, Supports
from agentrl.serving.client import TokenClient, generate_body, parse_completion
from agentrl.serving.server import PROBE_PRIORITY
from agentrl.serving.weight_state import WeightState
from tests.serving.scripted_server import DROP, HANG, Call, Later, generated, scripted_server
from tests.waiting import until

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(9,))


async def generate(url: str, *, weights: WeightState | None = None, timeout_s: float = 60.0) -> Completion:
    client = TokenClient(url, weights=weights or WeightState(3))
    try:
        return await client.generate([1, 2], PARAMS, request_id="r1", timeout_s=timeout_s)
    finally:
        await client.close()


async def test_a_well_formed_answer_is_parsed() -> None:
    weights = WeightState(3)
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


def test_the_longest_context_is_served_first_and_a_probe_before_all() -> None:
    short, long = (generate_body([1] * tokens, PARAMS, "r", "salt")["priority"] for tokens in (10, 100_000))
    assert PROBE_PRIORITY < long < short < 0, "a request without a priority has 0 and is last"


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


TRUNCATED = SamplingParams(max_tokens=8, temperature=0.7, top_k=2, top_p=0.9, min_p=0.01, supports=True)
OUT = -9999.0  # vLLM's minus infinity


def answer_of(*tables: dict[int, float], **changes: object) -> dict[str, object]:
    """An answer with one token per table; the token is the first of its table of most likely tokens."""
    content = [
        {"token_id": next(iter(table)), "logprob": next(iter(table.values())), "top_logprobs": entries(table.items())} for table in tables
    ]
    return generated([next(iter(table)) for table in tables], **{"logprobs": {"content": content}, **changes})


def entries(items: Iterable[tuple[int, float]]) -> list[dict[str, object]]:
    return [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in items]


def test_supports_are_requested_with_ties_and_stored() -> None:
    sampling = generate_body([1, 2], TRUNCATED, "r", "salt")["sampling_params"]
    assert (sampling["top_k"], sampling["top_p"], sampling["min_p"], sampling["logprobs"]) == (2, 0.9, 0.01, 2 + TIES)
    half, third = math.log(0.5), math.log(1 / 3)
    answer = answer_of({7: half, 4: half, 9: OUT}, {5: 0.0, 1: OUT}, {6: third, 2: third, 8: third, 0: OUT})  # the last: a tie beyond top_k
    assert parse_completion(answer, TRUNCATED).supports == Supports.from_rows([(4, 7), (5,), (2, 6, 8)])
    assert parse_completion(answer, PARAMS).supports is None, "no supports without a request for them"


HALF = math.log(0.5)
UNSUPPORTED = {
    "no alternatives": generated([4]),
    "null alternatives": generated([4], logprobs={"content": [{"token_id": 4, "logprob": 0.0, "top_logprobs": None}]}),
    "a possibly incomplete support": answer_of({4: HALF, 5: HALF}),
    "more than requested": answer_of({4: 0.0, **{token: OUT for token in range(5, 6 + TIES)}, 90: OUT, 91: OUT}),
    "far more than requested": answer_of({4: 0.0, **{token: OUT for token in range(5, 5000)}}),
    "probabilities with too small a sum": answer_of({4: HALF, 5: -3.0, 6: OUT}),
    "probabilities with too large a sum": answer_of({4: HALF, 5: -0.1, 6: OUT}),
    "a probability that overflows": answer_of({4: 0.0, 5: 1e308, 6: OUT}),
    "an invalid probability": answer_of({4: 0.0, 5: math.nan, 6: math.inf, 7: OUT}),
    "a sampled token outside": answer_of({4: OUT, 5: 0.0}, logprobs=answer_of({5: 0.0, 4: OUT})["choices"][0]["logprobs"]),  # type: ignore[index]
    "another logprob than its own": generated(
        [4], logprobs={"content": [{"token_id": 4, "logprob": -0.1, "top_logprobs": entries([(4, 0.0), (5, OUT)])}]}
    ),
    "a token twice": generated(
        [4], logprobs={"content": [{"token_id": 4, "logprob": HALF, "top_logprobs": entries([(4, HALF), (4, HALF), (5, OUT)])}]}
    ),
    "a negative token": answer_of({4: HALF, -1: HALF, 5: OUT}),
    "a token of 33 bits": answer_of({4: HALF, 1 << 33: HALF, 5: OUT}),
    "a token of 32 bits": answer_of({4: HALF, (1 << 32) - 1: HALF, 5: OUT}),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_answers_without_requested_supports_are_serving_errors(case: str) -> None:
    with pytest.raises(ServingError):
        parse_completion(UNSUPPORTED[case], TRUNCATED)


def test_a_possibly_incomplete_support_raises_with_advice() -> None:
    with pytest.raises(ServingError, match=r"2 of the 2 most likely tokens could have been sampled.*Lower top_k"):
        parse_completion(answer_of({4: HALF, 5: HALF}), TRUNCATED)


@pytest.mark.parametrize("answer", [(500, {"error": "boom"}), (503, {}), (200, b"<html>"), (200, b"")])
async def test_http_faults_are_serving_errors(answer: object) -> None:
    async with scripted_server(lambda call: answer) as server:
        with pytest.raises(ServingError):
            await generate(server.url)


@pytest.mark.slow
async def test_a_passed_deadline_raises() -> None:
    async with scripted_server(lambda call: HANG) as server:
        async with asyncio.timeout(60):  # the answer never comes
            with pytest.raises(ServingError, match=r"within 0\.2 s"):
                await generate(server.url, timeout_s=0.2)


async def test_a_received_request_is_not_resent() -> None:
    async with scripted_server(lambda call: DROP) as server:
        with pytest.raises(ServingError):
            await generate(server.url)
    assert len(server.calls) == 1


async def test_an_unreachable_server_raises() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ServingError, match="cannot reach"):
            await generate(f"http://127.0.0.1:{closed.getsockname()[1]}")


async def test_tokens_of_a_version_on_probation_wait_for_its_acceptance() -> None:
    weights = WeightState(2)
    weights.begin_probation(3)
    async with scripted_server(lambda call: generated([4], version="3")) as server:
        request = asyncio.create_task(generate(server.url, weights=weights))
        await until(lambda: server.calls)
        await asyncio.sleep(0.1)
        assert not request.done()
        weights.accept(3)
        assert (await request).versions[0].version == 3


async def test_tokens_of_a_rejected_version_are_void() -> None:
    weights = WeightState(2)
    weights.begin_probation(3)
    async with scripted_server(lambda call: generated([4], version="3")) as server:
        request = asyncio.create_task(generate(server.url, weights=weights))
        await until(lambda: server.calls)
        await asyncio.sleep(0.1)
        weights.refuse()
        with pytest.raises(ServingError, match="rejected"):
            await request
    async with scripted_server(lambda call: generated([4], version="2")) as server:
        await generate(server.url, weights=weights)


async def test_a_rejected_version_may_retry() -> None:
    weights = WeightState(2)
    weights.begin_probation(3)
    weights.refuse()
    weights.begin_probation(3)
    weights.accept(3)
    await weights.wait_verified({3})
    assert weights.number == 3


async def test_each_version_on_probation_is_waited_for() -> None:
    weights = WeightState(2)
    for number in (3, 4):
        weights.begin_probation(number)
        waiting = asyncio.create_task(weights.wait_verified({number, 2}))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        weights.accept(number)
        await asyncio.wait_for(waiting, timeout=5)
        await asyncio.wait_for(weights.wait_verified({number, 2}), timeout=5)


def test_every_swap_makes_old_cached_prefixes_unreachable() -> None:
    weights = WeightState(0)
    salts = [weights.cache_salt]
    for act in (lambda: weights.begin_probation(1), weights.refuse, lambda: weights.begin_probation(1)):
        act()
        salts.append(weights.cache_salt)
    assert len(set(salts)) == 4


def test_an_empty_prompt_raises() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate_body([], PARAMS, "r", "salt")


async def test_a_cut_request_returns_the_sampled_tokens() -> None:
    """The server answers a request when it receives the request to abort it."""
    for tokens in ([4, 5, 6], []):
        aborted = asyncio.Event()

        def answer(call: Call, aborted: asyncio.Event = aborted, tokens: list[int] = tokens) -> object:
            if call.path == "/inference/v1/abort_requests":
                aborted.set()
                return None
            return Later(aborted, generated(tokens, finish_reason="abort"))

        async with scripted_server(answer) as server:
            completion = await generate(server.url, timeout_s=0.2)
        assert server.calls[1].body == {"request_ids": ["generate-tokens-r1"]}
        assert (completion.token_ids, completion.finish_reason) == (tuple(tokens), CUT)
        assert len(completion.logprobs) == len(tokens) == sum(span.end - span.start for span in completion.versions)


async def test_an_unrequested_abort_is_an_error() -> None:
    async with scripted_server(lambda call: generated([4], finish_reason="abort")) as server:
        with pytest.raises(ServingError, match="abort"):
            await generate(server.url)
