"""A judge's endpoint over real HTTP: what delays, what is refused, what is cut. Nobody waits: the clock jumps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from judge_parts import RIGHT, endpoint

from agentrl.base.liveness import external_parts
from agentrl.errors import JudgeError, UserError
from agentrl.judge import Endpoint, Prices
from agentrl.judge.backoff import backoff_s, requested_wait_s
from agentrl.testing import ChatServer, JumpingClock, ScriptedAnswer

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object"}


async def closing(one: Endpoint, **more: object) -> object:
    try:
        return await one.ask(HELLO, **more)  # type: ignore[arg-type]
    finally:
        await one.close()


@pytest.mark.parametrize("status", [429, 529, 500, 503, 408])
async def test_ten_minutes_of_a_busy_server_delay_and_nothing_else(status: int) -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_600 else ScriptedAnswer(status=status, raw=b"busy")
    ) as server:
        reply = await endpoint(server.url, clock=clock).ask(HELLO)
    assert reply.text == RIGHT and reply.problem == "" and reply.tries == len(server.requests) >= 12
    assert 600 < sum(clock.slept) < 700 and max(clock.slept) <= 60


async def test_a_server_that_stays_down_is_an_error_within_the_patience() -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=503, raw=b"down")]) as server, pytest.raises(JudgeError, match="within 90 s: status 503: down"):
        await closing(endpoint(server.url, clock=clock, patience_s=90.0))
    assert sum(clock.slept) <= 90


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"Retry-After": "37"}, 37.0),
        ({"Retry-After": formatdate(1_000_041, usegmt=True)}, 41.0),
        ({"Retry-After-Ms": "1500", "Retry-After": "99"}, 1.5),
        ({"X-RateLimit-Reset-Tokens": "6m0.5s", "X-RateLimit-Remaining-Tokens": "0"}, 360.5),
        ({"X-RateLimit-Reset-Requests": "120ms", "X-RateLimit-Reset-Tokens": "9m", "X-RateLimit-Remaining-Tokens": "500"}, 0.12),
    ],
)
async def test_what_the_headers_ask_for_is_waited_and_hardly_more(headers: dict[str, str], least: float) -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers=headers), ScriptedAnswer(RIGHT)]) as server:
        await closing(endpoint(server.url, clock=clock))
    assert least <= sum(clock.slept) <= 1.1 * least


@pytest.mark.parametrize("text", ["", "soon", "-5", "nan", "inf", "1e9", "9" * 400, "\u0663", "Wed, 99 Foo"])
def test_headers_that_cannot_be_read_are_none(text: str) -> None:
    assert requested_wait_s({"retry-after": text}, now=0) is None
    assert requested_wait_s({"x-ratelimit-reset-tokens": text}, now=0) is None
    assert 0.5 <= backoff_s(1, None) <= 1 and backoff_s(10_000, None, luck=0) == 60


async def test_a_wait_beyond_the_patience_is_not_begun() -> None:
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers={"Retry-After": "86400"})]) as server, pytest.raises(JudgeError):
        await closing(endpoint(server.url, clock=clock))
    assert clock.slept == []


async def test_a_header_of_years_ends_the_question_that_got_it_and_not_those_after() -> None:
    """A judge's server and an endpoint that is evaluated are asked through the same code."""
    clock = JumpingClock()
    with ChatServer([ScriptedAnswer(status=429, headers={"Retry-After": "999999999"}), ScriptedAnswer(RIGHT)]) as server:
        one = endpoint(server.url, clock=clock, patience_s=90.0)
        with pytest.raises(JudgeError, match="within 90 s"):
            await one.ask(HELLO)
        await clock.sleep(60.0)
        assert (await one.ask(HELLO)).text == RIGHT and sum(clock.slept) <= 91
        await one.close()


