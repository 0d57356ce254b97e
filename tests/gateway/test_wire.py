"""Requests of real HTTP clients: offers of HTTP/2, compressed bodies, half-closed connections, foreign hosts, and the small GET routes."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from agentrl.gateway.request import MAX_BODY
from agentrl.testing import ScriptedPolicy
from tests.gateway.test_chat_completions import LOOK, calls, client, user
from tests.gateway.test_connections import opened, parser
from tests.gateway.test_options import PATHS, body
from tests.gateway.test_other_protocols import claude

__all__ = ["parser"]

ASK = json.dumps(body("chat")).encode()


def request(key: str, content: bytes = ASK, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1:8790", f"Authorization: Bearer {key}", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join((*lines, "", "")).encode() + content


async def response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of one answer."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


OFFERS = {
    "h2c": ("ServerConnection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    "kept alive": ("ServerConnection: keep-alive, Upgrade", "Upgrade: h2c"),
    "websocket": ("ServerConnection: Upgrade", "Upgrade: websocket"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_offer_is_answered_in_http(run_episode: Any, parser: str, offer: str, chunked: bool) -> None:
    """Java's default client and `curl --http2` send this offer. The connection is reused, also for concurrent requests."""

    async def program(url: str, key: str) -> None:
        reader, writer = await opened(url)
        request_bytes = request(key, ASK, *OFFERS[offer])
        if chunked:
            head, _, _ = request_bytes.partition(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
            pieces = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (ASK[:10], ASK[10:])]
            request_bytes = b"\r\n".join((*lines, b"Transfer-Encoding: chunked", b"", b"")) + b"".join(pieces) + b"0\r\n\r\n"
        for count in (1, 2):
            writer.write(request_bytes * count)
            for _ in range(count):
                status, headers, content = await response(reader)
                assert status == 200 and json.loads(content)["choices"][0]["message"]["content"] == "1"
                assert "upgrade" not in headers
        for start in range(0, len(request_bytes), 7):
            writer.write(request_bytes[start : start + 7])
            await asyncio.sleep(0)
        assert (await response(reader))[0] == 200
        writer.close()

    outcome = await run_episode(program, script=lambda turn, _: "1")
    assert outcome.counts == {"answered": 4} and outcome.trained_once()


async def test_a_request_to_be_a_proxy_is_refused(run_episode: Any, parser: str) -> None:
    async def program(url: str, key: str) -> None:
        reader, writer = await opened(url)
        writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readline()).split()[1] in (b"400", b"404")
        writer.close()

    await run_episode(program)


async def test_a_half_closed_client_gets_its_answer(run_episode: Any, parser: str) -> None:
    """`nc -N` half-closes its connection. A repeated request gets the same answer, because the client may have disconnected."""
    resume, under_way = asyncio.Event(), asyncio.Event()

    class HeldPolicy(ScriptedPolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            under_way.set()
            await resume.wait()
            return await super().generate(*args, **kwargs)

    async def program(url: str, key: str) -> None:
        connections = [await opened(url) for _ in range(2)]
        for reader, writer in connections:
            writer.write(request(key))
            writer.write_eof()
            await under_way.wait()
            await asyncio.sleep(0.1)
            assert not reader.at_eof()
        resume.set()
        ids = set()
        for reader, writer in connections:
            status, headers, content = await response(reader)
            assert (status, headers["connection"]) == (200, "close") and await reader.read() == b""
            ids.add(json.loads(content)["id"])
            writer.close()
        assert len(ids) == 1
        reader, writer = await opened(url)  # an incomplete request has no answer
        writer.write(request(key)[:-5])
        writer.write_eof()
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()

    outcome = await run_episode(program, "1", kind=HeldPolicy)
    assert outcome.trained_once() and outcome.counts["answered"] == 1 and outcome.counts["replayed"] == 1


PACKED = {
    "gzip": gzip.compress(ASK),
    "GZIP": gzip.compress(ASK),
    "deflate": zlib.compress(ASK),
    "identity": ASK,
}
BAD = {
    "not gzip": ("gzip", ASK, 400),
    "cut off": ("gzip", gzip.compress(ASK)[:-9], 400),
    "trailing bytes": ("gzip", gzip.compress(ASK) + b"x", 400),
    "a bomb": ("gzip", gzip.compress(b" " * (MAX_BODY + 1)), 413),
    "unknown": ("br", ASK, 415),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(ASK)), 415),
}


async def test_compressed_bodies_are_read_within_the_same_bound(run_episode: Any) -> None:
    async def program(url: str, key: str) -> None:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as http:
            for encoding, content in PACKED.items():
                response = await http.post(PATHS["chat"], content=content, headers={"content-encoding": encoding})
                assert response.status_code == 200, (encoding, response.text)
            for name, (encoding, content, status) in BAD.items():
                response = await http.post(PATHS["chat"], content=content, headers={"content-encoding": encoding})
                assert response.status_code == status and response.json()["error"]["message"], name

    outcome = await run_episode(program, script=lambda turn, _: "1")
    assert outcome.counts["answered"] == len(PACKED)


