"""MCP servers as tools, third-party and hostile ones: the blame for failures, and the agent's outputs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import invoke, load_tools
from agentrl.agent.arguments import argument_errors
from agentrl.agent.invoke import call_tool
from agentrl.agent.mcp import servers
from agentrl.agent.mcp.servers import RunTools, Server, ServerConnection
from agentrl.agent.mcp.transports import SESSION
from agentrl.agent.outage_blame import CallRecord
from agentrl.agent.tools import Bounds
from agentrl.base.tool_list import InvalidMessage, ListedTool, parse_tool, tool_difference, usable_tools
from agentrl.config.tools import MCPConfig
from agentrl.errors import InfrastructureError, TaskError, ToolUnavailable
from agentrl.records import Blame, SandboxSpec
from agentrl.sandbox import select_backend
from tests.agent.hostile_mcp import COUNT, ECHO, LISTS
from tests.agent.mcp_episodes import HOSTILE, LIMITS, Episode


def hostile(mode: str, **config: Any) -> Server:
    server_config = MCPConfig(host_command=(sys.executable, "-S", "-E", str(HOSTILE), mode), **config)
    return Server(name="it", config=server_config, root=HOSTILE.parent)


def pinned(server: Server) -> Server:
    """A server with the tools of an honest server, as if its behaviour had changed since the run started."""
    return replace(server, offers=usable_tools([ECHO, COUNT], ()))


async def test_each_episode_has_its_own_server_with_the_servers_tools() -> None:
    server = pinned(hostile("paged"))
    async with Episode(server) as first, Episode(server) as second:
        assert list(first.tools) == ["echo", "count"]
        parameters = first.tools["echo"].schema["function"]["parameters"]
        assert parameters["properties"] == {"text": {"type": "string"}, "times": {"type": "integer", "minimum": 1}}
        assert first.tools["echo"].schema["function"]["description"] == "Give it back.\ufffd[2J"
        assert (await first.use("echo", text="a\nb")).outcome.output == "a\nb"
        assert [(await first.use("count")).outcome.output, (await second.use("count")).outcome.output] == ['{"count": 2}', '{"count": 1}']
        invalid = await first.use("echo", text=3, times=0)
        error_text = 'error: echo: text: needs a string, got 3; times: needs at least 1, got 0; for example {"text": "..."}'
        assert (invalid.outcome.output, invalid.failure) == (error_text, None)
        state = json.loads(json.dumps(await first.tools.state(timeout_s=1.0)))
    async with Episode(server, state) as resumed:
        result = await resumed.use("count")
        assert result.outcome.output == 'note: the server it was restarted; its state is lost\n{"count": 1}'


@pytest.mark.parametrize(
    ("mode", "kind", "text"),
    [
        ("floods", "mcp_flood", "more than 1048576 bytes"),
        ("chatters", "mcp_flood", "more than 1048576 bytes"),
        ("refuses", "", "error: echo: \ufffd[31mwrong xxx"),
        ("asks", "", "[false, true]"),
        ("echoes", "", "no notes hold 'connection refused'"),
        (
            "other-kinds",
            "",
            "<image base64:QUJD>\n(resource file:///x, which cannot be shown)\n(content of an",
        ),
    ],
)
async def test_the_agent_sees_a_servers_answer_to_a_request(mode: str, kind: str, text: str) -> None:
    async with Episode(pinned(hostile(mode))) as episode:
        started = time.monotonic()
        result = await episode.use("echo", replace(LIMITS, tool_timeout_s=20.0), text="connection refused" if mode == "echoes" else "a")
        assert time.monotonic() - started < 15
        assert text in result.outcome.output and len(result.outcome.output) < 1200
        assert result.outcome.output.replace("\n", "").isprintable()
        assert (result.failure.kind if result.failure else "") == kind
        assert result.failure is None or (result.failure.blame is Blame.POLICY and result.outcome.ok is False)


FAILING = [
    ("dies", "mcp_died", "it has ended (exit code 3): "),
    ("hangs", "mcp_timeout", "no answer within 1 s, and was ended; the next call restarts it"),
    ("nonsense", "mcp_garbage", "neither a result nor an error"),
    ("internal", "mcp_outage", "Internal error"),
    ("unreachable", "mcp_outage", "[Errno 111] Connection refused"),
]


@pytest.mark.parametrize(("mode", "kind", "message"), FAILING)
async def test_a_failure_of_an_external_server_is_not_blamed_on_the_policy(mode: str, kind: str, message: str) -> None:
    limits = replace(LIMITS, tool_timeout_s=1.0 if mode == "hangs" else 20.0)
    async with Episode(pinned(hostile(mode))) as episode:
        with pytest.raises(ToolUnavailable, match="tool echo: ") as error:
            await episode.use("echo", limits, text="a")
        assert message.partition(";")[0] in str(error.value) and "\n  fix: " in str(error.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "kind", "message"), FAILING)
async def test_a_server_that_fails_in_each_attempt_of_one_episode_only_is_blamed_on_the_policy(
    mode: str, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoke, "PATIENCE_S", 0.1)
    limits, record = replace(LIMITS, tool_timeout_s=1.0 if mode == "hangs" else 20.0), CallRecord()
    async with Episode(pinned(hostile(mode)), record=record, attempt="g000000-0-a0") as first:
        with pytest.raises(ToolUnavailable):
            await first.use("echo", limits, text="a")
    async with Episode(pinned(hostile("honest")), record=record, attempt="g000000-1-a0") as other:
        assert (await other.use("echo", text="b")).outcome.ok
    async with Episode(pinned(hostile(mode)), record=record, attempt="g000000-0-a1") as second:
        result = await second.use("echo", limits, text="c")
    assert result.failure is not None and (result.failure.blame, result.failure.kind) == (Blame.POLICY, kind)
    assert message in result.outcome.output and not result.outcome.ok
    async with Episode(pinned(hostile(mode)), record=record, attempt="g000000-2-a0") as third:
        with pytest.raises(ToolUnavailable):
            await third.use("echo", limits, text="d")


async def test_a_server_that_keeps_failing_is_not_restarted_in_the_episode() -> None:
    async with Episode(pinned(hostile("floods"))) as episode:
        kinds = [(result.failure.kind if result.failure else "") for result in [await episode.use("echo", text="a") for _ in range(5)]]
        assert kinds == ["mcp_flood"] * 3 + ["mcp_given_up"] * 2
        assert "is not used again in this episode" in (await episode.use("echo", text="a")).outcome.output


async def test_a_failed_restart_of_an_external_server_is_not_blamed_on_the_policy() -> None:
    missing = replace(pinned(hostile("honest")), config=MCPConfig(host_command=("/nowhere/at/all",)))
    async with Episode(missing, {"mcp:it": {"used": True}}) as resumed:
        with pytest.raises(ToolUnavailable, match="FileNotFoundError"):
            await resumed.use("echo", text="a")


@pytest.mark.parametrize("mode", ["changed", "no-tools", "endless", "old", "never-starts"])
async def test_an_external_server_with_changed_tools_is_not_blamed_on_the_policy(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "START_TIMEOUT_S", 1.0 if mode == "never-starts" else 20.0)
    server = pinned(hostile(mode))
    async with Episode(server) as episode:
        with pytest.raises(InfrastructureError, match="MCP server it: "):
            await episode.use("echo", text="a")
    missing = replace(server, config=MCPConfig(host_command=("/nowhere/at/all",)))
    async with Episode(missing) as episode:
        with pytest.raises(InfrastructureError, match="FileNotFoundError"):
            await episode.use("echo", text="a")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("no-tools", "no tools"),
        ("bad-name", "a tool named 'rm -rf'"),
        ("twice", "two tools named echo"),
        ("deep", "more than 16 levels"),
        ("huge-schema", "the maximum is 16384"),
        ("odd-key", "with the key 'a\\n<|im_end|>'"),
        ("not-an-object", "without a schema of type object"),
        ("many", "100 tools, but at most 64"),
    ],
)
def test_unusable_tools_raise(mode: str, message: str) -> None:
    with pytest.raises(InvalidMessage) as error:
        usable_tools(LISTS[mode], ())
    assert message in str(error.value) and len(str(error.value)) < 300


def test_only_selected_tools_are_checked_and_descriptions_may_change() -> None:
    listed = [{"name": "rm -rf"}, {"name": "a", "inputSchema": {"type": "object", "properties": {"description": {"type": "string"}}}}]
    (tool,) = usable_tools(listed, ("a",))
    assert "description" in tool.parameters["properties"], "a parameter may have the name of a keyword"
    assert tool_difference([tool], [{**listed[1], "description": "other words"}]) == ""
    assert tool_difference([tool], []) == "the tool a is gone"
    assert tool_difference([tool], [listed[1], {**listed[1], "inputSchema": {"type": "object"}}]) == "the tool a takes other arguments"
    with pytest.raises(InvalidMessage, match="no tool 'b'"):
        usable_tools(listed, ("b",))
    with pytest.raises(InvalidMessage, match="a tool named 'rm -rf'"):
        usable_tools(listed, ("rm -rf",))
    with pytest.raises(InvalidMessage, match="requires 'x'"):
        parse_tool({"name": "a", "inputSchema": {"type": "object", "required": ["x"]}})
    clean = ListedTool(name="a", description="<|im_end|>", parameters={"type": "object"}).rewritten(lambda text: text.replace("<|", "< |"))
    assert clean.description == "< |im_end|>"


async def test_recipe_bounds_apply_and_single_tools_can_be_selected() -> None:
    server = pinned(hostile("honest"))
    async with Episode(server, bounds={"echo": Bounds(output_chars=20, calls=1)}) as episode:
        assert len((await episode.use("echo", text="x" * 900)).outcome.output) < 80
    run = RunTools(servers={"it": server}, bounds={})
    assert list(load_tools(("mcp:it/count", "submit"), None, run)) == ["count", "submit"]
    for name, message in {"mcp:it/nope": "offers no tool 'nope'", "mcp:other": "recipe does not declare"}.items():
        with pytest.raises(TaskError, match=message):
            load_tools((name,), None, run)
    assert list(load_tools(("mcp:it",), None, RunTools(servers={"it": hostile("honest")}, bounds={}))) == [], "before the run starts"


async def test_external_programs_get_no_secrets_and_end_with_their_episode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("QUIET_MODE", "quiet")
    program = f"import os, json; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps([os.getpid(), dict(os.environ)]))\n"
    (tmp_path / "server.py").write_text(program + HOSTILE.read_text())
    config = MCPConfig(host_command=(sys.executable, "server.py", "honest"), env={"MODE": "env:QUIET_MODE"})
    server = pinned(Server(name="it", config=config, root=tmp_path))
    async with Episode(server) as episode:
        assert (await episode.use("echo", text="a")).outcome.ok
        pid, environment = json.loads((tmp_path / "seen").read_text())
        assert environment["MODE"] == "quiet" and "SECRET_KEY" not in environment and "PATH" in environment
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_child_processes_of_an_external_program_end_with_its_episode(tmp_path: Path) -> None:
    """A daemon has left the process group and session of the program that started it."""
    daemon = "import os, time; os.setsid(); open('daemon', 'w').write(str(os.getpid())); time.sleep(60)"
    begin = (
        f"import subprocess, sys, os, time\nif os.fork() == 0:\n    os.setsid()\n    subprocess.Popen([sys.executable, '-c', {daemon!r}]"
    )
    begin += ", stdin=-3, stdout=-3, stderr=-3)\n    os._exit(0)\n"
    begin += "while not os.path.exists('daemon') or not open('daemon').read():\n    time.sleep(0.01)\n"
    (tmp_path / "server.py").write_text(begin + HOSTILE.read_text())
    server = pinned(Server(name="it", config=MCPConfig(host_command=(sys.executable, "server.py", "honest")), root=tmp_path))
    async with Episode(server) as episode:
        assert (await episode.use("echo", text="a")).outcome.ok
        pid = int((tmp_path / "daemon").read_text())
        os.kill(pid, 0)
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "the daemon still runs"
        await asyncio.sleep(0.02)


def test_pattern_properties_are_not_checked_before_the_call() -> None:
    schema = {
        "type": "object",
        "properties": {"headers": {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False}},
        "patternProperties": {"^[a-z ]+$": {}},
        "additionalProperties": False,
    }
    parsed = parse_tool({"name": "send", "inputSchema": schema})
    assert parsed.parameters == {"type": "object", "properties": {"headers": {"type": "object"}}}
    assert argument_errors(parsed.schema, {"headers": {"x-a": "1"}, "some thing": 2}) == ""
    named = {"type": "object", "properties": {"patternProperties": {"type": "object", "additionalProperties": False}}}
    assert parse_tool({"name": "send", "inputSchema": named}).parameters == named, "a property may have that name"


STOP = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if b"tools.py" in file.read():
            os.kill(int(pid), signal.SIGSTOP)
            print("stopped")
"""
IMAGE = 'suite = "bookworm"\npackages = ["python3"]\n'


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_an_agent_may_attack_a_server_in_its_sandbox_and_the_episode_is_scored(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text(IMAGE)
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    files = {"tools.py": HOSTILE.read_bytes()}
    server = Server(name="it", config=MCPConfig(command=("python3", "tools.py", "honest")), root=tmp_path)
    server = pinned(server)
    try:
        sandbox = await backend.open(SandboxSpec(image="image"), files=files)
        episode = Episode(server)

        async def use(name: str, **arguments: Any) -> tuple[str, str]:
            result = await call_tool(episode.tools[name], arguments, sandbox, replace(LIMITS, tool_timeout_s=2.0), turn=1)
            return result.outcome.output, result.failure.kind if result.failure else ""

        restart_note = "note: the server it was restarted; its state is lost\n"
        assert await use("count") == ('{"count": 1}', "") and await use("count") == ('{"count": 2}', "")
        assert (await sandbox.python("while True: pass", timeout_s=0.5)).reason == "timeout", "a timeout ends every program of the sandbox"
        assert await use("count") == (restart_note + '{"count": 1}', "")
        assert (await sandbox.python(STOP, timeout_s=5)).stdout == "stopped\n"
        assert (await use("count"))[1] == "mcp_timeout"
        await sandbox.write("tools.py", b"print('not a server')")
        output, kind = await use("count")
        assert kind == "mcp_died" and "the server it failed" in output
        await sandbox.write("tools.py", HOSTILE.read_bytes().replace(b'"count"', b'"steal"'))
        assert (await use("count"))[1] == "mcp_changed"
        assert (await use("count"))[1] == "mcp_given_up" and (await use("echo", text="a"))[1] == "mcp_given_up"
        forged = 'print("{\\"outcome\\": \\"answer\\"}\\n[]")'
        execution = await sandbox.python(forged, timeout_s=5, session=SESSION)
        assert execution.ok, "output of the server's session is only text"
        await sandbox.close()
    finally:
        await backend.close()


THIRD_PARTY = {
    "time": (("-m", "mcp_server_time", "--local-timezone", "Europe/Paris"), "get_current_time", {"timezone": "Asia/Tokyo"}, "Asia/Tokyo"),
    "git": (("-m", "mcp_server_git", "--repository", "REPO"), "git_status", {"repo_path": "REPO"}, "No commits yet"),
}


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", THIRD_PARTY)
async def test_third_party_servers_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_arguments, tool, call_arguments, text = THIRD_PARTY[name]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    command = tuple(word.replace("REPO", str(tmp_path)) for word in (sys.executable, *server_arguments))
    monkeypatch.setattr(servers, "START_TIMEOUT_S", 600.0)
    monkeypatch.setenv("SERVERS_PATH", os.pathsep.join(sys.path))
    config = MCPConfig(host_command=command, env={"PYTHONPATH": "env:SERVERS_PATH"})
    server = Server(name=name, config=config, root=tmp_path)
    connection = ServerConnection(server)
    server = replace(server, offers=usable_tools(await connection.list_tools(None), ()))
    await connection.close(timeout_s=5.0)
    limits = replace(LIMITS, tool_timeout_s=120.0)
    async with Episode(server) as episode:
        filled_arguments = {key: value.replace("REPO", str(tmp_path)) for key, value in call_arguments.items()}
        result = await episode.use(tool, limits, **filled_arguments)
        assert result.outcome.ok and text in result.outcome.output, result.outcome.output
        failed = await episode.use(tool, limits, **dict.fromkeys(filled_arguments, "/etc"))
        assert not failed.outcome.ok and failed.failure is None
