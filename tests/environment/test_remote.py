"""Environments behind a connection: HTTP servers that misbehave, limits and counts of sessions, and families."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx  # noqa: F401  # its import takes longer than the deadlines of these tests
import pytest

from agentrl.environment.remote import RemoteEnvironment, RemoteOpener, number
from agentrl.errors import EnvironmentFault, PolicyFault, TaskError
from agentrl.records import EnvironmentSpec
from tests.environment.scenarios import call
from tests.environment.web_servers import HttpRequest, answer, events, http_server

TOOLS = {"tools": [{"name": "go", "description": "Goes.", "input_schema": {"type": "object", "properties": {}}}]}
PATIENT = {"reset_s": 20, "step_s": 20, "wait_s": 20}
Page = Callable[[HttpRequest], bytes | None]


class Ors:
    """An ORS server; `pages` replace its answers."""

    def __init__(self, **pages: Any) -> None:
        self.pages = {"/" + name.replace("__", "/"): page for name, page in pages.items()}
        self.paths: list[str] = []
        self.open: set[str] = set()
        self.keys: set[str] = set()

    async def __call__(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bytes | None:
        self.paths.append(request.path)
        self.keys.add(request.headers.get("x-api-key", ""))
        session = request.headers.get("x-session-id", "")
        if request.path in self.pages:
            page = self.pages[request.path]
            reply = page(request, writer) if callable(page) else page
            return await reply if asyncio.iscoroutine(reply) else reply
        if request.path == "/create":
            self.open.add(session)
        if request.path == "/delete":
            self.open.discard(session)
        defaults: Mapping[str, Any] = {
            "/list_environments": ["world"],
            "/world/task_tools": TOOLS,
            "/world/splits": [{"name": "train", "type": "train"}, {"name": "exam", "type": "test"}],
            "/world/num_tasks": {"num_tasks": 8 if b"train" in request.body else 3},
            "/world/prompt": [{"type": "text", "text": "Go."}, {"type": "image", "data": "aaaa", "mimeType": "image/png"}],
        }
        if request.path == "/create_session":
            return events(("task_id", f"s{len(self.paths)}"), ("end", ""))
        if request.path == "/world/call":
            return call_result({"blocks": [], "reward": 1.0, "finished": True, "metadata": None})
        return answer(defaults.get(request.path, {}))


def call_result(output: Any) -> bytes:
    return events(("task_id", "t"), ("end", json.dumps({"ok": True, "output": output})))


@pytest.fixture
async def opener() -> AsyncIterator[RemoteOpener]:
    opened = RemoteOpener()
    yield opened
    await opened.close()


async def begin(opener: RemoteOpener, url: str, kind: str = "ors", **options: Any) -> RemoteEnvironment:
    return await opener.open(EnvironmentSpec(ref=f"{kind}:{url}", options={**PATIENT, **options}))


def counts(opener: RemoteOpener) -> tuple[int, int, int]:
    (server,) = opener.servers.values()
    return server.opened, server.closed, server.lost


async def silent(request: HttpRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def incomplete(request: HttpRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\nevent: chunk\r\n")
    await writer.drain()


async def endless(request: HttpRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + b": comment \r\n" * 341 + b"    \r\n")
        await writer.drain()


OUTPUT = {"blocks": [], "reward": 1.0, "finished": True}
FAULTS: Mapping[str, tuple[Any, str]] = {
    "hangs": (silent, "did not answer"),
    "drops the connection": (lambda *_: None, "request /world/call failed"),
    "drops it within the answer": (incomplete, "request /world/call failed"),
    "an endless stream": (endless, "exceeds the limits|did not answer"),
    "a stream that ends early": (events(("task_id", "t"), ("chunk", "{")), "ended the response"),
    "an error event": (events(("error", "pump")), "pump"),
    "a large result": (events(("end", "x" * (3 << 20))), "exceeds the limits"),
    "no JSON": (events(("end", "{")), "invalid JSON"),
    "a list": (events(("end", "[]")), "not dict"),
    "deep JSON": (events(("end", "[" * 100_000)), "invalid JSON"),
    "no output": (events(("end", '{"ok": true}')), "not dict"),
    "NaN": (call_result({**OUTPUT, "reward": float("nan")}), "invalid JSON"),
    "text as reward": (call_result({**OUTPUT, "reward": "1"}), "not a finite number"),
    "finished of no flag": (call_result({**OUTPUT, "finished": 1}), "not bool"),
    "no blocks": (call_result({"reward": 1.0, "finished": True}), "not list"),
    "a block of no object": (call_result({**OUTPUT, "blocks": ["x"]}), "not dict"),
    "an end without any reward": (call_result({**OUTPUT, "reward": None}), "without any reward"),
    "the session is gone": (answer({"detail": "Session deleted"}, 410), "ended the session: Session deleted"),
    "status 500": (answer({"detail": "oh"}, 500), "status 500: oh"),
    "a redirect": (answer(b"", 308, location="http://192.0.2.1/"), "redirects are not followed"),
    "a wrong key": (answer({}, 401), "options.key"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_in_a_call_is_never_a_score(opener: RemoteOpener, name: str) -> None:
    page, message = FAULTS[name]
    server = Ors(world__call=page)
    async with http_server(server) as url:
        environment = await begin(opener, url, step_s=0.3 if "did not answer" in message else 20)
        assert (await environment.reset()).text == "Go.\n(image/png, 3 bytes, which cannot be shown)"
        with pytest.raises(EnvironmentFault, match=message):
            await environment.step(call("go"))
        with pytest.raises(EnvironmentFault, match="is not possible after a fault"):
            await environment.step(call("go"))
        await environment.close()
    assert counts(opener) == (1, 1, 0) and not server.open


@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        ({"create_session": events(("end", ""))}, EnvironmentFault, "invalid session id"),
        ({"create_session": events(("task_id", "x" * 500), ("end", ""))}, EnvironmentFault, "invalid session id"),
        ({"create": answer({"detail": "Invalid index"}, 400)}, TaskError, "Invalid index"),
        ({"list_environments": answer([])}, EnvironmentFault, "not str"),
        ({"world__task_tools": answer({})}, EnvironmentFault, "not list"),
        ({"world__task_tools": answer({"tools": [{"name": "rm -rf"}]})}, EnvironmentFault, "a name must have"),
        (
            {"world__task_tools": answer({"tools": [{**TOOLS["tools"][0], "name": f"t{i}"} for i in range(99)]})},
            EnvironmentFault,
            "99 tools",
        ),
        ({"world__task_tools": answer(b"x" * (10 << 20))}, EnvironmentFault, "more than"),
        ({"world__task_tools": answer({"detail": "no image"}, 500)}, EnvironmentFault, "no image"),
    ],
)
async def test_a_session_that_does_not_open_is_cleaned_up(opener: RemoteOpener, pages: Any, error: type[Exception], message: str) -> None:
    server = Ors(**pages)
    async with http_server(server) as url:
        with pytest.raises(error, match=message):
            await begin(opener, url)
        assert counts(opener) == (0, 0, 0) and not server.open
        assert opener.servers[f"ors:{url}"]._used == 0


async def test_tools_that_change_during_the_run(opener: RemoteOpener) -> None:
    server = Ors()
    async with http_server(server) as url:
        await (await begin(opener, url, index=1)).close()
        server.pages["/world/task_tools"] = answer({"tools": [{**TOOLS["tools"][0], "name": "run"}]})
        await (await begin(opener, url, index=2)).close()  # another task may have other tools
        with pytest.raises(EnvironmentFault, match="changed the tools of task 1"):
            await begin(opener, url, index=1)
    assert not server.open


async def test_an_image_whose_data_is_not_text_has_no_size(opener: RemoteOpener) -> None:
    page = call_result({**OUTPUT, "blocks": [{"type": "image", "data": 5}]})
    async with http_server(Ors(world__call=page)) as url:
        environment = await begin(opener, url)
        assert (await environment.step(call("go"))).observation.text == "(image, 0 bytes, which cannot be shown)"
        await environment.close()


async def test_a_postponed_request_is_repeated_after_the_requested_wait(opener: RemoteOpener) -> None:
    times: list[float] = []

    def once(request: HttpRequest, _: Any) -> bytes:
        times.append(time.monotonic())
        return answer({}, 429, retry_after="0.3") if len(times) == 1 else call_result(OUTPUT)

    async with http_server(Ors(world__call=once)) as url:
        environment = await begin(opener, url)
        assert (await environment.step(call("go"))).reward == 1.0
        await environment.close()
    assert len(times) == 2 and times[1] - times[0] >= 0.3


async def test_the_request_for_a_session_is_repeated_if_the_server_is_busy(opener: RemoteOpener, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[float] = []

    def busy(request: HttpRequest, _: Any) -> bytes:
        tries.append(time.monotonic())
        return answer({}, 503, retry_after="0.2") if len(tries) < 3 else events(("task_id", "s"), ("end", ""))

    server = Ors(create_session=busy)
    async with http_server(server) as url:
        await (await begin(opener, url)).close()
    assert counts(opener) == (1, 1, 0) and tries[2] - tries[0] >= 0.4
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")  # one for both refusals
    assert "status 503" in warning and "retrying for up to" in warning


async def test_a_wait_beyond_the_limit_is_a_fault(opener: RemoteOpener) -> None:
    async with http_server(Ors(create_session=answer({}, 503, retry_after="99999"))) as url:
        with pytest.raises(EnvironmentFault, match="opened no session within"):
            await begin(opener, url, wait_s=0.3)


@pytest.mark.slow
async def test_more_episodes_than_sessions_wait(opener: RemoteOpener) -> None:
    server = Ors()
    peak = 0

    async def episode() -> None:
        nonlocal peak
        environment = await begin(opener, url, sessions=3)
        peak = max(peak, len(server.open))
        await environment.step(call("go"))
        await environment.close()

    async with http_server(server) as url:
        await asyncio.gather(*(episode() for _ in range(12)))
        assert peak == 3 and counts(opener) == (12, 12, 0)
        environments = [await begin(opener, url) for _ in range(3)]
        server_ = opener.servers[f"ors:{url}"]
        object.__setattr__(server_.options, "wait_s", 0.2)
        with pytest.raises(EnvironmentFault, match=r"no session became free within 0.2 s; 3 are in use"):
            await begin(opener, url)
        await asyncio.gather(*(environment.close() for environment in environments))


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.004, 0.008, 0.016, 0.032])
async def test_cancelled_episodes_leave_no_session(opener: RemoteOpener, delay_s: float) -> None:
    server = Ors()

    async def episode() -> None:
        environment = await begin(opener, url, sessions=2)
        try:
            await environment.reset()
            await environment.step(call("go"))
        finally:
            await environment.close()

    async with http_server(server) as url:
        tasks = [asyncio.create_task(episode()) for _ in range(6)]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await (await begin(opener, url)).close()  # a slot is free
        await opener.close()
        assert not server.open
        opened, closed, lost = counts(opener)
        assert (opened, lost) == (closed, 0)


async def test_a_session_that_the_server_object_closed_is_not_counted_twice(opener: RemoteOpener) -> None:
    fake = Ors()
    async with http_server(fake) as url:
        environment = await begin(opener, url)
        await opener.close()  # such as at the end of the run, while an episode still plays
        requests = len(fake.paths)
        with pytest.raises(EnvironmentFault, match="the session has ended"):
            await environment.step(call("go"))
        await environment.close()
        await opener.close()
        assert len(fake.paths) == requests
    assert counts(opener) == (1, 1, 0)


async def test_a_session_that_opens_while_the_sessions_are_closed_is_closed_by_its_environment(opener: RemoteOpener) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def create(request: HttpRequest, writer: asyncio.StreamWriter) -> bytes:
        entered.set()
        await go.wait()
        return answer({})

    fake = Ors(create=create)
    async with http_server(fake) as url:
        opening = asyncio.create_task(begin(opener, url))
        await entered.wait()
        (server,) = opener.servers.values()
        await asyncio.gather(*(server.end(session) for session in list(server._used_at)))  # as `close` does
        go.set()
        environment = await opening
        assert (server._used, len(server._used_at)) == (1, 1)
        await environment.close()
        assert fake.paths[-2:] == ["/delete", "/delete_session"] and server._used == 0
    assert counts(opener) == (1, 1, 0)


async def test_a_session_that_cannot_be_deleted_is_lost(opener: RemoteOpener) -> None:
    async with http_server(Ors(delete=answer({}, 500))) as url:
        await (await begin(opener, url)).close()
        assert counts(opener) == (1, 0, 1)


async def test_an_answer_ends_an_episode_with_a_final_tool(opener: RemoteOpener) -> None:
    bodies: list[Any] = []

    def called(request: HttpRequest, _: Any) -> bytes:
        bodies.append(request.json)
        return call_result(OUTPUT)

    tools = answer({**TOOLS, "terminal_tool": {"name": "submit", "arg": "text", "description": ""}})
    async with http_server(Ors(world__call=called, world__task_tools=tools)) as url:
        environment = await begin(opener, url)
        assert environment.takes_text
        assert (await environment.step("forty-two")).terminated
        await environment.close()
    async with http_server(Ors()) as url:
        environment = await begin(opener, url)
        assert not environment.takes_text
        with pytest.raises(PolicyFault, match="call one of the tools"):
            await environment.step("forty-two")
        await environment.close()
    assert bodies == [{"name": "submit", "input": {"text": "forty-two"}}]


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, None, "1"])
def test_a_number_is_finite(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"the reward is .*, not a finite number"):
        number(value, "the reward")