LOCAL = ("127.0.0.1:8790", "localhost", "LOCALHOST:1", "[::1]:80", "gateway:8790", "host.docker.internal", "a.localhost")
FOREIGN = ("evil.example", "evil.example:8790", "127.0.0.1.evil.example", "localhost.evil.example", "a@127.0.0.1", "1.2.3.4.5")


async def test_public_internet_names_are_refused(run_episode: Any) -> None:
    """A web page can make its own name resolve to this machine, with or without a key."""

    async def program(url: str, key: str) -> None:
        async with httpx.AsyncClient(base_url=url) as http:
            for headers in ({"authorization": f"Bearer {key}"}, {}):
                for host in LOCAL:
                    response = await http.get("/v1/models", headers={**headers, "host": host})
                    assert response.status_code == (200 if headers else 401), host
                    response = await http.get("/v1/models", headers={**headers, "origin": f"http://{host}"})
                    assert response.status_code == (200 if headers else 401), host
                for host in FOREIGN:
                    response = await http.get("/v1/models", headers={**headers, "host": host})
                    assert response.status_code == 403, host
                    error = response.json()["error"]["message"]
                    assert repr(host) in error and "Send requests to the address in OPENAI_BASE_URL" in error and ".internal" in error
                for origin in (*(f"https://{host}" for host in FOREIGN), "null", "chrome-extension://a"):
                    response = await http.post(PATHS["messages"], content=ASK, headers={**headers, "origin": origin})
                    assert response.status_code == 403 and response.json()["error"]["type"] == "permission_error", origin
                    assert "Send no Origin header" in response.json()["error"]["message"]

    await run_episode(program)


async def test_no_answer_is_a_redirect(run_episode: Any) -> None:
    async def program(url: str, key: str) -> None:
        async with httpx.AsyncClient(base_url=url) as http:
            for path in (*PATHS.values(), "/v1/models"):
                response = await http.post(f"{path}/", content=ASK, headers={"host": "evil.example"})
                assert response.status_code in (404, 405) and "location" not in response.headers and response.headers["request-id"]

    await run_episode(program)


async def test_the_small_routes_of_each_protocol(run_episode: Any) -> None:
    import anthropic
    import openai

    async def program(url: str, key: str) -> None:
        async with client(url, key, max_retries=0) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["policy"]
            assert (await sdk.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.models.retrieve("gpt-4")
            assert missing.value.code == "model_not_found" and missing.value.request_id
            response = await sdk.responses.create(model="policy", input="one?")
            assert response._request_id and (await sdk.responses.retrieve(response.id)).model_dump() == response.model_dump()
            unstored = await sdk.responses.create(model="policy", input="two?", store=False)
            for name in (unstored.id, "resp_0"):
                with pytest.raises(openai.NotFoundError):
                    await sdk.responses.retrieve(name)
                with pytest.raises(openai.NotFoundError):
                    await sdk.responses.create(model="policy", input="and?", previous_response_id=name)
        async with claude(url, key) as claude_sdk:
            [model] = [entry async for entry in claude_sdk.models.list()]
            assert (model.type, model.id, model.display_name) == ("model", "policy", "policy") and model.created_at
            assert (await claude_sdk.models.retrieve("policy")).type == "model"
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await claude_sdk.models.retrieve("claude")
            assert unknown.value.body["error"]["type"] == "not_found_error" and unknown.value.request_id  # type: ignore[index]

    outcome = await run_episode(program, script=lambda turn, _: "1")
    assert outcome.counts["answered"] == 2


async def test_counted_tokens_equal_the_policys_prompt(run_episode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a conversation that continues from sampled tokens. Nothing is sampled, and the tree does not change."""
    import anthropic

    async def program(url: str, key: str) -> None:
        look: Any = {"name": "look", "input_schema": LOOK["function"]["parameters"]}  # type: ignore[index]
        async with claude(url, key) as sdk:
            options: Any = {"model": "policy", "system": "Be brief.", "tools": [look]}
            messages: list[Any] = [user("one?")]
            for _ in range(2):
                count = await sdk.messages.count_tokens(messages=messages, **options)
                message = await sdk.messages.create(messages=messages, max_tokens=300, **options)
                assert count.input_tokens == message.usage.input_tokens
                messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                uses = [block for block in message.content if block.type == "tool_use"]
                messages.append(
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "seen"} for use in uses]}
                )
            with pytest.raises(anthropic.BadRequestError):
                await sdk.messages.count_tokens(model="policy", messages=[user("x" * 2_000_000)])
            monkeypatch.setattr("agentrl.gateway.session.MAX_REFUSED", 3)
            with pytest.raises(anthropic.RateLimitError):
                await sdk.messages.count_tokens(model="policy", messages=[user("one?")])

    outcome = await run_episode(program, "Looking." + calls("look"), "done")
    assert len(outcome.episode.trajectories) == 1 and outcome.trained_once()
