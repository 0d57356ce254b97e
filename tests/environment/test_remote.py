"""Environments behind a connection: HTTP servers that misbehave, limits and counts of sessions, and families."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx  # noqa: F401  # its import takes longer than the deadlines of these tests
import pytest

from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments
from agentrl.environment.nemo_gym import FAILURE_KINDS
from agentrl.environment.remote import RemoteEnvironment, RemoteOpener
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError, UserError
from agentrl.plugins.parts import Part
from agentrl.records import Blame, EnvironmentSpec, Split, Task
from agentrl.task import open_family
from tests.environment.scenarios import call, counter_row
from tests.environment.web_servers import HttpRequest, answer, events, fake_openenv, http_server

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
            found = page(request, writer) if callable(page) else page
            return await found if asyncio.iscoroutine(found) else found
        if request.path == "/create":
            self.open.add(session)
        if request.path == "/delete":
            self.open.discard(session)
        usual: Mapping[str, Any] = {
            "/list_environments": ["world"],
            "/world/task_tools": TOOLS,
            "/world/splits": [{"name": "train", "type": "train"}, {"name": "exam", "type": "test"}],
            "/world/num_tasks": {"num_tasks": 8 if b"train" in request.body else 3},
            "/world/prompt": [{"type": "text", "text": "Go."}, {"type": "image", "data": "aaaa", "mimeType": "image/png"}],
        }
        if request.path == "/create_session":
            return events(("task_id", f"s{len(self.paths)}"), ("end", ""))
        if request.path == "/world/call":
            return done({"blocks": [], "reward": 1.0, "finished": True, "metadata": None})
        return answer(usual.get(request.path, {}))


def done(output: Any) -> bytes:
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


async def half(request: HttpRequest, writer: asyncio.StreamWriter) -> None:
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
    "drops the connection": (lambda *_: None, "gave no answer"),
    "drops it within the answer": (half, "gave no answer"),
    "an endless stream": (endless, "too much|did not answer"),
    "a stream that ends early": (events(("task_id", "t"), ("chunk", "{")), "ended the answer"),
    "an error event": (events(("error", "pump")), "pump"),
    "a large result": (events(("end", "x" * (3 << 20))), "too much"),
    "no JSON": (events(("end", "{")), "no valid JSON"),
    "a list": (events(("end", "[]")), "not dict"),
    "deep JSON": (events(("end", "[" * 100_000)), "no valid JSON"),
    "no output": (events(("end", '{"ok": true}')), "not dict"),
    "NaN": (done({**OUTPUT, "reward": float("nan")}), "no valid JSON"),
    "text as reward": (done({**OUTPUT, "reward": "1"}), "not a finite number"),
    "finished of no flag": (done({**OUTPUT, "finished": 1}), "not bool"),
    "no blocks": (done({"reward": 1.0, "finished": True}), "not list"),
    "a block of no object": (done({**OUTPUT, "blocks": ["x"]}), "not dict"),
    "an end without any reward": (done({**OUTPUT, "reward": None}), "without any reward"),
    "the session is gone": (answer({"detail": "Session deleted"}, 410), "ended the session: Session deleted"),
    "status 500": (answer({"detail": "oh"}, 500), "status 500: oh"),
    "a redirect": (answer(b"", 308, location="http://192.0.2.1/"), "redirects are not followed"),
    "a wrong key": (answer({}, 401), "options.key"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_in_a_call_is_never_a_score(opener: RemoteOpener, name: str) -> None:
    page, said = FAULTS[name]
    server = Ors(world__call=page)
    async with http_server(server) as url:
        world = await begin(opener, url, step_s=0.3 if "did not answer" in said else 20)
        assert (await world.reset()).text == "Go.\n(image/png, 3 bytes, which cannot be shown)"
        with pytest.raises(EnvironmentFault, match=said):
            await world.step(call("go"))
        with pytest.raises(EnvironmentFault, match="follows a fault"):
            await world.step(call("go"))
        await world.close()
    assert counts(opener) == (1, 1, 0) and not server.open


@pytest.mark.parametrize(
    ("pages", "error", "said"),
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
async def test_a_session_that_does_not_open_leaves_nothing(opener: RemoteOpener, pages: Any, error: type[Exception], said: str) -> None:
    server = Ors(**pages)
    async with http_server(server) as url:
        with pytest.raises(error, match=said):
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


async def test_a_postponed_request_is_repeated_after_the_requested_wait(opener: RemoteOpener) -> None:
    times: list[float] = []

    def once(request: HttpRequest, _: Any) -> bytes:
        times.append(time.monotonic())
        return answer({}, 429, retry_after="0.3") if len(times) == 1 else done(OUTPUT)

    async with http_server(Ors(world__call=once)) as url:
        world = await begin(opener, url)
        assert (await world.step(call("go"))).reward == 1.0
        await world.close()
    assert len(times) == 2 and times[1] - times[0] >= 0.3


async def test_a_busy_server_is_asked_again_for_a_session(opener: RemoteOpener) -> None:
    tries: list[float] = []

    def busy(request: HttpRequest, _: Any) -> bytes:
        tries.append(time.monotonic())
        return answer({}, 503, retry_after="0.2") if len(tries) < 3 else events(("task_id", "s"), ("end", ""))

    server = Ors(create_session=busy)
    async with http_server(server) as url:
        await (await begin(opener, url)).close()
    assert counts(opener) == (1, 1, 0) and tries[2] - tries[0] >= 0.4


async def test_a_wait_beyond_the_patience_is_a_fault(opener: RemoteOpener) -> None:
    async with http_server(Ors(create_session=answer({}, 503, retry_after="99999"))) as url:
        with pytest.raises(EnvironmentFault, match="opened no session within"):
            await begin(opener, url, wait_s=0.3)


async def test_more_episodes_than_sessions_wait(opener: RemoteOpener) -> None:
    server = Ors()
    most = 0

    async def episode() -> None:
        nonlocal most
        world = await begin(opener, url, sessions=3)
        most = max(most, len(server.open))
        await world.step(call("go"))
        await world.close()

    async with http_server(server) as url:
        await asyncio.gather(*(episode() for _ in range(12)))
        assert most == 3 and counts(opener) == (12, 12, 0)
        held = [await begin(opener, url) for _ in range(3)]
        server_ = opener.servers[f"ors:{url}"]
        object.__setattr__(server_.options, "wait_s", 0.2)
        with pytest.raises(EnvironmentFault, match=r"no session became free within 0.2 s; 3 are in use"):
            await begin(opener, url)
        await asyncio.gather(*(world.close() for world in held))


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.004, 0.008, 0.016, 0.032])
async def test_cancelled_episodes_leave_no_session(opener: RemoteOpener, delay_s: float) -> None:
    server = Ors()

    async def episode() -> None:
        world = await begin(opener, url, sessions=2)
        try:
            await world.reset()
            await world.step(call("go"))
        finally:
            await world.close()

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


async def test_a_session_that_cannot_be_deleted_is_lost(opener: RemoteOpener) -> None:
    async with http_server(Ors(delete=answer({}, 500))) as url:
        await (await begin(opener, url)).close()
        assert counts(opener) == (1, 0, 1)


async def test_an_answer_ends_an_episode_with_a_final_tool(opener: RemoteOpener) -> None:
    bodies: list[Any] = []

    def called(request: HttpRequest, _: Any) -> bytes:
        bodies.append(request.json)
        return done(OUTPUT)

    tools = answer({**TOOLS, "terminal_tool": {"name": "submit", "arg": "text", "description": ""}})
    async with http_server(Ors(world__call=called, world__task_tools=tools)) as url:
        world = await begin(opener, url)
        assert world.takes_text
        assert (await world.step("forty-two")).terminated
        await world.close()
    async with http_server(Ors()) as url:
        world = await begin(opener, url)
        assert not world.takes_text
        with pytest.raises(PolicyFault, match="call one of the tools"):
            await world.step("forty-two")
        await world.close()
    assert bodies == [{"name": "submit", "input": {"text": "forty-two"}}]


async def test_the_key_is_sent_and_not_stored(opener: RemoteOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret-s3cret")
    server = Ors()
    async with http_server(server) as url:
        task = await asyncio.to_thread(family(f"ors:{url}", key="env:THEIR_KEY").task, Split.TRAIN, 0)
        assert task.environment is not None and task.environment.options["key"] == "env:THEIR_KEY"
        await (await opener.open(task.environment)).close()
    assert server.keys == {"s3cret-s3cret"}


class NemoGym:
    """A NeMo Gym server whose `/verify` and `/step` give these answers; sessions are cookies."""

    def __init__(self, verified: Any = None, stepped: Any = None, reset: Any = None) -> None:
        self.pages = {"/verify": verified or {"reward": 1.0}, "/step": stepped, "/reset": reset or {"observation": "Go."}}
        self.sessions: list[str] = []
        self.closed: list[str] = []

    async def __call__(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bytes:
        cookie = request.headers.get("cookie", "")
        if request.path == "/close":
            self.closed.append(cookie)
        if request.path in ("/seed_session", "/reset"):
            assert not cookie
            self.sessions.append(f"session={len(self.sessions)}")
            return answer(self.pages.get(request.path, {}), set_cookie=f"{self.sessions[-1]}; path=/; httponly")
        return answer(self.pages.get(request.path) or {"you": cookie}, set_cookie=f"{cookie}; path=/")


async def test_sessions_have_their_own_cookies(opener: RemoteOpener) -> None:
    async with http_server(NemoGym()) as url:
        worlds = [await begin(opener, url, "nemo-gym", row=counter_row(index)) for index in range(3)]
        for index in (2, 0, 1, 1):
            seen = await worlds[index].step(call("look"))
            assert json.loads(seen.observation.text) == {"you": f"session={index}"}
        for world in worlds:
            await world.close()
    assert counts(opener) == (3, 3, 0)


@pytest.mark.parametrize("kind", [*FAILURE_KINDS, "mine:odd", None])
async def test_a_masked_sample_has_no_score(opener: RemoteOpener, kind: str | None) -> None:
    blame = FAILURE_KINDS.get(kind or "", Blame.INFRASTRUCTURE)
    verified = {"reward": 0.0, "mask_sample": True, "failure_kind": kind, "failure_reason": "why"}
    async with http_server(NemoGym(verified)) as url:
        world = await begin(opener, url, "nemo-gym", row=counter_row(1))
        if blame is Blame.POLICY:
            assert (await world.step("done")).reward == 0.0
        else:
            with pytest.raises(TaskError if blame is Blame.TASK else EnvironmentFault, match="gave no valid score"):
                await world.step("done")
        await world.close()


def test_the_failure_kinds_are_those_of_the_version() -> None:
    """Those of `nemo_gym.failure_kinds` 0.7.0."""
    assert len(FAILURE_KINDS) == 22 and {*FAILURE_KINDS.values()} == {*Blame}


async def test_a_failure_kind_without_a_mask_is_a_score(opener: RemoteOpener) -> None:
    verified = {"reward": 0.25, "failure_kind": "judge_failed", "reward_components": {"form": 1, "sum": -0.75}}
    async with http_server(NemoGym(verified)) as url:
        world = await begin(opener, url, "nemo-gym", row=counter_row(1))
        step = await world.step("done")
        await world.close()
    assert step.reward == 0.25 and step.terminated and step.parts == {"form": 1.0, "sum": -0.75}


@pytest.mark.parametrize("verified", [{"reward": None}, {"reward": float("inf")}, {"reward": 1, "reward_components": {"a": "x"}}, [], {}])
async def test_an_invalid_score_is_a_fault(opener: RemoteOpener, verified: Any) -> None:
    server = NemoGym()
    server.pages["/verify"] = json.dumps(verified).encode() if verified != {} else {"score": 1}
    async with http_server(server) as url:
        world = await begin(opener, url, "nemo-gym", row=counter_row(1))
        with pytest.raises(EnvironmentFault):
            await world.step("done")
        await world.close()


async def test_gymnasium_servers_are_closed_if_they_support_it(opener: RemoteOpener) -> None:
    reset = {"observation": "Go.", "info": {"supports_explicit_close": True}}
    stepped = {"observation": "There.", "reward": 0.5, "truncated": True, "info": {"tool_outputs": [{"call_id": "call_0", "output": "{}"}]}}
    server = NemoGym(stepped=stepped, reset=reset)
    async with http_server(server) as url:
        left = await begin(opener, url, "nemo-gym", row=counter_row(1), protocol="gymnasium")
        assert (await left.reset()).text == "Go."
        await left.close()
        played = await begin(opener, url, "nemo-gym", row=counter_row(1), protocol="gymnasium")
        await played.reset()
        step = await played.step(call("increment_counter", count=1))
        await played.close()
    assert (step.observation.text, step.reward, step.truncated, step.terminated) == ("{}\nThere.", 0.5, True, False)
    assert server.closed == ["session=0"]


def family(ref: str, **options: Any) -> Any:
    return open_family(TasksConfig(family=Part(ref, options)), seed=3)


async def test_tasks_of_an_ors_server() -> None:
    async with http_server(Ors()) as url:
        tasks = await asyncio.to_thread(sizes, f"ors:{url}", size=5)
        assert tasks == (5, 3)
        assert await asyncio.to_thread(sizes, f"ors:{url}", heldout_split="exam", heldout=2) == (8, 2)
        ours = family(f"ors:{url}")
        (first, held) = await asyncio.to_thread(lambda: (ours.task(Split.TRAIN, 4), ours.task(Split.HELDOUT, 2)))
        assert first.environment.options == {"split": "train", "index": 4}
        assert held.environment.options == {"split": "exam", "index": 2}
        assert first == await asyncio.to_thread(family(f"ors:{url}").task, Split.TRAIN, 4)


async def test_the_last_tasks_are_held_out_if_a_server_has_one_split() -> None:
    async with http_server(Ors(world__splits=answer([{"name": "train", "type": "train"}]))) as url:
        ours = family(f"ors:{url}")
        assert await asyncio.to_thread(lambda: (ours.size(Split.TRAIN), ours.size(Split.HELDOUT))) == (6, 2)
        assert ours.task(Split.HELDOUT, 0).environment.options == {"split": "train", "index": 6}


def sizes(ref: str, **options: Any) -> tuple[int | None, int | None]:
    ours = family(ref, **options)
    return ours.size(Split.TRAIN), ours.size(Split.HELDOUT)


def test_rows_of_a_data_set(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**counter_row(index), "n": index}) + "\n" for index in range(8)))
    ours = family("nemo-gym:http://127.0.0.1:1", tasks=str(rows))
    assert (ours.size(Split.TRAIN), ours.size(Split.HELDOUT)) == (6, 2)
    task: Task = ours.task(Split.HELDOUT, 1)
    assert task.environment is not None and task.environment.options["row"]["n"] == 7
    assert [message.content for message in task.prompt] == ["add 1 then add 2 then get the count"]


@pytest.mark.parametrize("content", ["", "{", "[]\n", '{"a": 1}\n3\n'])
def test_a_bad_data_set_is_a_mistake_of_the_recipe(tmp_path: Path, content: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(PluginError, match=r"rows\.jsonl"):
        sizes("nemo-gym:http://127.0.0.1:1", tasks=str(rows))


@pytest.mark.parametrize("given", [None, 3, [], [{"type": "function_call"}], [{"role": "tool", "content": "x"}]])
def test_a_row_without_a_prompt_of_text_is_a_broken_task(tmp_path: Path, given: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": {"input": given}}) + "\n")
    with pytest.raises(TaskError, match="row 1"):
        family("nemo-gym:http://127.0.0.1:1", tasks=str(rows)).task(Split.TRAIN, 0)


@pytest.mark.parametrize(
    ("ref", "options", "error"),
    [
        ("openenv:ftp://host/", {}, UserError),
        ("openenv:http://user:pw@host/", {}, UserError),
        ("openenv:http://host/?key=1", {}, UserError),
        ("openenv:file:///etc/passwd", {}, UserError),
        ("ors:", {}, UserError),
        ("ors:http://host", {"step_s": -1}, PluginError),
        ("ors:http://host", {"sessions": 1.5}, PluginError),
        ("nemo-gym:http://host", {}, PluginError),
        ("ors:http://host", {"tasks": "rows.jsonl"}, PluginError),
    ],
)
def test_invalid_families(ref: str, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        family(ref, **options)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(PluginError, match=r"tasks.family 'ors:http://127.0.0.1:9': ors server 127.0.0.1:9 gave no answer"):
        sizes("ors:http://127.0.0.1:9")


async def test_seeds_are_the_tasks_of_an_openenv_server() -> None:
    async with fake_openenv() as fake:
        ours = family(fake.ref, size=4, heldout=2)
        assert (ours.size(Split.TRAIN), ours.size(Split.HELDOUT)) == (4, 2)
        seeds = {ours.task(split, index).environment.seed for split in (Split.TRAIN, Split.HELDOUT) for index in range(2)}
        assert len(seeds) == 4
        assert ours.task(Split.TRAIN, 1).environment.resume == "restart"
    await close_environments()