@pytest.mark.parametrize("headers", [{"Retry-After": "0"}, {"Retry-After": formatdate(900_000, usegmt=True)}, {"Retry-After-Ms": "1"}])
async def test_a_server_that_asks_for_no_wait_is_not_asked_without_a_pause(headers: dict[str, str]) -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_005 else ScriptedAnswer(status=429, headers=headers)
    ) as server:
        one = endpoint(server.url, clock=clock, concurrency=4)
        replies = await asyncio.gather(*(one.ask(HELLO) for _ in range(20)))
        await one.close()
    assert {reply.text for reply in replies} == {RIGHT}
    assert len(server.requests) <= 20 + 4 + 8, "four that were under way together, and then one question at a time, after longer and longer"
    assert clock.now - 1_000_000 < 20


async def test_one_question_looks_whether_a_server_is_back_and_the_others_wait_for_it() -> None:
    """Also after a header of years: the question that got it ends, and a minute later the next one looks."""
    clock, refusal = JumpingClock(), ScriptedAnswer(status=429, headers={"Retry-After": "1000000000"})
    with ChatServer(lambda body, number: refusal if number < 3 else ScriptedAnswer(RIGHT)) as server:
        one = endpoint(server.url, clock=clock, concurrency=2)
        done = await asyncio.gather(*(one.ask(HELLO) for _ in range(10)), return_exceptions=True)
        assert (await one.ask(HELLO)).text == RIGHT
        await one.close()
    failed = [error for error in done if isinstance(error, JudgeError)]
    assert len(failed) == 3 and len(server.requests) == 3 + 7 + 1
    assert 60 <= clock.now - 1_000_000 <= 190, "a minute for each refusal"


async def test_a_server_that_hangs_ends_all_questions_within_their_patience() -> None:
    """Though one question at a time looks whether it is back."""
    with ChatServer([ScriptedAnswer(hangs=True)]) as server:
        one, started = Endpoint(url=server.url, model="m", timeout_s=0.3, patience_s=2.0, concurrency=4), time.monotonic()
        done = await asyncio.gather(*(one.ask(HELLO) for _ in range(12)), return_exceptions=True)
        assert all(isinstance(error, JudgeError) for error in done) and time.monotonic() - started < 4.5
        await one.close()


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
async def test_an_error_in_a_200_is_what_its_status_says(error: object, retried: bool) -> None:
    with ChatServer([ScriptedAnswer(raw=json.dumps(error).encode()), ScriptedAnswer(RIGHT)]) as server:
        one = endpoint(server.url)
        if retried:
            assert (await one.ask(HELLO)).text == RIGHT
        else:
            with pytest.raises(JudgeError, match=r"refuses: status 40[14]: in a 200: no"):
                await one.ask(HELLO)
        await one.close()
    assert len(server.requests) == 1 + retried


async def test_an_answer_that_speaks_of_errors_is_an_answer() -> None:
    body = {"error": None, "choices": [{"message": {"content": RIGHT}, "finish_reason": "stop"}]}
    with ChatServer([ScriptedAnswer(raw=json.dumps(body).encode())]) as server:
        assert (await closing(endpoint(server.url))).text == RIGHT  # type: ignore[attr-defined]
    with ChatServer([ScriptedAnswer(raw=b'{"error": {"message": "what?"}}')]) as server:
        assert "no chat completion" in (await closing(endpoint(server.url))).problem  # type: ignore[attr-defined]


