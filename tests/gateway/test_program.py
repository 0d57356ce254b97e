"""Unmodified programs in a sandbox: how they end, what is blamed, and the recorded episode."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import ServingError, UserError
from agentrl.gateway import ExternalProgram, Gateway, posted_reward
from agentrl.gateway.request import RequestError
from agentrl.gateway.rewards import POSTED_REWARDS, PostedRewards
from agentrl.records import Blame, Episode, ExecResult, Limits, Message, SandboxSpec, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.sandbox import BubblewrapBackend
from agentrl.session.preflight import check_parts
from agentrl.testing import ScriptedPolicy
from agentrl.testing.sandboxes import ScriptedSandbox, printing
from tests.chats import chat_of

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "recipes" / "agents"
ASK = """
import json, os, sys, urllib.request
def ask(text, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": os.environ["AGENTRL_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
Run = Callable[..., Awaitable[Episode]]


class HostSandbox(ScriptedSandbox):
    """Runs the tests' own programs on this machine in a folder, without a sandbox, for programs that need installed packages."""

    folder: Path

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)
        pipe = asyncio.subprocess.PIPE
        variables = {"PATH": os.environ["PATH"], **(env or {})}
        started = await asyncio.create_subprocess_exec(*argv, cwd=self.folder, env=variables, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            out, err = await started.communicate(stdin)
        finally:
            if started.returncode is None:
                started.kill()
                await started.wait()
        return ExecResult(exit_code=started.returncode, stdout=out.decode(), stderr=err.decode(), wall_s=0.0)


class Host:
    name = "host"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def prepare(self, spec: SandboxSpec) -> None: ...

    async def open(self, spec: SandboxSpec, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> HostSandbox:
        sandbox = HostSandbox("host", printing(""), files or {})
        sandbox.folder = self.folder
        return sandbox

    async def close(self) -> None: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run(tokenizer: Any, task: Task, tmp_path: Path) -> Run:
    """Runs a program's episode. Further options are the agent's."""

    def completion_of(completion: Any) -> str:
        if isinstance(completion, Exception):
            raise completion
        return str(completion("") if callable(completion) else completion)

    async def run_program(program: str | Path, *texts: Any, backend: Any = None, limits: Limits | None = None, **options: Any) -> Episode:
        path = program if isinstance(program, Path) else tmp_path / "program.py"
        if isinstance(program, str):
            path.write_text(ASK + program)
        port = options.pop("gateway_port", None) or free_port()
        python = sys.executable if backend is None else "python3"
        agent_options: dict[str, Any] = {"command": [python, "agent.py"], "files": {"agent.py": str(path)}, "port": port, **options}
        agent = ExternalProgram(chat=chat_of(tokenizer), **agent_options)
        (tmp_path / "work").mkdir(exist_ok=True)
        runner = EpisodeRunner(
            agent=agent,
            policy=ScriptedPolicy(tokenizer, lambda turn, _: completion_of(texts[turn])),
            sandboxes=backend or Host(tmp_path / "work"),
            sampling=Sampling(),
            max_model_len=9000,
            request_timeout_s=60.0,
        )
        spec = SandboxSpec(image="sandboxes/tables", network=(f"127.0.0.1:{port}",))
        limits = limits or Limits(turns=4, turn_tokens=400, episode_tokens=9000, wall_s=60.0)
        return await runner.run(replace(task, sandbox=spec, limits=limits), episode_id="e")

    return run_program


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


LOOK_CALLS = (call("python", code="print(open('a.csv').read().split())"), call("submit", answer="3 rows"))


def check_looked(episode: Episode) -> None:
    [trajectory] = episode.trajectories
    assert (episode.answer, trajectory.stop_reason, len(trajectory.turns), episode.failures) == ("3 rows", "answered", 2, ())
    assert trajectory.turns[0].tool_results[0].output == "['x', '1']" and trajectory.turns[0].tool_results[0].name == "python"
    assert trajectory.prompt == (Message(role="user", content="How many?"),)


async def test_a_program_that_uses_the_standard_library(run: Run) -> None:
    check_looked(await run(AGENTS / "tables_stdlib.py", *LOOK_CALLS))


@pytest.mark.parametrize("limit", ["tool_calls", "thinking_tokens"])
async def test_a_limit_that_does_not_apply_to_programs_is_the_tasks_fault(run: Run, limit: str) -> None:
    episode = await run(AGENTS / "tables_stdlib.py", *LOOK_CALLS, limits=Limits(**{limit: 7}))
    (failure,) = episode.failures
    assert failure.blame is Blame.TASK and "do not apply to external programs" in failure.message and not episode.completion_tokens


@pytest.mark.slow
async def test_a_program_that_uses_the_openai_sdk(run: Run) -> None:
    check_looked(await run(AGENTS / "tables_sdk.py", *LOOK_CALLS))


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_in_a_sandbox_a_program_reaches_only_the_gateway(run: Run) -> None:
    backend = BubblewrapBackend(run_label="test-outside", root=ROOT)
    try:
        check_looked(await run(AGENTS / "tables_stdlib.py", *LOOK_CALLS, backend=backend))
        other_port = free_port()
        source = f"""
ask("one?")
try:
    urllib.request.urlopen("http://127.0.0.1:{other_port}/")
except urllib.error.HTTPError as error:
    print(error.code)
"""
        assert (await run("import urllib.error" + source, "1", backend=backend)).answer == "403"
    finally:
        await backend.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("source", "stop", "blame", "error_text"),
    [
        ("ask('one?'); sys.exit('broken')", "failed", Blame.POLICY, "status 1: broken"),
        ("sys.exit('no module named x')", "failed", Blame.TASK, "before the policy's first answer: no module named x"),
        ("print('nothing asked')", "failed", Blame.TASK, "status 0 before the policy"),
        ("ask('one?', 'sk-wrong')", "failed", Blame.TASK, "401"),
    ],
    ids=["crash", "crash-at-once", "silent", "wrong-key"],
)
async def test_a_failed_program_is_blamed(run: Run, source: str, stop: str, blame: Blame, error_text: str) -> None:
    episode = await run(source, "1")
    assert episode.trajectories[0].stop_reason == stop and episode.answer is None
    assert [failure.blame for failure in episode.failures] == [blame] and error_text in episode.failures[0].message


@pytest.mark.slow
async def test_limits_end_a_running_program(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.program.GRACE_S", 0.2)
    retrying = """
import time
while True:
    try:
        ask("more")
    except OSError:
        time.sleep(0.01)
"""
    episode = await run(retrying, *"123", limits=Limits(turns=3, turn_tokens=400, episode_tokens=9000, wall_s=60.0))
    assert [len(trajectory.turns) for trajectory in episode.trajectories] == [1, 1, 1] and not episode.left_out
    assert {trajectory.stop_reason for trajectory in episode.trajectories} == {"turn_limit"}
    assert "turn_limit" in episode.failures[0].message
    sleeping = "ask('one?'); import time; time.sleep(60)"
    episode = await run(sleeping, "1", limits=Limits(turns=3, turn_tokens=400, episode_tokens=9000, wall_s=1.5))
    assert episode.trajectories[0].stop_reason == "wall_limit" and not episode.left_out, "the program used the time itself"


async def test_a_failing_server_is_not_blamed_on_the_program(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.program.GRACE_S", 0.2)
    episode = await run("ask('one?')", ServingError("gone"))
    assert [failure.blame for failure in episode.failures] == [Blame.INFRASTRUCTURE] and episode.left_out


async def test_a_sandbox_that_cannot_reach_the_gateway_is_the_tasks_fault(run: Run) -> None:
    episode = await run("ask('one?')", "1", port=free_port())
    assert episode.failures[0].blame is Blame.TASK and "sandbox.network" in episode.failures[0].message


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        ({"command": "python3 agent.py"}, "must be a list of non-empty strings"),
        ({"answer": "guess"}, "answer='guess'"),
        ({"files": {"agent.py": "nowhere.py"}}, "nowhere.py: No such file"),
        ({"port": 0}, "host and port"),
        ({"models": []}, "models must be"),
        ({"command": ["a\0b"]}, r"command: 'a\\x00b' contains a character that no program can receive(.|\n)*fix: remove"),
        ({"environment": {"A=B": "1"}}, r"environment: 'A=B' is not the name of a variable(.|\n)*fix: use"),
        ({"environment": {"": "1"}}, "environment: '' is not the name"),
        ({"environment": {"A": "x\0"}}, "environment: .* contains a character"),
        ({"files": {"/abs/a.py": "README.md"}}, r"files: '/abs/a.py' is not a plain path(.|\n)*fix: use"),
        ({"files": {"../a.py": "README.md"}}, "files: '../a.py' is not a plain path"),
        ({"files": {"x" * 256: "README.md"}}, "files: .* is not a plain path"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_checked_before_anything_starts(tokenizer: Any, options: Any, error_text: str) -> None:
    with pytest.raises(UserError, match=error_text):
        ExternalProgram(chat=chat_of(tokenizer), **{"command": ["true"], **options})


@pytest.mark.parametrize("key", ["rollout.group.branches", "rollout.checkpoint_turns", "mcp", "tools"])
def test_settings_without_effect_are_refused(key: str, tmp_path: Path) -> None:
    """A program has no state between turns to capture, and has its own tools."""
    (tmp_path / "agent.py").write_text("print()")
    options = {"command": ["true"], "files": {"agent.py": str(tmp_path / "agent.py")}}
    base = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    settings: Any = {
        "rollout.group.branches": 2,
        "rollout.checkpoint_turns": True,
        "mcp": {"clock": {"command": ["true"]}},
        "tools": {"python": {"calls": 3}},
    }
    check_parts(base.but({key: settings[key]}))  # the setting has an effect with the built-in agent
    external = base.but({"rollout.agent": "agentrl.gateway:ExternalProgram", "rollout.agent.options": options})
    check_parts(external)
    with pytest.raises(UserError, match=f"{re.escape(key)} does nothing with rollout.agent=agentrl.gateway:ExternalProgram"):
        check_parts(external.but({key: settings[key]}))


async def test_a_reward_is_posted_by_the_host_and_never_by_the_agent(run: Run, task: Task, tmp_path: Path) -> None:
    port, key_file, statuses = free_port(), tmp_path / "key", list[int]()
    program = """
import urllib.error
ask("one?")
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/sessions/" + os.environ["AGENTRL_SESSION"] + "/reward"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
try:
    urllib.request.urlopen(urllib.request.Request(url, b'{"value": 1}', headers))
except urllib.error.HTTPError as error:
    print(error.code)
"""

    async def host() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            headers = {"Authorization": f"Bearer {key_file.read_text().strip()}"}
            for body in ({"value": 10**400}, {"value": True}, {"worth": 1}):
                statuses.append((await http.post("/sessions/e/reward", json=body, headers=headers)).status_code)
            statuses.append((await http.post("/sessions/other/reward", json={"value": 1}, headers=headers)).status_code)
            body = {"value": 0.5, "parts": {"speed": 1}}
            statuses.append((await http.post("/sessions/e/reward", json=body, headers=headers)).status_code)

    def answer(_: str) -> str:
        assert key_file.stat().st_mode & 0o777 == 0o600
        posts.append(asyncio.create_task(host()))
        return "1"

    posts: list[asyncio.Task[None]] = []
    episode = await run(program, answer, port=port, gateway_port=port, reward_key_file=str(key_file))
    await posts[0]
    assert episode.answer == "401" and statuses == [400, 400, 400, 404, 200]
    with pytest.raises(RequestError, match="already"):
        POSTED_REWARDS.post("e", {"value": 1.0})
    score = await posted_reward(task, episode)
    assert (score.value, score.parts) == (0.5, {"speed": 1.0})
    assert (await posted_reward(task, replace(episode, id="unknown"))).value is None


async def test_the_reward_of_a_served_session_is_never_evicted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.rewards.MAX_SESSIONS", 3)
    monkeypatch.setattr("agentrl.gateway.rewards.WAIT_S", 0.01)

    def answer(_: str) -> str:
        for number in range(5):
            with POSTED_REWARDS.open(f"newer {number}"):
                pass
        POSTED_REWARDS.post("e", {"value": 0.5})
        return "1"

    episode = await run("ask('one?'); print(1)", answer, reward_key_file=str(tmp_path / "key"))
    assert not episode.failures and POSTED_REWARDS.of("e").value == 0.5


async def test_the_oldest_ended_session_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.rewards.MAX_SESSIONS", 3)
    rewards = PostedRewards()

    def present() -> list[str]:
        return [name for name in "abcdef" if "no session" not in rewards.of(name).reason]

    for session in "abcad":  # the second "a" is a retry of the same episode
        with rewards.open(session):
            pass
    assert present() == ["a", "c", "d"]
    with rewards.open("c"), rewards.open("a"), rewards.open("d"), rewards.open("e"):
        assert present() == ["a", "c", "d", "e"]
    with rewards.open("f"):
        pass
    assert present() == ["d", "e", "f"]
    with rewards.open("a"):
        with rewards.open("a"):  # opened twice at once, for example while a cancelled attempt ends
            rewards.post("a", {"value": 0.5})
        for session in "bcde":
            with rewards.open(session):
                pass
        assert rewards.of("a").value == 0.5


async def test_concurrent_sessions_have_separate_keys_and_an_ended_session_is_reported(tokenizer: Any, run_episode: Any) -> None:
    keys: list[str] = []
    both, first_over = asyncio.Event(), asyncio.Event()
    statuses: list[int] = []
    gateway = Gateway()

    async def status_of(url: str, key: str, text: str) -> int:
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            return (await http.post("/v1/chat/completions", json=body)).status_code

    async def first(url: str, key: str) -> None:
        keys.append(key)
        await both.wait()
        statuses.append(await status_of(url, key, "first"))

    async def second(url: str, key: str) -> None:
        both.set()
        await first_over.wait()
        statuses.append(await status_of(url, keys[0], "too late"))
        statuses.append(await status_of(url, key, "second"))

    async def run_program(program: Any, text: str) -> Any:
        outcome = await run_episode(program, text, gateway=gateway)
        first_over.set()
        return outcome

    one, two = await asyncio.gather(run_program(first, "1"), run_program(second, "2"))
    assert statuses == [200, 403, 200] and gateway.counts == {"refused_ended": 1}
    assert [outcome.episode.answer for outcome in (one, two)] == ["1", "2"] and one.trained_once() and two.trained_once()
