"""Sessions at OpenEnv servers, including servers that fail in every way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx  # noqa: F401  # its import takes longer than the deadlines of these tests
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection

from agentrl.environment.remote import RemoteEnvironment, RemoteOpener, RemoteServer
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault
from agentrl.records import EnvironmentSpec, ToolCall
from tests.environment.web_servers import FakeOpenEnv, fake_openenv, observation, reply

PATIENT = {"reset_s": 20, "step_s": 20, "wait_s": 20}


@pytest.fixture
async def opener() -> AsyncIterator[RemoteOpener]:
    opened = RemoteOpener()
    yield opened
    await opened.close()


async def begin(opener: RemoteOpener, fake: FakeOpenEnv, **options: Any) -> RemoteEnvironment:
    return await opener.open(EnvironmentSpec(ref=fake.ref, seed=7, options={**PATIENT, **options}))


def counts(opener: RemoteOpener) -> tuple[int, int, int]:
    (server,) = opener.servers.values()
    return server.opened, server.closed, server.lost


async def test_an_episode_is_played_and_its_session_is_closed(opener: RemoteOpener) -> None:
    received = []

    async def reset(socket: ServerConnection, data: Any) -> None:
        received.append(data)
        await socket.send(json.dumps(observation("start", reward=None)))

    async def step(socket: ServerConnection, data: Any) -> None:
        received.append(data)
        await socket.send(json.dumps(observation("end", reward=True, done=True)))

    async with fake_openenv(on_reset=reset, on_step=step) as fake:
        environment = await begin(opener, fake, reset={"level": 2})
        assert environment.instructions == "A test." and environment.actions == ["left", "right"]
        assert (await environment.reset()).text == "start"
        result = await environment.step("left")
        await environment.close()
        await environment.close()
    assert (result.observation.text, result.reward, result.terminated) == ("end", 1.0, True)
    assert received == [{"seed": 7, "level": 2}, {"move": "left"}]
    assert counts(opener) == (1, 1, 0)


ACTIONS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "text": ({"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}, None),
    "flag": ({"properties": {"go": {"type": "boolean"}}}, ["false", "true"]),
    "numbers": ({"properties": {"cell": {"type": "integer", "minimum": 1, "maximum": 3}}}, ["1", "2", "3"]),
    "definition": ({"$defs": {"M": {"enum": ["a", "b"]}}, "properties": {"m": {"$ref": "#/$defs/M"}}}, ["a", "b"]),
    "all of": ({"$defs": {"M": {"enum": [3, 4]}}, "properties": {"m": {"allOf": [{"$ref": "#/$defs/M"}]}}}, ["3", "4"]),
    "many values": ({"properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}}}, "act"),
    "two fields": ({"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}, "act"),
    "equal texts": ({"properties": {"m": {"enum": [1, "1"]}}}, "act"),
}


@pytest.mark.parametrize("name", ACTIONS)
async def test_actions_follow_from_the_schema(opener: RemoteOpener, name: str) -> None:
    schema, expected = ACTIONS[name]
    async with fake_openenv(schema=schema) as fake:
        environment = await begin(opener, fake)
        actions = environment.actions
        await environment.close()
        assert expected == (actions[0]["function"]["name"] if actions and isinstance(actions[0], dict) else actions)


async def test_choices_are_sent_as_their_values_and_calls_as_their_arguments(opener: RemoteOpener) -> None:
    seen: list[Any] = []

    async def step(socket: ServerConnection, data: Any) -> None:
        seen.append(data)
        await socket.send(json.dumps(observation()))

    async with fake_openenv(schema=ACTIONS["numbers"][0], on_step=step) as fake:
        environment = await begin(opener, fake)
        assert seen == []
        await environment.step("2")
        with pytest.raises(PolicyFault, match="one of: 1, 2, 3"):
            await environment.step("4")
        await environment.step("3")
        await environment.close()
        called = await begin(opener, fake, actions="tool")
        await called.step(ToolCall(name="act", arguments={"cell": 1}))
        with pytest.raises(PolicyFault, match="call one of the tools"):
            await called.step("1")
        await called.close()
    assert seen == [{"cell": 2}, {"cell": 3}, {"cell": 1}]


async def test_tools_of_the_environment(opener: RemoteOpener) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}

    async def step(socket: ServerConnection, data: Any) -> None:
        if data == {"type": "list_tools"}:
            content: dict[str, Any] = {"tools": [tool]}
        else:
            assert data == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
            content = {"tool_name": "add", "error": None, "result": {"content": [{"type": "text", "text": "2"}]}}
        await socket.send(json.dumps({"type": "observation", "data": {"observation": content, "reward": 0.5, "done": False}}))

    schema = {"properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
    async with fake_openenv(schema=schema, on_step=step) as fake:
        environment = await begin(opener, fake)
        assert environment.actions is not None and environment.actions[0]["function"]["name"] == "add"  # type: ignore[index]
        assert (await environment.step(ToolCall(name="add", arguments={"a": 1}))).observation.text == "2"
        await environment.close()


Answer = Callable[[ServerConnection], Awaitable[None]]


def sending(*messages: str | bytes) -> Answer:
    async def send(socket: ServerConnection) -> None:
        for message in messages:
            await socket.send(message)

    return send


async def hang(socket: ServerConnection, _: Any = None) -> None:
    await socket.wait_closed()


async def drop(socket: ServerConnection) -> None:
    socket.transport.abort()


async def leave(socket: ServerConnection) -> None:
    await socket.close()


async def endless_pieces(socket: ServerConnection) -> None:
    async def pieces() -> AsyncIterator[str]:
        while True:
            yield "x"
            await asyncio.sleep(0)

    await socket.send(pieces())


DEEP = '{"type": "observation", "data": ' + '{"a":' * 200 + "1" + "}" * 201
FAULTS: Mapping[str, tuple[Answer, str]] = {
    "hangs": (hang, "did not answer"),
    "drops the connection": (drop, "ended the session"),
    "ends the session": (leave, "ended the session"),
    "a large answer": (sending("x" * (10 << 20)), "ended the session"),
    "endless pieces": (endless_pieces, "pieces|did not answer"),
    "no JSON": (sending("{"), "invalid JSON"),
    "bytes": (sending(b"\xff\xfe"), "invalid JSON"),
    "a list": (sending("[]"), "not dict"),
    "deep JSON": (sending(DEEP), "invalid JSON"),
    "very deep JSON": (sending("[" * 100_000), "invalid JSON"),
    "another type": (sending('{"type": "state", "data": {}}'), "not an observation"),
    "no data": (sending('{"type": "observation"}'), "not dict"),
    "no observation": (sending('{"type": "observation", "data": {"done": false}}'), "not dict"),
    "NaN": (sending(json.dumps(observation(reward=float("nan")))), "invalid JSON"),
    "infinity": (sending(json.dumps(observation()).replace("1.0", "1e999")), "invalid JSON"),
    "a large number": (sending(json.dumps(observation(reward=10**400))), "not a finite number"),
    "text as reward": (sending(json.dumps(observation(reward="1"))), "not a finite number"),
    "metadata of no object": (sending('{"type": "observation", "data": {"observation": {"metadata": 5}}}'), "not dict"),
    "done of no flag": (sending(json.dumps(observation(done="no"))), "not bool"),
    "an end without any reward": (sending(json.dumps(observation(reward=None, done=True))), "without any reward"),
    "an error": (sending('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "pump"}}'), "EXECUTION_ERROR: pump"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_in_a_step_is_never_a_score(opener: RemoteOpener, name: str) -> None:
    misbehave, message = FAULTS[name]

    async def step(socket: ServerConnection, data: Any) -> None:
        await misbehave(socket)

    async with fake_openenv(on_step=step) as fake:
        environment = await begin(opener, fake, step_s=0.3 if "did not answer" in message else 20)
        other = await begin(opener, fake)
        with pytest.raises(EnvironmentFault, match=message):
            await environment.step("left")
        with pytest.raises(EnvironmentFault, match="is not possible after a fault"):
            await environment.step("left")
        assert (await other.reset()).text == "you are here"
        await environment.close()
        await other.close()
        opened, closed, lost = counts(opener)
        assert (opened, closed + lost) == (2, 2) and closed >= 1
        async with asyncio.timeout(2):
            while fake.open:
                await asyncio.sleep(0.01)


async def test_a_late_answer_is_not_used_for_the_next_step(opener: RemoteOpener) -> None:
    async def step(socket: ServerConnection, data: Any) -> None:
        await socket.send(json.dumps(observation("first")))
        await socket.send(json.dumps(observation("late", reward=100.0)))

    async with fake_openenv(on_step=step) as fake:
        environment = await begin(opener, fake)
        assert (await environment.step("left")).observation.text == "first"
        await asyncio.sleep(0.05)
        with pytest.raises(EnvironmentFault, match="not requested"):
            await environment.step("left")
        await environment.close()


async def test_a_cancelled_step_ends_the_session(opener: RemoteOpener) -> None:
    async with fake_openenv(on_step=hang) as fake:
        environment = await begin(opener, fake)
        task = asyncio.create_task(environment.step("left"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EnvironmentFault, match="is not possible after a fault"):
            await environment.step("left")
        await environment.close()
        assert counts(opener) == (1, 0, 1)


async def test_closing_does_not_wait_for_a_step_in_progress(opener: RemoteOpener) -> None:
    async with fake_openenv(on_step=hang) as fake:
        environment = await begin(opener, fake)
        task = asyncio.create_task(environment.step("left"))
        await asyncio.sleep(0.05)
        await opener.close()
        with pytest.raises(EnvironmentFault, match="ended the session"):
            await task
        assert counts(opener) == (1, 0, 1)


async def test_a_rejected_action_is_blamed_on_the_policy_unless_the_schema_changed(opener: RemoteOpener) -> None:
    problem = {"loc": ["move"], "msg": "Input should be 'left' or 'right'"}

    async def step(socket: ServerConnection, data: Any) -> None:
        error = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [problem]}}
        await socket.send(json.dumps(error))

    async with fake_openenv(on_step=step) as fake:
        environment = await begin(opener, fake)
        with pytest.raises(PolicyFault, match="move: Input should be 'left' or 'right'"):
            await environment.step("left")
        fake.schema = {**fake.schema, "required": ["move", "speed"]}
        with pytest.raises(EnvironmentFault, match="changed the schema"):
            await environment.step("left")
        await environment.close()


@pytest.mark.parametrize("errors", [None, 5, {}, "x"])
async def test_a_rejection_with_invalid_details_is_blamed_on_the_policy(opener: RemoteOpener, errors: Any) -> None:
    rejection = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": errors}}
    async with fake_openenv(on_step=lambda socket, _: sending(json.dumps(rejection))(socket)) as fake:
        environment = await begin(opener, fake)
        with pytest.raises(PolicyFault, match="Invalid message"):
            await environment.step("left")
        await environment.close()


async def test_a_server_that_rejects_the_request_for_its_tools_is_a_fault(opener: RemoteOpener) -> None:
    rejection = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message"}}
    async with fake_openenv(schema={"properties": {}}, on_step=lambda socket, _: sending(json.dumps(rejection))(socket)) as fake:
        with pytest.raises(EnvironmentFault, match="lists no tools: Invalid message"):
            await begin(opener, fake)
        assert counts(opener) == (0, 0, 0)


def moved() -> Any:
    return reply(b"", 307, location="http://192.0.2.1/schema")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (moved, "redirects are not followed"),
        (lambda: reply({"detail": "oh"}, 500), "status 500: oh"),
        (lambda: reply(b"x" * (10 << 20)), "more than"),
        (lambda: reply(b"{"), "invalid JSON"),
        (lambda: reply([]), "not dict"),
        (lambda: reply({"action": {"properties": []}}), "not dict"),
        (lambda: reply({"action": {"properties": {"m": {}}, "required": None}}), "required of .* not list"),
        (lambda: reply({"action": {"properties": {"m": {}}, "required": [{}]}}), "a required field of .* not str"),
        (lambda: reply({"action": {"properties": {"m": {"$ref": "#/$defs/M"}}, "$defs": []}}), r"\$defs of .* not dict"),
        (lambda: reply({}, 401), "set tasks.family.options.key"),
    ],
)
async def test_a_bad_description_of_actions_is_a_fault(opener: RemoteOpener, page: Any, message: str) -> None:
    async with fake_openenv(pages={"/schema": page}) as fake:
        with pytest.raises(EnvironmentFault, match=message):
            await begin(opener, fake)
        assert counts(opener) == (0, 0, 0)


async def test_a_redirected_socket_is_not_followed(opener: RemoteOpener) -> None:
    async with fake_openenv(pages={"/ws": moved}) as fake:
        with pytest.raises(EnvironmentFault, match="status 307; redirects are not followed"):
            await begin(opener, fake)


async def test_a_server_that_never_answers_is_a_fault(opener: RemoteOpener) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # a half-open connection
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    fake = FakeOpenEnv(port=server.sockets[0].getsockname()[1])
    with pytest.raises(EnvironmentFault, match="did not answer"):
        await begin(opener, fake, reset_s=0.3, wait_s=0.5)
    server.close()
    with pytest.raises(EnvironmentFault, match="opened no session within"):  # nothing listens any more
        await begin(opener, fake)


async def test_sessions_wait_when_a_server_reports_its_limit(opener: RemoteOpener) -> None:
    limit = 2

    async def check(socket: ServerConnection) -> None:
        if fake.open > limit:
            full = {"code": "CAPACITY_REACHED", "message": "full", "active_sessions": limit, "max_sessions": limit}
            await socket.send(json.dumps({"type": "error", "data": full}))
            await socket.close()

    async def episode() -> None:
        environment = await begin(opener, fake, wait_s=10)
        await environment.reset()
        await asyncio.sleep(0.02)
        await environment.step("left")
        await environment.close()

    async with fake_openenv(on_open=check) as fake:
        await asyncio.gather(*(episode() for _ in range(8)))
        opened, closed, lost = counts(opener)
        assert (closed, lost) == (opened, 0)


async def test_a_full_server_that_has_already_closed_the_connection(opener: RemoteOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may arrive after the client's check for one, and before the client's first message."""
    send = ClientConnection.send

    async def late(socket: ClientConnection, *message: Any) -> None:
        if fake.sessions == 1:
            await socket.wait_closed()
        await send(socket, *message)

    async def refuse(socket: ServerConnection) -> None:
        if fake.sessions == 1:
            await asyncio.sleep(0.05)
            full = {"code": "CAPACITY_REACHED", "message": "full", "active_sessions": 1, "max_sessions": 1}
            await socket.send(json.dumps({"type": "error", "data": full}))
            await socket.close()

    monkeypatch.setattr(ClientConnection, "send", late)
    async with fake_openenv(on_open=refuse) as fake:
        environment = await begin(opener, fake)
        await environment.close()
        assert (fake.sessions, counts(opener)) == (2, (1, 1, 0))


async def test_invalid_options_are_errors_of_the_recipe(opener: RemoteOpener) -> None:
    async with fake_openenv() as fake:
        for options, message in (({"speed": 1}, "unknown option"), ({"actions": "x"}, "must be text or tool")):
            with pytest.raises(PluginError, match=message):
                await begin(opener, fake, **options)
        with pytest.raises(PluginError, match="positive"):
            await RemoteOpener().open(EnvironmentSpec(ref=fake.ref, options={"step_s": 0}))
        assert isinstance(next(iter(opener.servers.values())), RemoteServer)