async def test_an_answer_in_tiny_pieces_is_given_up_soon_and_holds_nothing_up() -> None:
    """Each piece costs more than its bytes; the loop goes on meanwhile."""
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
    one, started = Endpoint(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", model="m", patience_s=0.4), time.monotonic()
    with pytest.raises(JudgeError, match=r"comes in pieces of 1 bytes|no answer within"):
        await one.ask(HELLO)
    assert time.monotonic() - started < 5 and max(lags) < 0.5
    watching.cancel()
    await one.close()
    server.close()


async def test_one_pause_holds_for_all_questions_of_an_endpoint() -> None:
    clock = JumpingClock()
    with ChatServer(
        lambda body, number: ScriptedAnswer(status=429, headers={"Retry-After": "50"}) if number == 0 else ScriptedAnswer(RIGHT)
    ) as server:
        one = endpoint(server.url, clock=clock, concurrency=1)
        await asyncio.gather(*(one.ask(HELLO) for _ in range(6)))
        await one.close()
    assert len(server.requests) == 7 and 50 <= clock.now - 1_000_000 <= 55


async def test_a_server_that_hangs_breaks_off_or_is_not_there_is_asked_again() -> None:
    with ChatServer([ScriptedAnswer(hangs=True), ScriptedAnswer(RIGHT)]) as server:
        reply = await closing(endpoint(server.url, timeout_s=0.5))
        assert reply.text == RIGHT and reply.tries >= 2  # type: ignore[attr-defined]  # more where a busy machine is late
    with ChatServer([ScriptedAnswer(RIGHT, breaks_off=True), ScriptedAnswer(RIGHT)]) as server:
        reply = await closing(endpoint(server.url))
        assert reply.text == RIGHT and reply.tries == 2  # type: ignore[attr-defined]
        gone = server.url
    with pytest.raises(JudgeError, match="ConnectError"):
        await closing(endpoint(gone, patience_s=5.0))


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (ScriptedAnswer(raw=b"x" * 10_000_000), "more than 1,048,576 bytes"),
        (ScriptedAnswer("y" * 10_000_000), "more than 1,048,576 bytes"),
        (ScriptedAnswer(raw=b'{"choices": [{"mess'), "no chat completion"),
        (ScriptedAnswer(raw=b"[" * 100_000), "no chat completion"),
        (ScriptedAnswer(raw=b'{"choices": []}'), "no chat completion"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": null}}]}'), "without text"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": 7}}]}'), "without text"),
        (ScriptedAnswer(raw=b'{"choices": [{"message": {"content": null, "refusal": "I cannot"}}]}'), "refused"),
        (ScriptedAnswer(RIGHT[:20], finish_reason="length"), "cut off"),
        (ScriptedAnswer(raw=b"\xff\xfe\x00"), "no chat completion"),
    ],
)
async def test_answers_that_are_none_are_kept_bounded_with_the_problem(says: ScriptedAnswer, problem: str) -> None:
    with ChatServer([says]) as server:
        reply = await closing(endpoint(server.url))
    assert problem in reply.problem and len(reply.text) <= 1 << 20 and len(server.requests) == 1  # type: ignore[attr-defined]


async def test_a_schema_is_asked_for_as_long_as_the_server_takes_it() -> None:
    with ChatServer(
        lambda body, number: ScriptedAnswer(status=400, raw=b"no response_format") if "response_format" in body else ScriptedAnswer(RIGHT)
    ) as server:
        one = endpoint(server.url)
        assert (await one.ask(HELLO, schema=SCHEMA)).text == RIGHT
        assert (await one.ask(HELLO, schema=SCHEMA)).text == RIGHT
        await one.close()
    assert ["response_format" in request["body"] for request in server.requests] == [True, False, False]
    with ChatServer([ScriptedAnswer(status=400, raw=b"too long")]) as server:
        one = endpoint(server.url)
        for _ in range(2):  # a server that refuses either way has shown nothing about schemas
            with pytest.raises(JudgeError, match="status 400: too long"):
                await one.ask(HELLO, schema=SCHEMA)
        await one.close()
    assert ["response_format" in request["body"] for request in server.requests] == [True, False] * 2


async def test_the_key_goes_to_the_endpoint_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG, logger="agentrl")
    with ChatServer([ScriptedAnswer(status=401, raw=b"bad key sk-very-secret")]) as server, pytest.raises(JudgeError) as refused:
        await closing(endpoint(server.url, key_env="JUDGE_KEY"))
    assert server.requests[0]["headers"]["authorization"] == "Bearer sk-very-secret"
    with ChatServer([ScriptedAnswer(status=503, raw=b"sk-very-secret"), ScriptedAnswer(RIGHT)]) as server:
        one = endpoint(server.url, key_env="JUDGE_KEY")
        await closing(one)
    assert "JUDGE_KEY" in str(refused.value) and "[key]" in caplog.text
    assert "secret" not in str(refused.value) + caplog.text + repr(one) + json.dumps(one.identity())
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(JudgeError, match="JUDGE_KEY holds no key"):
        await closing(one)


