"""An unavailable backend costs no episode its score, and an agent cannot exclude itself by calling an available one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentrl.agent import invoke
from agentrl.agent.mcp import RunTools
from agentrl.errors import InfrastructureError
from agentrl.failure.faults import FaultRate
from agentrl.records import Blame, Episode, Failure, Group, Score, Task
from agentrl.rollout import GroupRunner, group
from agentrl.testing import ScriptedPolicy
from tests.rollout.backend_tools import BACKEND

SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Backend(BaseHTTPRequestHandler):
    """Answers with the status in `statuses` for a path, else 200."""

    statuses: dict[str, int] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self.send_response(self.statuses.get(self.path, self.statuses.get("*", 200)))
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def backend() -> Iterator[dict[str, int]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    BACKEND["url"] = f"http://127.0.0.1:{server.server_address[1]}"
    Backend.statuses = {}
    yield Backend.statuses
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RETRY_S", 0.0)
    monkeypatch.setattr(invoke, "PATIENCE_S", 0.3)


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def by_answer(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == "3"))


class Run:
    """Groups of attempts at a task with one tool, and their fault rate."""

    def __init__(self, make_runner: Any, tokenizer: Any, task: Task, name: str, script: Callable[[int, str], str]) -> None:
        limits = replace(task.limits, turns=4, turn_tokens=400, episode_tokens=4000)
        self.task = replace(task, tools=(f"tests.rollout.backend_tools:{name}", "submit"), limits=limits)
        self.reported: list[Failure | None] = []
        runner = replace(make_runner(ScriptedPolicy(tokenizer, script)), tools=RunTools(servers={}, bounds={}))
        self.groups = GroupRunner(
            runner=runner, scorer=by_answer, slots=asyncio.Semaphore(1), group_size=4, max_retries=2, on_attempt=self.reported.append
        )

    async def group(self, index: int = 0) -> Group:
        return await self.groups.run_group(index, self.task)

    @property
    def faults(self) -> list[Failure]:
        return [failure for failure in self.reported if failure is not None]


def calls_then_submits(name: str, **arguments: Any) -> Callable[[int, str], str]:
    return lambda turn, episode: calling(name, **arguments) if turn == 0 else SUBMIT


@pytest.mark.slow
async def test_a_backend_that_rejects_connections_excludes_every_episode_and_pauses_the_run(
    make_runner: Any, tokenizer: Any, task: Task
) -> None:
    BACKEND["url"] = unused_address()
    run, rate = Run(make_runner, tokenizer, task, "look_up", calls_then_submits("look_up", key="a")), FaultRate(0.5, concurrency=1)
    for index in range(3):
        result = await run.group(index)
        assert result.scored == () and all(scored.score.value is None for scored in result.episodes)
    assert len(run.reported) == len(run.faults) == 3 * 4 * 3, "each attempt is retried twice"
    assert {(failure.stage, failure.kind, failure.blame) for failure in run.faults} == {("tool", "ToolUnavailable", Blame.INFRASTRUCTURE)}
    assert "tool look_up: " in run.faults[0].message and "Connection refused" in run.faults[0].message and "fix: " in run.faults[0].message
    for failure in run.reported:
        rate.record_attempt(failure)
    with pytest.raises(InfrastructureError, match=r"36 x tool ToolUnavailable: tool look_up:.*Connection refused"):
        await asyncio.wait_for(rate.watch(), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 401])
async def test_a_backend_that_is_broken_for_all_is_a_fault(
    status: int, backend: dict[str, int], make_runner: Any, tokenizer: Any, task: Task
) -> None:
    backend["*"] = status
    run = Run(make_runner, tokenizer, task, "look_up", calls_then_submits("look_up", key="a"))
    assert (await run.group()).scored == () and len(run.faults) == 12


async def test_a_backend_that_recovers_costs_a_retry(backend: dict[str, int], make_runner: Any, tokenizer: Any, task: Task) -> None:
    backend["*"] = 503

    def script(turn: int, episode: str) -> str:
        if episode.endswith("-a1"):
            backend.clear()
        return calls_then_submits("look_up", key="a")(turn, episode)

    result = await (run := Run(make_runner, tokenizer, task, "look_up", script)).group()
    assert [scored.score.value for scored in result.episodes] == [1.0] * 4 and 1 <= len(run.faults) <= 4
    assert sum(scored.episode.attempt for scored in result.episodes) == len(run.faults)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_the_agent_sees_errors_of_the_backend_and_is_scored(
    status: int, backend: dict[str, int], make_runner: Any, tokenizer: Any, task: Task
) -> None:
    backend["*"] = status
    run = Run(make_runner, tokenizer, task, "look_up", calls_then_submits("look_up", key="a"))
    played = await run.group()
    assert len(played.scored) == 4 and run.faults == []
    result = played.episodes[0].episode.trajectories[0].turns[0].tool_results[0]
    assert result.output.startswith(f"error: look_up failed: HTTPError: HTTP Error {status}") and not result.ok


async def test_an_agent_that_names_a_dead_address_is_scored(make_runner: Any, tokenizer: Any, task: Task) -> None:
    run = Run(make_runner, tokenizer, task, "fetch", calls_then_submits("fetch", url=unused_address()))
    result = await run.group()
    assert len(result.scored) == 4 and run.faults == []


@pytest.mark.parametrize("status", [500, 503])
async def test_an_agent_whose_calls_all_fail_is_scored(
    status: int, backend: dict[str, int], make_runner: Any, tokenizer: Any, task: Task
) -> None:
    """Members 0 and 2 send requests that make the backend fail, each with different text."""
    tries = iter(range(1000))

    def script(turn: int, episode: str) -> str:
        if turn == 0 and episode[:9] in ("g000000-0", "g000000-2"):
            key = f"bad{next(tries)}"
            backend[f"/{key}"] = status
            return calling("look_up", key=key)
        honest = episode[:9] in ("g000000-1", "g000000-3")
        if turn < (3 if honest else 0):
            return calling("look_up", key="good")
        return SUBMIT.replace('"3"', '"wrong"') if episode.startswith("g000000-0") else SUBMIT

    run = Run(make_runner, tokenizer, task, "look_up", script)
    run.groups = replace(run.groups, slots=asyncio.Semaphore(4))
    result = await run.group()
    assert [scored.score.value for scored in result.episodes] == [0.0, 1.0, 1.0, 1.0], "scored by their answers, like any other attempt"
    assert [scored.episode.attempt for scored in result.episodes] == [0, 0, 0, 0] and run.faults == [], "no attempt is excluded"
    (failure,) = result.episodes[0].episode.failures
    assert (failure.blame, failure.kind, failure.turn) == (Blame.POLICY, "HTTPError", 1)
    assert f"HTTP Error {status}" in result.episodes[0].episode.trajectories[0].turns[0].tool_results[0].output


@pytest.mark.slow
async def test_a_tool_that_times_out_for_only_one_agent_is_blamed_on_it(make_runner: Any, tokenizer: Any, task: Task) -> None:
    def script(turn: int, episode: str) -> str:
        slow = episode.startswith("g000000-0")
        return calling("compute", seconds=30.0 if slow else 0.0) if turn < (1 if slow else 3) else SUBMIT

    run = Run(make_runner, tokenizer, task, "compute", script)
    run.groups = replace(run.groups, slots=asyncio.Semaphore(4))
    result = await run.group()
    assert len(result.scored) == 4 and run.faults == [] and result.episodes[0].episode.attempt == 0
    assert [failure.kind for failure in result.episodes[0].episode.failures] == ["tool_timeout"]
    hanging = Run(make_runner, tokenizer, task, "compute", calls_then_submits("compute", seconds=30.0))
    hanging.groups = replace(hanging.groups, slots=asyncio.Semaphore(4))
    assert (await hanging.group()).scored == () and len(hanging.faults) == 12, "no call was answered, so nothing shows that the tool works"
