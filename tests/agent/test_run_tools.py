"""The servers and tool bounds of a recipe at the start of a run: listed once, pinned, and checked."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.agent import load_tools
from agentrl.agent.invoke import call_tool
from agentrl.agent.mcp import RunTools
from agentrl.agent.run_tools import MCP_FILE, declared_tools, pin_tools, save_tool_offers, with_sub_agent_tools
from agentrl.base.tool_list import usable_tools
from agentrl.config import Recipe
from agentrl.errors import RecipeError, TaskError, ToolUnavailable, UserError
from agentrl.protocols import ToolSource
from agentrl.records import Limits
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing, sample_task
from tests.agent.hostile_mcp import COUNT, ECHO
from tests.agent.test_tools import call
from tests.episodes import make_runner, task, tokenizer

__all__ = ["make_runner", "task", "tokenizer"]

HOSTILE = Path(__file__).parents[1] / "agent" / "hostile_mcp.py"
RECIPE = Recipe(name="r", policy={"model": "m"}, tasks={"family": "f:g"})  # type: ignore[arg-type]
CHAT = SimpleNamespace(escape_text=lambda text: text.replace("\ufffd", "?"), tool_problem=lambda schema: "")
NOWHERE = ScriptedSandboxes(printing("no session"))


def recipe(mode: str = "honest", **bounds: Any) -> Recipe:
    server = {"host_command": [sys.executable, "-S", "-E", str(HOSTILE), mode]}
    return RECIPE.but(mcp={"it": server}, tools=bounds)


async def pin(config: Recipe, *tools: str, folder: Path | None = None, **more: Any) -> ToolSource:
    tasks = with_sub_agent_tools([sample_task(tools=tools)], config.rollout.delegation)
    return await pin_tools(declared_tools(config.mcp, config.tools, HOSTILE.parent), tasks, NOWHERE, folder=folder, **more)


async def test_a_run_pins_the_offered_tools_and_resumes_with_them(tmp_path: Path, tokenizer: Any, task: Any, make_runner: Any) -> None:
    config = recipe(echo={"calls": 1})
    tools = await pin(config, "mcp:it", folder=tmp_path, chat=CHAT)
    echo = load_tools(("mcp:it", "submit"), None, tools)["echo"]
    assert echo.schema["function"]["description"] == "Give it back.?[2J"
    save_tool_offers(tools, tmp_path)
    before = (tmp_path / MCP_FILE).read_text()
    assert [offer["name"] for offer in json.loads(before)["it"]] == ["echo", "count"]
    assert (await pin(config, "mcp:it", folder=tmp_path)).servers["it"].offers == tools.servers["it"].offers
    with pytest.raises(UserError, match="its tools have changed since the run started: the tool echo takes other arguments"):
        await pin(recipe("changed"), "mcp:it/echo", folder=tmp_path)

    completions = [call("echo", text="a") + call("echo", text="b"), call("submit", answer="1")]
    runner = replace(make_runner(ScriptedPolicy.saying(tokenizer, *completions)), tools=tools)
    limits = replace(task.limits, turn_tokens=600, tool_timeout_s=30.0)
    episode = await runner.run(replace(task, tools=("mcp:it", "submit"), limits=limits), episode_id="e")
    outputs = [result.output for result in episode.trajectories[0].turns[0].tool_results]
    assert outputs[0] == "a" and "may be called 1 times" in outputs[1] and episode.answer == "1"


@pytest.mark.parametrize(
    ("config", "tools", "message"),
    [
        (recipe(), ("submit",), "mcp.it is unused: none of the first 1 tasks"),
        (recipe(nosuch={"calls": 1}), ("mcp:it", "submit"), "tools.nosuch is unused"),
        (RECIPE.but(tools={"submitt": {"description": "x"}}), ("submit",), "tools.submitt is unused"),
        (
            RECIPE.but(tools={"submit": {"arguments": {"text": "x"}}}),
            ("submit",),
            "submit.arguments.text: the tool has no such",
        ),
        (recipe("many"), ("mcp:it",), "mcp.it: it offers 100 tools"),
        (RECIPE.but(mcp={"it": {"host_command": ["/nowhere"]}}), ("mcp:it",), "install the program on this machine"),
        (RECIPE.but(mcp={"it": {"command": ["server"]}}), ("mcp:it",), "put the program into the image"),
    ],
)
async def test_unusable_settings_raise_before_the_run_starts(config: Recipe, tools: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        await pin(config, *tools)
    assert message in str(error.value)


async def test_descriptions_for_an_unknown_tool_raise() -> None:
    descriptions = {"submit": {"description": "Hand in."}, "python": {"description": "Compute."}}
    tools = await pin(RECIPE.but(tools=descriptions), "submit", every=False)
    assert load_tools(("submit",), None, tools)["submit"].schema["function"]["description"] == "Hand in."
    with pytest.raises(UserError, match=r"tools\.submit is unused"):
        await pin(RECIPE.but(tools=descriptions), every=False)


async def test_servers_that_only_sub_agents_use_are_started() -> None:
    config = recipe(echo={"calls": 1}).but({"rollout.agent": "delegating", "rollout.delegation.tools": ["mcp:it/echo"]})
    tools = await pin(config, "submit")
    assert list(load_tools(config.rollout.delegation.tools, None, tools)) == ["echo"]  # type: ignore[union-attr, arg-type]


async def test_servers_that_nothing_uses_are_not_started() -> None:
    assert (await pin(RECIPE, "submit")).servers == {}
    with pytest.raises(TaskError, match=r"declare the server in the recipe as mcp\.it"):
        load_tools(("mcp:it",), None, declared_tools(RECIPE.mcp, RECIPE.tools, HOSTILE.parent))
    assert (await pin(recipe("never-starts"), "submit", every=False)).servers == {}, "an evaluation starts the servers that its cases use"


def test_invalid_server_settings_raise() -> None:
    config = recipe().but("tools.echo.calls=3", {"mcp.web": {"url": "https://a.example/mcp"}})
    assert config.tools["echo"].calls == 3 and len(config.mcp) == 2
    for setting, message in {
        "mcp.it.url=http://a": "one of command, host_command and url",
        "mcp.it.together=true": "together does nothing with a program",
        "mcp.it.key_env=KEY": "key_env does nothing without a url",
        'mcp={"a b": {"command": ["x"]}}': "is not a server name",
        "mcp.it.url=file:///etc/passwd": "pattern",
        "tools.echo={}": "this section changes nothing",
        "mcp.it.nosuch=1": "unknown key",
        'mcp.it={"command": ["x"], "env": {"A": "env:A"}}': "env works only with host_command",
        'mcp.it={"url": "http://a", "key_env": "a b"}': "pattern",
    }.items():
        with pytest.raises(RecipeError, match=message):
            recipe().but(setting)


def test_a_missing_secret_is_reported_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    for server, key in (
        ({"host_command": ["x"], "env": {"T": "env:NOT_THERE"}}, "env.T"),
        ({"url": "http://a", "key_env": "NOT_THERE"}, "key_env"),
    ):
        with pytest.raises(UserError, match=rf"mcp\.it\.{key}: the environment variable NOT_THERE contains no secret") as error:
            declared_tools(RECIPE.but(mcp={"it": server}).mcp, {}, HOSTILE.parent)
        assert "export NOT_THERE" in error.value.fix


@pytest.mark.slow
async def test_an_external_server_that_hangs_in_every_episode_is_overdue() -> None:
    tools = declared_tools(recipe("hangs").mcp, {}, HOSTILE.parent)
    live = tools.servers["it"].live
    assert live is not None
    inside = RECIPE.but(mcp={"it": {"command": ["server"]}})
    assert declared_tools(inside.mcp, inside.tools, HOSTILE.parent).servers["it"].live is None, "an agent can stop a server in its sandbox"
    live._first_s = 0.5
    for mode, overdue in (("hangs", True), ("honest", False)):
        server = replace(tools.servers["it"], config=recipe(mode).mcp["it"], offers=usable_tools([ECHO, COUNT], ()))
        for _ in range(2):
            episode_tools = load_tools(("mcp:it",), None, RunTools(servers={"it": server}, bounds={}))
            result = call_tool(episode_tools["echo"], {"text": "a"}, None, Limits(tool_timeout_s=0.5), turn=1)
            if overdue:
                with pytest.raises(ToolUnavailable):
                    await result
            else:
                assert (await result).outcome.ok
            await episode_tools.close(timeout_s=5.0)
        assert live.overdue().startswith("MCP server it has not answered for 1 s") == overdue


async def test_unusable_tools_are_reported_and_the_others_offered(caplog: pytest.LogCaptureFixture) -> None:
    tools = await pin(recipe("some-odd"), "mcp:it")
    assert [tool.name for tool in tools.servers["it"].offers or ()] == ["echo"]
    assert "mcp.it: 3 of its tools are not offered" in caplog.text and "the tool count without a schema of type object" in caplog.text
    with pytest.raises(TaskError, match=r"offers no tool 'keys': it is excluded \(the tool keys with the key"):
        load_tools(("mcp:it/keys",), None, tools)
    server = recipe("some-odd").mcp["it"].model_dump() | {"only": ("echo", "keys")}
    with pytest.raises(UserError, match="it offers the tool keys with the key"):
        await pin(RECIPE.but(mcp={"it": server}), "mcp:it")
    chat = SimpleNamespace(escape_text=str, tool_problem=lambda schema: "no call" if schema["function"]["name"] == "echo" else "")
    assert [tool.name for tool in (await pin(recipe(), "mcp:it", chat=chat)).servers["it"].offers or ()] == ["count"]