async def test_a_server_that_repeats_its_headers_gives_no_secret_away(monkeypatch: pytest.MonkeyPatch) -> None:
    key, header = "sk-very-secret", "zebra-0123456789-in-a-header"
    monkeypatch.setenv("JUDGE_KEY", key)
    monkeypatch.setenv("THEIR_HEADER", header)
    wanted = {"key_env": "JUDGE_KEY", "headers": {"api-key": "env:THEIR_HEADER"}}
    with ChatServer([ScriptedAnswer(f"{key} and {header}")]) as server:
        reply = await closing(endpoint(server.url, **wanted))
    assert server.requests[0]["headers"]["api-key"] == header and reply.text == "[secret] and [secret]"  # type: ignore[attr-defined]
    for at in range(280, 301):  # in part behind what is quoted
        with (
            ChatServer([ScriptedAnswer(status=401, raw=b"x" * at + f"{key}{header}".encode())]) as server,
            pytest.raises(JudgeError) as refused,
        ):
            await closing(endpoint(server.url, **wanted))
        assert "sk-" not in str(refused.value) and "zebra" not in str(refused.value)


async def test_a_redirect_is_not_followed() -> None:
    with ChatServer([ScriptedAnswer(RIGHT)]) as other:
        away = ScriptedAnswer(status=307, headers={"location": f"{other.url}/chat/completions"}, raw=b"")
        with ChatServer([away]) as server, pytest.raises(JudgeError, match="redirects"):
            await closing(endpoint(server.url))
        assert other.requests == []


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "https://user:pass@x/v1", "https://x/v1?key=1", "localhost:8000"])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="an endpoint's url"):
        Endpoint(url=url, model="m")


async def test_a_url_may_be_told_when_it_is_needed() -> None:
    urls: list[str] = []
    one = endpoint("http://127.0.0.1:9/v1")
    one = Endpoint(url=lambda: urls[-1], model="scripted", clock=one.clock)
    for text in ("first", "second"):
        with ChatServer([ScriptedAnswer(text)]) as server:
            urls.append(server.url)
            assert (await one.ask(HELLO)).text == text
    await one.close()


@pytest.fixture(params=[{"prompt_tokens": -1, "completion_tokens": 5}, {"prompt_tokens": 1e30, "completion_tokens": True}, [], None])
def odd_usage(request: pytest.FixtureRequest) -> Iterator[bytes]:
    yield json.dumps({"choices": [{"message": {"content": "x" * 300}}], "usage": request.param}).encode()


async def test_tokens_are_the_servers_count_or_an_estimate(odd_usage: bytes) -> None:
    with ChatServer([ScriptedAnswer("x", tokens=(7, 3)), ScriptedAnswer(raw=odd_usage)]) as server:
        one = endpoint(server.url)
        counted, guessed = await one.ask(HELLO), await one.ask(HELLO)
        await one.close()
    assert (counted.prompt_tokens, counted.completion_tokens, counted.counted) == (7, 3, True)
    assert (guessed.prompt_tokens, guessed.completion_tokens, guessed.counted) == (1, 100, False)
    assert Prices(prompt=2.0, completion=10.0).of(1000, 100) == pytest.approx(0.003)


async def test_an_endpoint_that_answers_nothing_is_overdue_until_it_does() -> None:
    """`agentrl.run.supervise.watch_external_servers` shows both."""
    looks: list[str] = []

    class Looking(JumpingClock):
        async def sleep(self, seconds: float) -> None:
            began = self.now
            for part in range(1, 21):
                self.now = began + seconds * part / 20
                looks.append(one._live.overdue())
            await asyncio.sleep(0)

    clock = Looking()
    with ChatServer(
        lambda body, number: ScriptedAnswer(RIGHT) if clock.now > 1_000_600 else ScriptedAnswer(status=503, raw=b"busy")
    ) as server:
        one = endpoint(server.url, clock=clock, timeout_s=120.0)
        assert (await closing(one)).text == RIGHT  # type: ignore[attr-defined]
    assert looks[0] == "" and looks[-1].startswith("judge scripted at 127.0.0.1:") and "has answered nothing for 6" in looks[-1]
    assert one._live.overdue() == "" and one._live in external_parts()
