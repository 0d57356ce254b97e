"""A judge's endpoint over real HTTP: delays, errors and limits. The clock is fake, so no test waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from agentrl.base.backoff import backoff_s, requested_wait_s
from agentrl.base.liveness import external_parts
from agentrl.errors import JudgeError, UserError
from agentrl.judge import Endpoint, Prices
from agentrl.testing import ChatServer, JumpingClock, ScriptedAnswer
from tests.judge.judge_parts import RIGHT, endpoint

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object"}


async def ask_and_close(judge_endpoint: Endpoint, **options: object) -> object:
    try:
        return await judge_endpoint.ask(HELLO, **options)  # type: ignore[arg-type]
    finally:
        await judge_endpoint.close()


@pytest.mark.parametrize("status", [429, 529, 500, 503, 408])
async def test_ten_busy_minutes_only_delay_the_answer(status: int) -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_600 else ScriptedAnswer(status=status, raw=b"busy")
    ) as server:
        reply = await endpoint(server.url, clock=clock).ask(HELLO)
    assert reply.text == RIGHT and reply.problem == "" and reply.tries == len(server.requests) >= 12
    assert 600 < sum(clock.slept) < 700 and max(clock.slept) <= 60


async def test_server_that_stays_down_is_an_error_within_the_patience() -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=503, raw=b"down")]) as server, pytest.raises(JudgeError, match="within 90 s: status 503: down"):
        await ask_and_close(endpoint(server.url, clock=clock, patience_s=90.0))
    assert sum(clock.slept) <= 90


@pytest.mark.parametrize(
    ("headers", "min_wait_s"),
    [
        ({"Retry-After": "37"}, 37.0),
        ({"Retry-After": formatdate(1_000_041, usegmt=True)}, 41.0),
        ({"Retry-After-Ms": "1500", "Retry-After": "99"}, 1.5),
        ({"X-RateLimit-Reset-Tokens": "6m0.5s", "X-RateLimit-Remaining-Tokens": "0"}, 360.5),
        ({"X-RateLimit-Reset-Requests": "120ms", "X-RateLimit-Reset-Tokens": "9m", "X-RateLimit-Remaining-Tokens": "500"}, 0.12),
    ],
)
async def test_wait_follows_the_headers(headers: dict[str, str], min_wait_s: float) -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers=headers), ScriptedAnswer(RIGHT)]) as server:
        await ask_and_close(endpoint(server.url, clock=clock))
    assert min_wait_s <= sum(clock.slept) <= 1.1 * min_wait_s


@pytest.mark.parametrize("text", ["", "soon", "-5", "nan", "inf", "1e9", "9" * 400, "\u0663", "Wed, 99 Foo"])
def test_invalid_headers_are_ignored(text: str) -> None:
    assert requested_wait_s({"retry-after": text}, now=0) is None
    assert requested_wait_s({"x-ratelimit-reset-tokens": text}, now=0) is None
    assert 0.5 <= backoff_s(1, None) <= 1 and backoff_s(10_000, None, luck=0) == 60


async def test_wait_beyond_the_patience_does_not_start() -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers={"Retry-After": "86400"})]) as server, pytest.raises(JudgeError):
        await ask_and_close(endpoint(server.url, clock=clock))
    assert clock.slept == []


async def test_absurd_retry_header_fails_only_its_own_query() -> None:
    """Judge servers and evaluated endpoints share this code."""
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers={"Retry-After": "999999999"}), ScriptedAnswer(RIGHT)]) as server:
        judge_endpoint = endpoint(server.url, clock=clock, patience_s=90.0)
        with pytest.raises(JudgeError, match="within 90 s"):
            await judge_endpoint.ask(HELLO)
        await clock.sleep(60.0)
        assert (await judge_endpoint.ask(HELLO)).text == RIGHT and sum(clock.slept) <= 91
        await judge_endpoint.close()


@pytest.mark.parametrize("headers", [{"Retry-After": "0"}, {"Retry-After": formatdate(900_000, usegmt=True)}, {"Retry-After-Ms": "1"}])
async def test_rejections_without_a_wait_still_pause(headers: dict[str, str]) -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_005 else ScriptedAnswer(status=429, headers=headers)
    ) as server:
        judge_endpoint = endpoint(server.url, clock=clock, concurrency=4)
        replies = await asyncio.gather(*(judge_endpoint.ask(HELLO) for _ in range(20)))
        await judge_endpoint.close()
    assert {reply.text for reply in replies} == {RIGHT}
    assert len(server.requests) <= 20 + 4 + 8, "four concurrent queries, then one at a time with growing pauses"
    assert clock.now - 1_000_000 < 20


async def test_one_query_probes_the_server_while_others_wait() -> None:
    """Also after a header of years: the query that got it fails, and a minute later the next one probes."""
    clock, refusal = JumpingClock(), ScriptedAnswer(status=429, headers={"Retry-After": "1000000000"})
    with ChatServer(lambda body, number: refusal if number < 3 else ScriptedAnswer(RIGHT)) as server:
        judge_endpoint = endpoint(server.url, clock=clock, concurrency=2)
        results = await asyncio.gather(*(judge_endpoint.ask(HELLO) for _ in range(10)), return_exceptions=True)
        assert (await judge_endpoint.ask(HELLO)).text == RIGHT
        await judge_endpoint.close()
    failed = [error for error in results if isinstance(error, JudgeError)]
    assert len(failed) == 3 and len(server.requests) == 3 + 7 + 1
    assert 60 <= clock.now - 1_000_000 <= 190, "a minute for each refusal"


@pytest.mark.slow
async def test_hanging_server_fails_all_queries_within_their_patience() -> None:
    """Although one query at a time probes the server."""
    with ChatServer([ScriptedAnswer(hangs=True)]) as server:
        judge_endpoint, started = Endpoint(url=server.url, model="m", timeout_s=0.3, patience_s=2.0, concurrency=4), time.monotonic()
        results = await asyncio.gather(*(judge_endpoint.ask(HELLO) for _ in range(12)), return_exceptions=True)
        assert all(isinstance(error, JudgeError) for error in results) and time.monotonic() - started < 5.5
        await judge_endpoint.close()


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        ({"error": {"code": 429, "message": "slow down"}}, True),
        ({"error": {"code": "503", "message": "no"}}, True),
        ({"error": {"type": "overloaded_error", "message": "Overloaded"}}, True),
        ({"error": "Internal server error"}, True),
        ({"choices": [{"error": {"code": 502, "message": "upstream"}, "finish_reason": "error"}]}, True),
        ({"error": {"code": 401, "message": "no key"}}, False),
        ({"error": {"code": "404", "message": "no such model"}}, False),
    ],
)
async def test_error_in_a_200_is_handled_by_its_status(error: object, retried: bool) -> None:
    with ChatServer([ScriptedAnswer(raw=json.dumps(error).encode()), ScriptedAnswer(RIGHT)]) as server:
        judge_endpoint = endpoint(server.url)
        if retried:
            assert (await judge_endpoint.ask(HELLO)).text == RIGHT
        else:
            with pytest.raises(JudgeError, match=r"rejects the request: status 40[14]: in a response with status 200: no"):
                await judge_endpoint.ask(HELLO)
        await judge_endpoint.close()
    assert len(server.requests) == 1 + retried


async def test_answer_that_mentions_errors_is_an_answer() -> None:
    body = {"error": None, "choices": [{"message": {"content": RIGHT}, "finish_reason": "stop"}]}
    with ChatServer([ScriptedAnswer(raw=json.dumps(body).encode())]) as server:
        assert (await ask_and_close(endpoint(server.url))).text == RIGHT  # type: ignore[attr-defined]
    with ChatServer([ScriptedAnswer(raw=b'{"error": {"message": "what?"}}')]) as server:
        assert "not a chat completion" in (await ask_and_close(endpoint(server.url))).problem  # type: ignore[attr-defined]


async def test_answer_in_tiny_pieces_is_abandoned() -> None:
    """Each piece costs more than its bytes; the event loop continues meanwhile."""
    pieces = 200_000

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(100):
                writer.write(b"1\r\n \r\n" * (pieces // 100))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    lags = [0.0]

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            lags.append(loop.time() - before - 0.01)

    watching = asyncio.create_task(watch())
    judge, started = Endpoint(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", model="m", patience_s=0.4), time.monotonic()
    with pytest.raises(JudgeError, match=r"arrives in pieces of 1 bytes|no answer within"):
        await judge.ask(HELLO)
    assert time.monotonic() - started < 20 and max(lags) < 2.0
    watching.cancel()
    await judge.close()
    server.close()


async def test_pause_applies_to_all_queries_of_an_endpoint() -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(status=429, headers={"Retry-After": "50"}) if number == 0 else ScriptedAnswer(RIGHT)
    ) as server:
        judge_endpoint = endpoint(server.url, clock=clock, concurrency=1)
        await asyncio.gather(*(judge_endpoint.ask(HELLO) for _ in range(6)))
        await judge_endpoint.close()
    assert len(server.requests) == 7 and 50 <= clock.now - 1_000_000 <= 55


async def test_hanging_truncated_or_missing_server_is_retried() -> None:
    with ChatServer([ScriptedAnswer(hangs=True), ScriptedAnswer(RIGHT)]) as server:
        reply = await ask_and_close(endpoint(server.url, timeout_s=0.5))
        assert reply.text == RIGHT and reply.tries >= 2  # type: ignore[attr-defined]  # more if a busy machine is late
    with ChatServer([ScriptedAnswer(RIGHT, breaks_off=True), ScriptedAnswer(RIGHT)]) as server:
        reply = await ask_and_close(endpoint(server.url))
        assert reply.text == RIGHT and reply.tries == 2  # type: ignore[attr-defined]
        closed_url = server.url
    with pytest.raises(JudgeError, match="ConnectError"):
        await ask_and_close(endpoint(closed_url, patience_s=5.0))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ScriptedAnswer(raw=b"x" * 10_000_000), "more than 1,048,576 bytes"),
        (ScriptedAnswer("y" * 10_000_000), "more than 1,048,576 bytes"),
        (ScriptedAnswer(raw=b'{"choices": [{"mess'), "not a chat completion"),
        (ScriptedAnswer(raw=b"[" * 100_000), "not a chat completion"),
        (ScriptedAnswer(raw=b'{"choices": []}'), "not a chat completion"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": null}}]}'), "has no text"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": 7}}]}'), "has no text"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": null, "refusal": "I cannot"}}]}'), "refused"),
        (ScriptedAnswer(RIGHT[:20], finish_reason="length"), "cut off"),
        (ScriptedAnswer(raw=b"\xff\xfe\x00"), "not a chat completion"),
    ],
)
async def test_invalid_answers_are_kept_truncated_with_the_problem(answer: ScriptedAnswer, problem: str) -> None:
    with ChatServer([answer]) as server:
        reply = await ask_and_close(endpoint(server.url))
    assert problem in reply.problem and len(reply.text) <= 1 << 20 and len(server.requests) == 1  # type: ignore[attr-defined]


async def test_schema_is_sent_until_the_server_rejects_it() -> None:
    with ChatServer(
        lambda body, number: ScriptedAnswer(status=400, raw=b"no response_format") if "response_format" in body else ScriptedAnswer(RIGHT)
    ) as server:
        judge_endpoint = endpoint(server.url)
        assert (await judge_endpoint.ask(HELLO, schema=SCHEMA)).text == RIGHT
        assert (await judge_endpoint.ask(HELLO, schema=SCHEMA)).text == RIGHT
        await judge_endpoint.close()
    assert ["response_format" in request["body"] for request in server.requests] == [True, False, False]
    with ChatServer([ScriptedAnswer(status=400, raw=b"too long")]) as server:
        judge_endpoint = endpoint(server.url)
        for _ in range(2):  # a server that refuses both requests may support schemas
            with pytest.raises(JudgeError, match="status 400: too long"):
                await judge_endpoint.ask(HELLO, schema=SCHEMA)
        await judge_endpoint.close()
    assert ["response_format" in request["body"] for request in server.requests] == [True, False] * 2


async def test_key_is_sent_only_to_the_endpoint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG, logger="agentrl")
    with ChatServer([ScriptedAnswer(status=401, raw=b"bad key sk-very-secret")]) as server, pytest.raises(JudgeError) as refused:
        await ask_and_close(endpoint(server.url, key_env="JUDGE_KEY"))
    assert server.requests[0]["headers"]["authorization"] == "Bearer sk-very-secret"
    with ChatServer([ScriptedAnswer(status=503, raw=b"sk-very-secret"), ScriptedAnswer(RIGHT)]) as server:
        judge_endpoint = endpoint(server.url, key_env="JUDGE_KEY")
        await ask_and_close(judge_endpoint)
    assert "JUDGE_KEY" in str(refused.value) and "[key]" in caplog.text
    assert "secret" not in str(refused.value) + caplog.text + repr(judge_endpoint) + json.dumps(judge_endpoint.identity())
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(JudgeError, match="JUDGE_KEY does not contain a valid key"):
        await ask_and_close(judge_endpoint)


async def test_secrets_in_echoed_headers_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    key, header = "sk-very-secret", "zebra-0123456789-in-a-header"
    monkeypatch.setenv("JUDGE_KEY", key)
    monkeypatch.setenv("THEIR_HEADER", header)
    options = {"key_env": "JUDGE_KEY", "headers": {"api-key": "env:THEIR_HEADER"}}
    with ChatServer([ScriptedAnswer(f"{key} and {header}")]) as server:
        reply = await ask_and_close(endpoint(server.url, **options))
    assert server.requests[0]["headers"]["api-key"] == header and reply.text == "[secret] and [secret]"  # type: ignore[attr-defined]
    for length in range(280, 301):  # partly after the quoted text
        with (
            ChatServer([ScriptedAnswer(status=401, raw=b"x" * length + f"{key}{header}".encode())]) as server,
            pytest.raises(JudgeError) as refused,
        ):
            await ask_and_close(endpoint(server.url, **options))
        assert "sk-" not in str(refused.value) and "zebra" not in str(refused.value)


async def test_a_redirect_is_not_followed() -> None:
    with ChatServer([ScriptedAnswer(RIGHT)]) as other:
        away = ScriptedAnswer(status=307, headers={"location": f"{other.url}/chat/completions"}, raw=b"")
        with ChatServer([away]) as server, pytest.raises(JudgeError, match="redirects"):
            await ask_and_close(endpoint(server.url))
        assert other.requests == []


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "https://user:pass@x/v1", "https://x/v1?key=1", "localhost:8000"])
def test_invalid_urls_raise(url: str) -> None:
    with pytest.raises(UserError, match="an endpoint's url"):
        Endpoint(url=url, model="m")


async def test_url_may_be_a_function() -> None:
    urls: list[str] = []
    judge_endpoint = endpoint("http://127.0.0.1:9/v1")
    judge_endpoint = Endpoint(url=lambda: urls[-1], model="scripted", clock=judge_endpoint.clock)
    for text in ("first", "second"):
        with ChatServer([ScriptedAnswer(text)]) as server:
            urls.append(server.url)
            assert (await judge_endpoint.ask(HELLO)).text == text
    await judge_endpoint.close()


@pytest.fixture(params=[{"prompt_tokens": -1, "completion_tokens": 5}, {"prompt_tokens": 1e30, "completion_tokens": True}, [], None])
def odd_usage(request: pytest.FixtureRequest) -> Iterator[bytes]:
    yield json.dumps({"choices": [{"message": {"content": "x" * 300}}], "usage": request.param}).encode()


async def test_tokens_are_counted_by_the_server_or_estimated(odd_usage: bytes) -> None:
    with ChatServer([ScriptedAnswer("x", tokens=(7, 3)), ScriptedAnswer(raw=odd_usage)]) as server:
        judge_endpoint = endpoint(server.url)
        counted, estimated = await judge_endpoint.ask(HELLO), await judge_endpoint.ask(HELLO)
        await judge_endpoint.close()
    assert (counted.prompt_tokens, counted.completion_tokens, counted.counted) == (7, 3, True)
    assert (estimated.prompt_tokens, estimated.completion_tokens, estimated.counted) == (1, 100, False)
    assert Prices(prompt=2.0, completion=10.0).of(1000, 100) == pytest.approx(0.003)


async def test_silent_endpoint_is_overdue_until_it_answers() -> None:
    """`agentrl.run.supervise.watch_external_servers` reports both states."""
    reports: list[str] = []

    class WatchingClock(JumpingClock):
        async def sleep(self, seconds: float) -> None:
            began = self.now
            for part in range(1, 21):
                self.now = began + seconds * part / 20
                reports.append(judge_endpoint._live.overdue())
            await asyncio.sleep(0)

    clock = WatchingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_600 else ScriptedAnswer(status=503, raw=b"busy")
    ) as server:
        judge_endpoint = endpoint(server.url, clock=clock, timeout_s=120.0)
        assert (await ask_and_close(judge_endpoint)).text == RIGHT  # type: ignore[attr-defined]
    assert reports[0] == "" and reports[-1].startswith("judge scripted at 127.0.0.1:") and "has not answered for 6" in reports[-1]
    assert judge_endpoint._live.overdue() == "" and judge_endpoint._live in external_parts()
