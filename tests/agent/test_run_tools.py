"""The servers and bounds of a recipe at the start of a run: listed once, pinned, and checked."""

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


def recipe(way: str = "honest", **bounds: Any) -> Recipe:
    server = {"host_command": [sys.executable, "-S", "-E", str(HOSTILE), way]}
    return RECIPE.but(mcp={"it": server}, tools=bounds)


async def begun(given: Recipe, *tools: str, folder: Path | None = None, **more: Any) -> ToolSource:
    tasks = with_sub_agent_tools([sample_task(tools=tools)], given.rollout.delegation)
    return await pin_tools(declared_tools(given.mcp, given.tools, HOSTILE.parent), tasks, NOWHERE, folder=folder, **more)


async def test_a_run_pins_the_offered_tools_and_resumes_with_them(tmp_path: Path, tokenizer: Any, task: Any, make_runner: Any) -> None:
    given = recipe(echo={"calls": 1})
    tools = await begun(given, "mcp:it", folder=tmp_path, chat=CHAT)
    shown = load_tools(("mcp:it", "submit"), None, tools)["echo"]
    assert shown.schema["function"]["description"] == "Give it back.?[2J"
    save_tool_offers(tools, tmp_path)
    before = (tmp_path / MCP_FILE).read_text()
    assert [one["name"] for one in json.loads(before)["it"]] == ["echo", "count"]
    assert (await begun(given, "mcp:it", folder=tmp_path)).servers["it"].offers == tools.servers["it"].offers
    with pytest.raises(UserError, match="differs from the one at the start of this run: the tool echo takes other arguments"):
        await begun(recipe("changed"), "mcp:it/echo", folder=tmp_path)

    said = [call("echo", text="a") + call("echo", text="b"), call("submit", answer="1")]
    runner = replace(make_runner(ScriptedPolicy.saying(tokenizer, *said)), tools=tools)
    limits = replace(task.limits, turn_tokens=600, tool_timeout_s=30.0)
    episode = await runner.run(replace(task, tools=("mcp:it", "submit"), limits=limits), episode_id="e")
    outputs = [result.output for result in episode.trajectories[0].turns[0].tool_results]
    assert outputs[0] == "a" and "may be called 1 times" in outputs[1] and episode.answer == "1"


@pytest.mark.parametrize(
    ("given", "tools", "says"),
    [
        (recipe(), ("submit",), "mcp.it does nothing: none of the first 1 tasks"),
        (recipe(nosuch={"calls": 1}), ("mcp:it", "submit"), "tools.nosuch does nothing"),
        (RECIPE.but(tools={"submitt": {"description": "x"}}), ("submit",), "tools.submitt does nothing"),
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
async def test_unusable_settings_are_refused_before_the_run_starts(given: Recipe, tools: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as error:
        await begun(given, *tools)
    assert says in str(error.value)


async def test_descriptions_for_an_unknown_tool_are_refused() -> None:
    one = {"submit": {"description": "Hand in."}, "python": {"description": "Compute."}}
    tools = await begun(RECIPE.but(tools=one), "submit", every=False)
    assert load_tools(("submit",), None, tools)["submit"].schema["function"]["description"] == "Hand in."
    with pytest.raises(UserError, match=r"tools\.submit does nothing"):
        await begun(RECIPE.but(tools=one), every=False)


async def test_servers_that_only_sub_agents_use_are_started() -> None:
    given = recipe(echo={"calls": 1}).but({"rollout.agent": "delegating", "rollout.delegation.tools": ["mcp:it/echo"]})
    tools = await begun(given, "submit")
    assert list(load_tools(given.rollout.delegation.tools, None, tools)) == ["echo"]  # type: ignore[union-attr, arg-type]


async def test_without_settings_nothing_is_requested() -> None:
    assert (await begun(RECIPE, "submit")).servers == {}
    with pytest.raises(TaskError, match=r"declare it in the recipe, as mcp\.it"):
        load_tools(("mcp:it",), None, declared_tools(RECIPE.mcp, RECIPE.tools, HOSTILE.parent))
    assert (await begun(recipe("never-starts"), "submit", every=False)).servers == {}, "an evaluation starts the servers that its cases use"


def test_servers_in_a_recipe() -> None:
    given = recipe().but("tools.echo.calls=3", {"mcp.web": {"url": "https://a.example/mcp"}})
    assert given.tools["echo"].calls == 3 and len(given.mcp) == 2
    for wrong, says in {
        "mcp.it.url=http://a": "one of command, host_command and url",
        "mcp.it.together=true": "together does nothing with a program",
        "mcp.it.key_env=KEY": "key_env does nothing without a url",
        'mcp={"a b": {"command": ["x"]}}': "is not a server name",
        "mcp.it.url=file:///etc/passwd": "pattern",
        "tools.echo={}": "it changes nothing",
        "mcp.it.nosuch=1": "unknown key",
        'mcp.it={"command": ["x"], "env": {"A": "env:A"}}': "env works only with host_command",
        'mcp.it={"url": "http://a", "key_env": "a b"}': "pattern",
    }.items():
        with pytest.raises(RecipeError, match=says):
            recipe().but(wrong)


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
async def test_a_server_outside_that_hangs_in_every_episode_is_overdue() -> None:
    tools = declared_tools(recipe("hangs").mcp, {}, HOSTILE.parent)
    live = tools.servers["it"].live
    assert live is not None
    inside = RECIPE.but(mcp={"it": {"command": ["server"]}})
    assert declared_tools(inside.mcp, inside.tools, HOSTILE.parent).servers["it"].live is None, "an agent can stop a server in its sandbox"
    live._first_s = 0.5
    for way, overdue in (("hangs", True), ("honest", False)):
        server = replace(tools.servers["it"], config=recipe(way).mcp["it"], offers=usable_tools([ECHO, COUNT], ()))
        for _ in range(2):
            box = load_tools(("mcp:it",), None, RunTools(servers={"it": server}, bounds={}))
            called = call_tool(box["echo"], {"text": "a"}, None, Limits(tool_timeout_s=0.5), turn=1)
            if overdue:
                with pytest.raises(ToolUnavailable):
                    await called
            else:
                assert (await called).outcome.ok
            await box.close(timeout_s=5.0)
        assert live.overdue().startswith("MCP server it has answered nothing for 1 s") == overdue


async def test_unusable_tools_are_reported_and_the_others_offered(caplog: pytest.LogCaptureFixture) -> None:
    tools = await begun(recipe("some-odd"), "mcp:it")
    assert [tool.name for tool in tools.servers["it"].offers or ()] == ["echo"]
    assert "mcp.it: 3 of its tools are not offered" in caplog.text and "the tool count without a schema of type object" in caplog.text
    with pytest.raises(TaskError, match=r"offers no tool 'keys', which is excluded: the tool keys with the key"):
        load_tools(("mcp:it/keys",), None, tools)
    wanted = recipe("some-odd").mcp["it"].model_dump() | {"only": ("echo", "keys")}
    with pytest.raises(UserError, match="it offers the tool keys with the key"):
        await begun(RECIPE.but(mcp={"it": wanted}), "mcp:it")
    chat = SimpleNamespace(escape_text=str, tool_problem=lambda schema: "no call" if schema["function"]["name"] == "echo" else "")
    assert [tool.name for tool in (await begun(recipe(), "mcp:it", chat=chat)).servers["it"].offers or ()] == ["count"]
